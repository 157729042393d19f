"""csrc/rms_norm: one source for HIP, CUDA and a plain CPU loop."""

import torch
from torch import Tensor

from turbo_ops import native
from turbo_ops.arch import DTYPES, hardware
from turbo_ops.rms_norm.op import rms_norm_bwd, rms_norm_fwd

native.load()

MAX_WIDTH, MAX_ODD_WIDTH = 16384, 8192  # 512 threads hold 32 elements each, 16 where they move one by one

for contract in (rms_norm_fwd, rms_norm_bwd):
    torch.library.register_fake(f"turbo::{contract.name}", contract.reference)


def refuses(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> str | None:
    if x.dtype not in DTYPES or weight.dtype not in (x.dtype, torch.float32):
        return f"x must be fp32, bf16 or fp16 and weight that or fp32, are {x.dtype} and {weight.dtype}"
    if x.ndim != 2 or not (x.is_contiguous() and weight.is_contiguous()):
        return f"x and weight must be contiguous, have strides {x.stride()} and {weight.stride()}"
    if x.device.type == "cpu":
        return None
    most = MAX_ODD_WIDTH if x.shape[1] * x.element_size() % 16 else MAX_WIDTH
    if x.shape[1] > most:
        return f"D={x.shape[1]} is over {most}, what a block holds"
    if x.device.type != "cuda" or hardware(x.device) not in native.archs():
        built = ", ".join(native.archs()) or "the CPU"
        return (
            f"the native library is built for {built}, the tensors are on {x.device} ({hardware(x.device)})"
        )
    return None


def refuses_bwd(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, round_first: bool
) -> str | None:
    if not grad_y.is_contiguous():
        return f"grad_y must be contiguous, has strides {grad_y.stride()}"
    return refuses(x, weight, 0.0, offset, round_first)


@rms_norm_fwd.backend("native", refuses=refuses)
def _(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    return torch.ops.turbo.rms_norm_fwd(x, weight, eps, offset, round_first)


@rms_norm_bwd.backend("native", refuses=refuses_bwd)
def _(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    return torch.ops.turbo.rms_norm_bwd(grad_y, x, weight, rstd, offset, round_first)
