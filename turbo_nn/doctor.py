"""What this machine can run and why not more; which layers of a run deserve bf16.

python -m turbo_nn.doctor
python -m turbo_nn.doctor --log precision.jsonl
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
from importlib import metadata

import torch

import turbo_ops
from turbo_nn import precision
from turbo_ops import native
from turbo_ops.arch import arch, fp8_dtype

# dB that a cast must keep: what E4M3 and E5M2 give to normal values is 31 and 25, to heavy tails less
LEAST_SNR = {"input": 25.0, "weight": 25.0, "grad_output": 20.0}
MOST_UNDERFLOW = 0.05  # share of elements that become 0
MOST_OVERFLOW = 0.001  # share that saturates


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "turbo_nn.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", metavar="FILE.jsonl", help="a precision log: name the layers for bf16")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if not options.log:
        found = machine()
        print(json.dumps(found, indent=1) if options.json else described(found))
        return 0
    try:
        sick = sick_layers(precision.read(options.log))
    except (OSError, ValueError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    print(json.dumps(sick, indent=1) if options.json else advice(sick))
    return 0


def machine() -> dict:
    """Versions, GPU, FP8 types, the native library, pins, and every backend's answer for typical inputs."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    build = {"reason": native.reason()}
    if build["reason"] is None:
        build |= {"gpu_archs": " ".join(native.archs()) or "none: a CPU build"}
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "triton", "transformers", "accelerate")},
        },
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else "CPU: all runs on references",
        "arch": arch(device),
        "fp8": {name: str(fp8_dtype(name, device)).removeprefix("torch.") for name in ("e4m3", "e5m2")},
        "native": build,
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("TURBO_")
        },
        "backends": _answers(device),
    }


def _answers(device: torch.device) -> dict[str, dict[str, str | None]]:
    """op and input -> backend -> why not, None where it accepts."""
    bf16, e4m3 = torch.bfloat16, fp8_dtype("e4m3", device)
    x = torch.zeros(256, 512, dtype=bf16, device=device)
    gain = torch.zeros(512, dtype=bf16, device=device)
    tensor, tile, square, mx = (
        turbo_ops.Cast("e4m3", block, scale)
        for block, scale in (((0, 0), "fp32"), ((1, 128), "fp32"), ((128, 128), "fp32"), ((1, 32), "e8m0"))
    )
    products = {"tensorwise": (tensor, tensor), "blockwise": (tile, square), "mxfp8": (mx, mx)}
    found = {"quantize to FP8, 1x128": _explain("quantize_both", x, e4m3, 1, 128, torch.float32)}
    found["gemm bf16"] = _explain("gemm", x, x)
    for name, casts in products.items():
        with turbo_ops.force(quantize="reference"):
            (a, a_scale), (b, b_scale) = (turbo_ops.cast(x, how) for how in casts)
        found[f"gemm {name}"] = _explain("gemm", a, b, a_scale, b_scale)
    found["rms_norm"] = _explain("rms_norm_fwd", x, gain, 1e-6)
    return found


def _explain(name: str, *args: object) -> dict[str, str | None]:
    with contextlib.redirect_stdout(io.StringIO()):
        return turbo_ops.explain(name, *args)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def described(found: dict) -> str:
    lines = [", ".join(f"{name} {value or 'missing'}" for name, value in found["versions"].items())]
    lines.append(f"device: {found['device']} ({found['arch']}), FP8: {', '.join(found['fp8'].values())}")
    library = found["native"]
    lines.append(f"native library: {library['reason'] or 'built for ' + library['gpu_archs']}")
    for name, value in found["environment"].items():
        lines.append(f"{name}={value}")
    for what, backends in found["backends"].items():
        lines.append(what)
        lines += [f"  {backend:10} {reason or 'accepts'}" for backend, reason in backends.items()]
    return "\n".join(lines)


def sick_layers(rows: list[dict]) -> list[dict]:
    """What breaks a limit by its median over the run, worst SNR first: layer, operand, why, snr_db."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["layer"], row["operand"]), []).append(row)
    found = []
    for (layer, operand), group in groups.items():
        middle = {name: _median(group, name) for name in precision.NUMBERS}
        snrs = [snr for snr in (middle["snr_db"], middle["snr_t_db"]) if snr is not None]
        reasons = []
        if snrs and min(snrs) < LEAST_SNR[operand]:
            reasons.append(f"SNR {min(snrs):.1f} dB, under {LEAST_SNR[operand]:.0f}")
        for name, most in (("underflow", MOST_UNDERFLOW), ("overflow", MOST_OVERFLOW), ("nonfinite", 0.0)):
            if (middle[name] or 0.0) > most:
                reasons.append(f"{name} {middle[name]:.2%}")
        if reasons:
            best = max(group[-1]["what_if"].items(), key=lambda item: item[1] or 0.0)
            better = f"; {best[0]} would give {best[1]:.1f} dB" if best[1] else ""
            why = ", ".join(reasons) + better
            found.append({"layer": layer, "operand": operand, "why": why, "snr_db": min(snrs, default=None)})
    return sorted(found, key=lambda one: one["snr_db"] if one["snr_db"] is not None else 0.0)


def _median(rows: list[dict], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else None


def advice(found: list[dict]) -> str:
    if not found:
        return "every layer keeps its precision: nothing needs bf16"
    lines = [f"{one['layer']} {one['operand']}: {one['why']}" for one in found]
    layers = dict.fromkeys(one["layer"] for one in found)
    rules = [f'"{layer}": bf16' for layer in layers]
    return "\n".join([*lines, "", "# in a policy, before the other rules:", *rules])


if __name__ == "__main__":
    sys.exit(main())
