"""Measure every backend on the benchmark cases of this GPU and write `tuned/<arch>.json` for review."""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from turbo_ops import tuning
from turbo_ops.arch import arch
from turbo_ops.cases import cases
from turbo_ops.dispatch import REGISTRY

MARGIN = (
    0.97  # an entry is worth keeping where the winner beats the contract's own order by 3 %, a run's spread
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m turbo_ops.tuning", description=__doc__)
    parser.add_argument("--op", choices=sorted(REGISTRY), action="append", help="only this op (repeatable)")
    parser.add_argument("--size", choices=("test", "bench"), default="bench", help="which cases to measure")
    parser.add_argument("--output", type=Path, help="the table to write (default: tuned/<arch>.json)")
    options, measured = parser.parse_args(argv), False
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    output = options.output or tuning.TABLES / f"{arch(device)}.json"
    try:  # before minutes of measuring
        output.parent.mkdir(parents=True, exist_ok=True)
        table = json.loads(output.read_text()) if output.exists() else {}
        if not os.access(output if output.exists() else output.parent, os.W_OK):
            raise PermissionError("not writable")
    except (OSError, ValueError) as error:
        parser.error(f"--output {output}: {error}")
    for name in options.op or sorted(REGISTRY):
        found = tuned_entries(name, options.size, device)
        if found is not None:
            table[name] = found
            measured = True
    if not measured:
        print(
            f"nothing was measured on {arch(device)}: no backend accepts its tensors; {output} is as it was"
        )
        return 1
    output.write_text(json.dumps({k: v for k, v in table.items() if v}, indent=1, sort_keys=True) + "\n")
    print(f"wrote {output}")
    return 0


def tuned_entries(name: str, size: str, device: torch.device) -> dict[str, str] | None:
    """Table entries of one op: keys whose fastest backend is not the one that the contract's order gives.

    None where no backend took a case.
    """
    op, entries, measured = REGISTRY[name], {}, False
    for case, make in cases(op, size, device).items():
        args = make()
        times = tuning.measure(op, args, op.order)
        if not times:
            continue
        measured = True
        default, fastest = next(iter(times)), min(times, key=times.__getitem__)
        if times[fastest] < MARGIN * times[default]:
            entries[tuning.key(args)] = fastest
        row = "  ".join(f"{backend} {ms:.4f} ms" for backend, ms in times.items())
        print(f"{name:18} {case:40} {row}", flush=True)
    return entries if measured else None


if __name__ == "__main__":
    sys.exit(main())
