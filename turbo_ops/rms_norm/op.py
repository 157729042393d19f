"""RMSNorm (arXiv 1910.07467): y = x * rsqrt(mean(x^2) + eps) * (weight + offset), statistics in fp32."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import op, refuse_second_derivative


@op("native", "triton")
def rms_norm_fwd(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """x [T, D], weight [D] -> y [T, D], rstd [T] fp32; both contiguous.

    round_first rounds the normalised x to x's dtype before the weight multiplies it, and y has the promoted
    dtype (Llama); else all is fp32 until y is rounded to x's dtype (torch, Gemma, Olmo). Gemma's offset is 1.
    """
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    x_hat, dtype = _normalised(x, weight, rstd, round_first)
    return (x_hat * (weight.float() + offset)).to(dtype).contiguous(), rstd


@op("native", "triton")
def rms_norm_bwd(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """grad_y, x [T, D], weight [D], rstd [T] -> grad_x [T, D] of x's dtype, grad_weight [D] of weight's."""
    x_hat = x.float() * rstd[:, None]
    scaled = grad_y.float() * (weight.float() + offset)
    grad_x = rstd[:, None] * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
    rounded, _ = _normalised(x, weight, rstd, round_first)
    return grad_x.to(x.dtype).contiguous(), (grad_y.float() * rounded).sum(0).to(weight.dtype)


def _normalised(x: Tensor, weight: Tensor, rstd: Tensor, round_first: bool) -> tuple[Tensor, torch.dtype]:
    x_hat = x.float() * rstd[:, None]
    if round_first:
        return x_hat.to(x.dtype).float(), torch.promote_types(x.dtype, weight.dtype)
    return x_hat, x.dtype


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Tensor:
        y, rstd = rms_norm_fwd(x, weight, eps, offset, round_first)
        ctx.save_for_backward(x, weight, rstd)
        ctx.variant = (offset, round_first)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("rms_norm")
        grad_x, grad_weight = rms_norm_bwd(grad_y.contiguous(), *ctx.saved_tensors, *ctx.variant)
        return grad_x, grad_weight, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    round_first: bool = False,
) -> Tensor:
    """Normalise the last dimension of x [..., D] and scale it by weight [D] (None: by 1).

    eps defaults to fp32's machine epsilon, for bf16 and fp16 as well, as in torch. offset and
    round_first: see `rms_norm_fwd`. Differentiable in x and weight. ValueError where weight is not [D],
    or for other dtypes than fp32, bf16 and fp16.
    """
    width = x.shape[-1]
    if weight is None:
        weight = torch.ones(width, dtype=x.dtype, device=x.device)
    if weight.shape != (width,):
        raise ValueError(
            f"rms_norm: weight has shape {tuple(weight.shape)}, x {tuple(x.shape)} needs ({width},)"
        )
    if not {x.dtype, weight.dtype} <= set(DTYPES):
        raise ValueError(f"rms_norm: x is {x.dtype}, weight {weight.dtype}: give fp32, bf16 or fp16")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    rows = x.reshape(x.shape[:-1].numel(), width).contiguous()
    return RMSNormFunction.apply(rows, weight, eps, offset, round_first).view(x.shape)


def rms_norm_backend(weight: Tensor) -> str:
    """What `rms_norm` will run on for this weight: "rms_norm:native". Allocates and computes nothing."""
    with FakeTensorMode():
        x, fake = (
            torch.empty(shape, dtype=weight.dtype, device=weight.device)
            for shape in ((4096, *weight.shape), weight.shape)
        )
        return f"rms_norm:{rms_norm_fwd.choose(x, fake, 1e-6, 0.0, False).name}"
