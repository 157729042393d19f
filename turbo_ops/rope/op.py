"""Rotary position embedding (arXiv 2104.09864) of queries and keys together, in fp32 and rounded once."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import op, refuse_second_derivative


@op("triton")
def rope_fwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """q [B, Hq, S, D], k [B, Hk, S, D], any strides; cos, sin [B or 1, S, R], R <= D -> rotated q and k.

    The first R features are rotated, the others kept. The partner of feature i is i + R / 2, or with
    interleaved its neighbour. Memory of the results is [B, S, H, D], as a projection leaves it.
    """
    return _rotated(q, cos, sin, interleaved, False), _rotated(k, cos, sin, interleaved, False)


@op("triton")
def rope_bwd(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of q [B, Hq, S, D] and k [B, Hk, S, D] from those of their rotations."""
    return _rotated(grad_q, cos, sin, interleaved, True), _rotated(grad_k, cos, sin, interleaved, True)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    rotary = cos.shape[-1]
    cos, sin, wide = cos.float()[:, None], sin.float()[:, None], x.float()
    parts = (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else None
    first, second = parts or (slice(0, rotary // 2), slice(rotary // 2, rotary))
    a, b = wide[..., first], wide[..., second]
    (cos_a, cos_b), (sin_a, sin_b) = ((t[..., first], t[..., second]) for t in (cos, sin))
    rotated = empty_rotated(x)
    rotated[..., rotary:] = x[..., rotary:]
    rotated[..., first] = a * cos_a + (b * sin_b if transposed else -b * sin_a)
    rotated[..., second] = b * cos_b + (-a * sin_a if transposed else a * sin_b)
    return rotated


def empty_rotated(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    return torch.empty((batch, length, heads, width), dtype=x.dtype, device=x.device).transpose(1, 2)


class RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rope_fwd(q, k, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("rope")
        return *rope_bwd(grad_q, grad_k, *ctx.saved_tensors, ctx.interleaved), None, None, None


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, S, D] and k [B, Hk, S, D] rotated by cos and sin [B or 1, S, R]; see `rope_fwd`.

    Differentiable once in q and k. ValueError where shapes, dtypes or devices do not fit, or where cos or sin
    want a gradient.
    """
    fits = q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape == sin.shape
    fits = fits and q.shape[::2] == k.shape[::2] and q.shape[3] == k.shape[3] and cos.shape[1] == q.shape[2]
    if not fits or cos.shape[0] not in (1, q.shape[0]) or cos.shape[2] > q.shape[3] or cos.shape[2] % 2:
        given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(NAMES, (q, k, cos, sin), strict=True))
        raise ValueError(f"rope: {given}: give [B, H, S, D] twice and [B or 1, S, R], R even and at most D")
    if q.dtype != k.dtype or not {q.dtype, cos.dtype, sin.dtype} <= set(DTYPES):
        given = ", ".join(f"{name} {t.dtype}" for name, t in zip(NAMES, (q, k, cos, sin), strict=True))
        raise ValueError(f"rope: {given}: give fp32, bf16 or fp16, and q and k of one dtype")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope: cos and sin get no gradient here: detach them")
    return RopeFunction.apply(q, k, cos, sin, interleaved)


NAMES = ("q", "k", "cos", "sin")


def rope_backend(device: torch.device, dtype: torch.dtype) -> str:
    """What `rope` will run on: "rope:triton". Allocates and computes nothing."""
    with FakeTensorMode():
        q = torch.empty(1, 8, 128, 128, dtype=dtype, device=device)
        cos = torch.empty(1, 128, 128, dtype=dtype, device=device)
        return f"rope:{rope_fwd.choose(q, q, cos, cos, False).name}"
