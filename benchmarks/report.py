"""Make docs/performance.md from benchmarks/results/<gpu>/*.json; no number in it is typed by hand.

python benchmarks/report.py            # write it
python benchmarks/report.py --check    # exit 1 where it is not what the results give
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tables import Table, ceilings_line, machine_line, markdown, tables  # noqa: E402

INTRODUCTION = """# Performance

Made by `python benchmarks/report.py` from the JSON of real runs (`python benchmarks/bench.py --output`).
Do not edit.

- Times are medians by device events, the L2 cache flushed before each run. A step is forward + backward,
  casts included, gradients dropped before it. Compare within a run: runs differ by some 3 %, and a GPU's
  clock depends on the data.
- `speed` is the baseline's time over this one in the same run: above 1 is faster. `cost` is the inverse.
- Ceilings are torch's copy (bytes read + written) and torch's bf16 and FP8 tensorwise matmul, in that run.
  Rates of memory-bound ops count every input read once and every output written once.
- No number without a check: ops against their reference (casts bit by bit, products by SNR), layers by SNR
  in dB, models by their loss.
"""


def performance(results: Path, name: str) -> str:
    """The page for every result under `results`, which the page calls `name`."""
    sections = []
    for path in sorted(results.glob("*/*.json")):
        result = json.loads(path.read_text())
        source = f"{name}/{path.relative_to(results)}"
        if {"machine", "ceilings", "rows"} <= result.keys():
            sections.append(section(result, source))
        elif {"machine", "runs"} <= result.keys():
            sections.append(convergence(result, source))
    return "\n".join([INTRODUCTION, *(sections or ["There are no results yet.\n"])])


def section(result: dict, source: str) -> str:
    head = [f"## {source}", "", f"{machine_line(result['machine'])}.", ""]
    head += [f"Ceilings: {ceilings_line(result['ceilings'])}.", ""]
    body = (f"{markdown(table)}\n\nFrom `{source}`.\n" for table in tables(result))
    return "\n".join([*head, *body])


def convergence(result: dict, source: str) -> str:
    """What recipes/convergence.py wrote: the last held-out loss of each recipe."""
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    rows = [
        (name, str(run["steps"]), f"{run['loss']:.4f}", f"{run['gap']:+.2%}")
        for name, run in result["runs"].items()
    ]
    table = Table(
        f"{result['model']} trained from nothing on {result['data']}",
        ("recipe", "steps", "held-out loss, nats a token", "gap to bf16"),
        rows,
    )
    where = f"{'; '.join(machine['gpus']) or 'CPU'}, {versions}."
    return f"## {source}\n\n{where}\n\n{markdown(table)}\n\nFrom `{source}`.\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is stale")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance.md")
    options = parser.parse_args(argv)
    page = performance(options.results, "benchmarks/results")
    if not options.check:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(page)
        return 0
    if options.output.exists() and options.output.read_text() == page:
        return 0
    print(
        f"{options.output.name} is not what the results give: run python benchmarks/report.py",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
