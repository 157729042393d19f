"""`make demo`: fine-tune a real model in FP8 beside a twin without it, same seed and data, and compare.

Each run is a process of its own, so that its peak memory is its own. On a CPU: fp32, 16 steps of 4x64 tokens,
some 4 minutes. On a GPU: bf16, 200 steps of 8x512 tokens; SmolLM2's layers, 576 wide, are too small to gain
there (--convert-small takes them all the same): its tokens/s are not what FP8 gives a large model.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import curves
import downloads
import torch

HERE = Path(__file__).parent
GAP_LIMIT = 2.0  # %
LAST = 5  # steps that a final loss is the mean of
PROMPT = "To be, or not to be, that is"


def main() -> int:
    options = parse()
    try:
        model, data = options.model or str(downloads.model()), options.data or str(downloads.text())
    except ValueError as error:
        print(f"demo.py: {error}", file=sys.stderr)
        return 2
    output = Path(options.output)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    if not options.random_init:
        print(f"\nbefore  {generate(model)}\n", flush=True)
    runs = {}
    for name in ("none", options.recipe):
        print(f"== fine-tuning with --recipe {name}", flush=True)
        code = subprocess.call(
            [sys.executable, str(HERE / "finetune.py"), *arguments(options, model, data, name)]
        )
        if code:
            return code
        runs["twin" if name == "none" else name] = output / name
    if not options.random_init:
        print(f"\nafter   {generate(str(output / options.recipe / 'model'))}\n")
    return summary(runs, output)


def parse() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        "demo.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="hub id or path (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", help="text file, folder or hub dataset (default: Shakespeare)")
    parser.add_argument("--recipe", default="fp8_blockwise")
    parser.add_argument("--steps", type=int, default=200 if gpu else 16)
    parser.add_argument("--batch-size", type=int, default=8 if gpu else 4)
    parser.add_argument("--seq-len", type=int, default=512 if gpu else 64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="out/demo")
    parser.add_argument("--random-init", action="store_true", help="train from nothing; no text is generated")
    return parser.parse_args()


def arguments(options: argparse.Namespace, model: str, data: str, recipe: str) -> list[str]:
    """Of finetune.py, the same for both runs but for the recipe."""
    numbers = {name: getattr(options, name) for name in ("steps", "batch_size", "seq_len", "seed")}
    given = {
        "model": model,
        "data": data,
        "recipe": recipe,
        "output": f"{options.output}/{recipe}",
        **numbers,
    }
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, "--convert-small", "--lr", "2e-4", *(["--random-init"] if options.random_init else [])]


def generate(model: str) -> str:
    """A greedy continuation in plain transformers, in a process that turbo_nn is not part of."""
    command = [sys.executable, str(HERE / "generate.py"), model, PROMPT]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def summary(runs: dict[str, Path], output: Path) -> int:
    """Print the table; 1 where the final losses are further apart than GAP_LIMIT."""
    metrics = {name: curves.read(folder / "metrics.jsonl") for name, folder in runs.items()}
    losses = {name: final(rows, "loss") for name, rows in metrics.items()}
    twin = losses["twin"]
    table = [("", "final loss", "gap", "patched", "left", "tokens/s", "peak GiB")]
    for name, folder in runs.items():
        verdicts = (
            json.loads((folder / "report.json").read_text()) if (folder / "report.json").exists() else []
        )
        left = sum(v["reason"] is not None for v in verdicts)
        rows = metrics[name]
        table.append(
            (
                name,
                f"{losses[name]:.4f}",
                f"{100 * (losses[name] / twin - 1):+.2f} %",
                str(len(verdicts) - left),
                str(left),
                f"{final(rows, 'tokens_per_second'):.0f}",
                f"{max(row.get('peak_memory_gib', 0) for row in rows):.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print(f"losses and tokens/s: mean of the last {LAST} steps")
    print(f"loss curves: {curves.draw(metrics, output / 'loss.png', 'the same seed and data')}")
    gap = max(abs(100 * (loss / twin - 1)) for loss in losses.values())
    if gap > GAP_LIMIT:
        print(f"the final losses are {gap:.2f} % apart, over the limit of {GAP_LIMIT} %", file=sys.stderr)
    return int(gap > GAP_LIMIT)


def final(rows: list[dict], key: str) -> float:
    values = [row[key] for row in rows if key in row][-LAST:]
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
