"""Measure ops, layers and models on this machine; print tables and write JSON.

    python benchmarks/bench.py --output ops.json          # every op and layer
    python benchmarks/bench.py --op gemm --backend triton # one op, one backend
    python benchmarks/bench.py --layers linear --peers --model

Naming ops leaves the layers out, naming layers leaves the ops out. A backend whose result is not the
reference's gets a reason and no number. Exit status 1 where a row is wrong or failed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # numerics: what is close enough is said once, by the contract tests
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import tables  # noqa: E402
from benchmarks.glue import measure_loss, measure_rope, measure_swiglu  # noqa: E402
from benchmarks.host import measure_host  # noqa: E402
from benchmarks.layers import measure_linear, measure_norms  # noqa: E402
from benchmarks.machine import facts, measure_ceilings  # noqa: E402
from benchmarks.mixtures import measure_grouped, measure_moe  # noqa: E402
from benchmarks.ops import measure_ops  # noqa: E402
from benchmarks.session import Session  # noqa: E402
from benchmarks.whole_model import MODELS, measure_model  # noqa: E402
from turbo_ops.dispatch import REGISTRY  # noqa: E402
from turbo_ops.policy import BACKENDS  # noqa: E402

LAYERS: dict[str, Callable[[Session], None]] = {
    "linear": measure_linear,
    "rms_norm": measure_norms,
    "swiglu": measure_swiglu,
    "rope": measure_rope,
    "loss": measure_loss,
    "grouped": measure_grouped,
    "moe": measure_moe,
}


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, options.size, options.quick, options.peers)
    machine = facts(device)
    if options.output:
        session.after_part = lambda: save(options.output, machine, session)
    for name, measure in parts(options):
        session.part(name, "", lambda measure=measure: measure(session))
    print(tables.text(result(machine, session)))
    return int(any(row["status"] in ("wrong", "failed") for row in session.rows))


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--op", nargs="*", choices=sorted(REGISTRY), help="only these ops (none: no op)")
    parser.add_argument(
        "--backend", nargs="+", choices=BACKENDS, default=[], help="of ops (default: all but reference)"
    )
    parser.add_argument(
        "--layers", nargs="*", choices=tuple(LAYERS), help="only these layers (none: no layer)"
    )
    parser.add_argument(
        "--model", nargs="*", choices=tuple(MODELS), help="also models of 4 layers (alone: all of them)"
    )
    parser.add_argument(
        "--peers", nargs="?", const="", metavar="WORD",
        help="also torchao, TransformerEngine, Liger; those with WORD in their name",
    )  # fmt: skip
    parser.add_argument("--size", choices=("bench", "test"), default="bench", help="which cases")
    parser.add_argument(
        "--quick", action="store_true", help="two cases an op, one shape a layer, few repeats"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    options = parser.parse_args(argv)
    if options.op is None:
        options.op = sorted(REGISTRY) if options.layers is None else []
        options.layers = list(LAYERS) if options.layers is None else options.layers
    options.layers = options.layers or []
    options.model = list(MODELS) if options.model == [] else options.model or []
    return options


def parts(options: argparse.Namespace) -> list[tuple[str, Callable[[Session], None]]]:
    found: list[tuple[str, Callable[[Session], None]]] = [("ceilings", measure_ceilings)]
    for name in options.op:
        found.append((name, lambda session, name=name: measure_ops(session, [name], options.backend)))
    if "linear" in options.layers:
        found.append(("host", measure_host))
    found += [(name, LAYERS[name]) for name in options.layers]
    found += [
        (f"model {name}", lambda session, name=name: measure_model(session, name)) for name in options.model
    ]
    return found


def result(machine: dict, session: Session) -> dict:
    return {"machine": machine, "ceilings": session.ceilings, "rows": session.rows}


def save(path: Path, machine: dict, session: Session) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result(machine, session), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
