"""Which GPU a device is, and the FP8 types of that GPU. Nothing is asked before first use."""

import os

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of kernels: all compute in fp32
# gfx942 has only the FNUZ encodings; gfx950, NVIDIA and the CPU references use OCP.
FP8_FNUZ = {"e4m3": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2fnuz}
FP8_OCP = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_DTYPES = frozenset((*FP8_FNUZ.values(), *FP8_OCP.values()))
EMULATED = ("gfx942", "gfx950", "sm90", "sm100", "cpu")


_ARCHS: dict[torch.device, str] = {}


def arch(device: torch.device) -> str:
    """`gfx942`, `gfx950`, `sm90`, ... or `cpu`. TURBO_ARCH=gfx942 answers for every device (numerics only).

    Raises ValueError for a TURBO_ARCH that is none of `EMULATED`.
    """
    if device not in _ARCHS:
        emulated = os.environ.get("TURBO_ARCH", "").strip().lower()
        if emulated and emulated not in EMULATED:
            raise ValueError(
                f"TURBO_ARCH={emulated!r} is unknown: use one of {', '.join(EMULATED)}, or unset it"
            )
        _ARCHS[device] = emulated or hardware(device)
    return _ARCHS[device]


def hardware(device: torch.device) -> str:
    """The arch of `device` whatever TURBO_ARCH says: what code for it must be compiled for."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def fp8_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype that "e4m3" or "e5m2" means on `device`."""
    return (FP8_FNUZ if arch(device) == "gfx942" else FP8_OCP)[name]


# What torch.compiler.assume_constant_result sets; calling it imports torch._dynamo, which takes a second.
fp8_dtype._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reset() -> None:
    """Read TURBO_ARCH and the devices again."""
    _ARCHS.clear()
