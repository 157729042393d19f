"""Train the same model from nothing under several recipes, same data and seed, and compare held-out losses.

    python recipes/convergence.py --data corpus.txt --steps 2000 --output out/convergence

Under --output: a folder of finetune.py for each recipe, curves.png, and convergence.json with the machine,
the losses and each recipe's gap to bf16. Exit status 1 where a run failed or a gap is over 1 %.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import curves

import turbo_nn
from turbo_nn import doctor

LARGEST_GAP = 0.01
FINETUNE = Path(__file__).parent / "finetune.py"
BASE = "none"  # bf16 by autocast, no patch


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    output = Path(options.output)
    names = [BASE, *(name for name in options.recipes if name != BASE)]
    waiting, running, failed = list(names), {}, []
    while waiting or running:
        while waiting and len(running) < options.parallel:
            name = waiting.pop(0)
            (output / name).mkdir(parents=True, exist_ok=True)
            log = (output / name / "log.txt").open("w")
            running[name] = subprocess.Popen(command(options, name), stdout=log, stderr=subprocess.STDOUT)
        name = next(iter(running))
        if running.pop(name).wait():
            failed.append(name)
            print(f"{name} failed: {(output / name / 'log.txt').read_text()[-500:]}", flush=True)
    runs = {name: curves.read(output / name / "metrics.jsonl") for name in names if name not in failed}
    if BASE in failed:
        return 1
    found = summary(runs)
    machine = {key: doctor.machine()[key] for key in ("versions", "toolkit", "gpus")}
    record = {"model": options.model, "data": Path(options.data).name, "machine": machine, "runs": found}
    (output / "convergence.json").write_text(json.dumps(record, indent=1) + "\n")
    curves.draw_gaps(found, output / "curves.png", f"{options.model} from nothing, {options.steps} steps")
    for name, run in found.items():
        print(f"{name:24} held-out loss {run['loss']:.4f}  gap {run['gap']:+.2%}")
    return int(bool(failed) or any(run["gap"] > LARGEST_GAP for run in found.values()))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a text")
    parser.add_argument("--model", default="llama-8m", help="a shape of recipes/shapes (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--output", default="out/convergence", help="(%(default)s)")
    casting = [name for name in turbo_nn.RECIPES if name != "bf16"]
    parser.add_argument("--recipes", nargs="+", default=casting, help="(all that cast)")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, on one GPU (%(default)s)")
    parser.add_argument("rest", nargs="*", help="behind --: options for finetune.py")
    return parser.parse_args(argv)


def command(options: argparse.Namespace, name: str) -> list[str]:
    given = {
        "--model": options.model,
        "--data": options.data,
        "--recipe": name,
        "--steps": options.steps,
        "--output": Path(options.output) / name,
        "--eval-every": max(options.steps // 20, 1),
        "--batch-size": 16,
        "--seq-len": 256,
        "--lr": 1e-3,
        "--warmup": 100,
    }
    words = [str(word) for pair in given.items() for word in pair]
    return [sys.executable, str(FINETUNE), *words, "--random-init", "--convert-small", *options.rest]


def summary(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """The last held-out loss of each run, its gap to the first run's, and the curve [step, loss]."""
    held_out = {
        name: [[row["step"], row["eval_loss"]] for row in rows if "eval_loss" in row]
        for name, rows in runs.items()
    }
    base = held_out[BASE][-1][1]
    return {
        "bf16" if name == BASE else name: {
            "loss": curve[-1][1],
            "gap": curve[-1][1] / base - 1,
            "steps": curve[-1][0],
            "curve": curve,
        }
        for name, curve in held_out.items()
    }


if __name__ == "__main__":
    sys.exit(main())
