"""What this machine runs, on which backends and why not on others; which layers of a run deserve bf16.

    python -m turbo_nn.doctor                          the machine
    python -m turbo_nn.doctor --log precision.jsonl    a log that turbo_nn.precision_log wrote

Exit code 2, with one line on stderr, for a file that is no log.
"""

import argparse
import collections
import json
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Iterable
from importlib import metadata

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from turbo_nn import precision
from turbo_ops import UnsupportedError, native
from turbo_ops.arch import arch, fp8_dtype
from turbo_ops.cases import Op, cases, ops

# Limits on the median of what a layer's samples say: one odd step decides nothing.
# dB of a cast. E4M3 keeps 31.5 and E5M2 25.4 of values with normal exponents; lower means that many are not.
LEAST_SNR = {"e4m3": 25.0, "e5m2": 20.0}
MOST = {
    "underflow": 0.05,  # share of values lost to 0: of normally distributed ones E4M3 loses 1e-5
    "overflow": 0.001,  # share past a delayed scale: amax may grow from step to step, the bulk may not
}
PACKAGES = ("torch", "triton", "transformers", "accelerate")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m turbo_nn.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--log", metavar="FILE", help="name the layers of a precision log that deserve bf16")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    options = parser.parse_args(argv)
    try:
        if options.log is None:
            found = machine()
            text = described
        else:
            found = diagnosis(precision.read(options.log))
            text = advice
    except (OSError, ValueError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if options.json else text(found))
    return 0


def machine() -> dict:
    """Versions, devices, FP8 types, the native library, pins, and what each op runs on, as plain data."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "toolkit": {"hip": torch.version.hip, "cuda": torch.version.cuda},
        "gpus": [
            f"{torch.cuda.get_device_name(index)}, {arch(torch.device('cuda', index))}"
            for index in range(torch.cuda.device_count())
        ],
        "arch": arch(device),
        "fp8": {name: str(fp8_dtype(name, device)).removeprefix("torch.") for name in ("e4m3", "e5m2")},
        "native": {"reason": native.reason(), "gpu_archs": native.archs()},
        "pins": {name: value for name, value in sorted(os.environ.items()) if name.startswith("TURBO_")},
        "ops": {op.name: answers(op, device) for op in ops()},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def answers(op: Op, device: torch.device) -> dict:
    """What runs an op on models' shapes, backend -> inputs, and refusals, backend -> reason -> inputs."""
    runs: dict[str, list[str]] = {}
    refuses: dict[str, dict[str, list[str]]] = {}
    # fake: gigabytes need not exist to be refused; the warning of a slow reference is what is printed here
    with FakeTensorMode(), warnings.catch_warnings(action="ignore"):
        for name, make in cases(op, "bench", device).items():
            args = make()
            for backend in (*op.order, "reference"):
                reason = op.refusal(backend, args)
                if reason is not None:
                    refuses.setdefault(backend, {}).setdefault(reason, []).append(name)
            try:
                chosen = op.choose(*args).name
            except UnsupportedError as error:  # of a pin: the message says which
                chosen = f"nothing: {error}"
            runs.setdefault(chosen, []).append(name)
    return {"runs": runs, "refuses": refuses}


def described(found: dict) -> str:
    """`machine()` as lines."""
    versions = [f"{name} {version or 'missing'}" for name, version in found["versions"].items()]
    toolkit = [f"{name} {version}" for name, version in found["toolkit"].items() if version]
    lines = [", ".join(versions + toolkit)]
    lines += [f"GPU {index}: {name}" for index, name in enumerate(found["gpus"])]
    if not found["gpus"]:
        lines.append("no GPU: all runs on references and CPU kernels")
    lines.append(f"FP8 on {found['arch']}: {', '.join(found['fp8'].values())}")
    built = ", ".join(found["native"]["gpu_archs"]) or "the CPU only"
    lines.append(f"native library: {found['native']['reason'] or f'for {built}'}")
    lines += [f"{name}={value}" for name, value in found["pins"].items()] or ["no TURBO_* pin is set"]
    for op, said in found["ops"].items():
        many = len(said["runs"]) > 1
        runs = [f"{name} ({_names(inputs)})" if many else name for name, inputs in said["runs"].items()]
        lines.append(f"{op}: {', '.join(runs)}")
        total = sum(map(len, said["runs"].values()))
        for backend, reasons in said["refuses"].items():
            for reason, inputs in reasons.items():
                which = "" if len(inputs) == total else f" ({_names(inputs)})"
                lines.append(f"  {backend}: {reason}{which}")
    return "\n".join(lines)


def _names(inputs: list[str]) -> str:
    return inputs[0] if len(inputs) == 1 else f"{inputs[0]} and {len(inputs) - 1} more"


def diagnosis(rows: list[dict]) -> dict:
    """What breaks a limit, worst SNR first, and the policy that turns those layers to bf16."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["operand"]), []).append(row)
    found = [finding for group in groups.values() if (finding := _finding(group))]
    found.sort(key=lambda one: (one["snr_db"] is not None, one["snr_db"]))
    broken = [one for one in groups.values() if any(row["amax"] is None for row in one)]
    return {
        "layers": len({layer for layer, _ in groups}),
        "findings": found,
        "nonfinite": [
            {
                "layer": group[0]["layer"],
                "operand": group[0]["operand"],
                "steps": [row["step"] for row in group if row["amax"] is None],
            }
            for group in broken
        ],
        "policy": policy(rows, {one["layer"] for one in found}) if found else {},
    }


def _finding(group: list[dict]) -> dict | None:
    """What is wrong with one operand of one layer, whose rows these are; None where nothing is."""
    snr = _median(precision.lower_snr(row) for row in group)
    last = group[-1]
    reasons, least = [], LEAST_SNR.get(last["dtype"], 0.0)
    if snr is not None and snr < least:
        reasons.append(f"SNR {snr:.1f} dB, under {least:.0f}")
    for name, most in MOST.items():
        share = _median(row[name] for row in group)
        if share is not None and share > most:
            reasons.append(f"{name} {share:.2%}, over {most:.1%}")
    if not reasons:
        return None
    others = {name: _median(row["what_if"].get(name) for row in group) for name in last["what_if"]}
    best, would = max(
        ((name, db) for name, db in others.items() if db is not None), key=lambda x: x[1], default=("", 0.0)
    )
    if would > max(snr or 0.0, least):
        reasons.append(f"{best} would give {would:.1f} dB")
    facts = {name: last[name] for name in ("layer", "operand", "recipe")}
    return facts | {"snr_db": snr, "why": "; ".join(reasons)}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def policy(rows: list[dict], sick: set[str]) -> dict[str, str]:
    """Pattern -> recipe: bf16 for sick layers, for the others what they have now."""
    now = {row["layer"]: row["recipe"] for row in rows}
    healthy = {layer: recipe for layer, recipe in now.items() if layer not in sick}
    usual = collections.Counter(healthy.values()).most_common(1)
    rest = usual[0][0] if usual else "bf16"
    others = {layer: recipe for layer, recipe in healthy.items() if recipe != rest}
    return {layer: "bf16" for layer in now if layer in sick} | others | {"*": rest}


def advice(found: dict) -> str:
    """`diagnosis(...)` as lines."""
    lines = [f"{one['layer']} {one['operand']}: {one['why']}" for one in found["findings"]]
    lines += [
        f"{one['layer']} {one['operand']}: NaN or inf, which no recipe mends, at step {one['steps'][0]}"
        for one in found["nonfinite"]
    ]
    if not found["findings"]:
        return "\n".join([*lines, f"all {found['layers']} layers keep their precision: nothing needs bf16"])
    rules = [f"{json.dumps(pattern)}: {recipe}" for pattern, recipe in found["policy"].items()]
    if "custom" in found["policy"].values():
        rules.insert(0, "# custom: put the name of your own recipe, and the recipe under `recipes:`")
    head = '# policy.yaml, for turbo_nn.patch(model, recipe="policy.yaml")'
    return "\n".join([*lines, "", head, *rules])


if __name__ == "__main__":
    sys.exit(main())
