"""What a Triton kernel can run on."""

import torch
import triton
from torch import Tensor

from turbo_ops.arch import FP8_DTYPES, FP8_FNUZ, FP8_OCP, hardware

# FP8 types with instructions of their own; OCP types on gfx942 compile to some 5000 VALU instructions.
NATIVE_FP8 = {
    "gfx942": frozenset(FP8_FNUZ.values()),
    **dict.fromkeys(("gfx950", "sm89", "sm90", "sm100", "sm103", "sm120"), frozenset(FP8_OCP.values())),
}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return triton.knobs.runtime.interpret


def refuses_device(x: Tensor, *dtypes: torch.dtype) -> str | None:
    """Why no kernel runs on x's device with FP8 data of these dtypes."""
    if interpreted():
        return None
    if x.device.type != "cuda":
        return f"needs a GPU, the tensors are on {x.device}"
    arch = hardware(x.device)
    for dtype in dtypes:
        if dtype in FP8_DTYPES and dtype not in NATIVE_FP8.get(arch, ()):
            native = ", ".join(str(d) for d in NATIVE_FP8.get(arch, ())) or "no FP8 type"
            return f"{arch} has instructions for {native}, not for {dtype}"
    return None
