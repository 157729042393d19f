"""A program for each position: its angles are read once for all heads of q and k."""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.rope.op import empty_rotated, rope_bwd, rope_fwd

HEADS, WARPS = 16, 4  # heads at a time, warps of a program


def refuses(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> str | None:
    if (
        q.ndim != 4
        or k.ndim != 4
        or cos.ndim != 3
        or not {q.dtype, k.dtype, cos.dtype, sin.dtype} <= set(DTYPES)
    ):
        return f"q and k must be [B, H, S, D] of fp32, bf16 or fp16, are {q.dtype} and {k.dtype}"
    return refuses_device(q)


@triton.jit
def rotate(
    x, out, cos_a, cos_b, sin_a, sin_b, H, D, x_h, x_d, out_h,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one tensor at one position."""
    half = tl.arange(0, HALF)
    a_at, b_at = (2 * half, 2 * half + 1) if INTERLEAVED else (half, half + ROTARY // 2)
    for first in range(0, H, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = (head[:, None] < H) & (half[None, :] < ROTARY // 2)
        source, target = x + head[:, None] * x_h, out + head[:, None] * out_h
        a = tl.load(source + a_at[None, :] * x_d, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + b_at[None, :] * x_d, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            new_a, new_b = a * cos_a[None, :] + b * sin_b[None, :], b * cos_b[None, :] - a * sin_a[None, :]
        else:
            new_a, new_b = a * cos_a[None, :] - b * sin_a[None, :], b * cos_b[None, :] + a * sin_b[None, :]
        tl.store(target + a_at[None, :], new_a.to(out.dtype.element_ty), mask=inside)
        tl.store(target + b_at[None, :], new_b.to(out.dtype.element_ty), mask=inside)
        if REST:
            rest = ROTARY + tl.arange(0, REST)
            kept = (head[:, None] < H) & (rest[None, :] < D)
            values = tl.load(source + rest[None, :] * x_d, mask=kept, other=0.0)
            tl.store(target + rest[None, :], values, mask=kept)


@triton.jit
def rope_kernel(
    q, k, cos, sin, q_out, k_out, S, D, q_heads, k_heads,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d, cos_b, cos_s, cos_r, sin_b, sin_s, sin_r,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch, place, half = program // S, program % S, tl.arange(0, HALF)
    inside = half < ROTARY // 2
    a_at, b_at = (2 * half, 2 * half + 1) if INTERLEAVED else (half, half + ROTARY // 2)
    cos += batch * cos_b + place * cos_s
    sin += batch * sin_b + place * sin_s
    cos_of_a = tl.load(cos + a_at * cos_r, mask=inside, other=0.0).to(tl.float32)
    cos_of_b = tl.load(cos + b_at * cos_r, mask=inside, other=0.0).to(tl.float32)
    sin_of_a = tl.load(sin + a_at * sin_r, mask=inside, other=0.0).to(tl.float32)
    sin_of_b = tl.load(sin + b_at * sin_r, mask=inside, other=0.0).to(tl.float32)
    rotate(
        q + batch * q_b + place * q_s, q_out + program * q_heads * D, cos_of_a, cos_of_b, sin_of_a, sin_of_b,
        q_heads, D, q_h, q_d, D, ROTARY, INTERLEAVED, BACKWARD, HALF, REST, HEADS,
    )  # fmt: skip
    rotate(
        k + batch * k_b + place * k_s, k_out + program * k_heads * D, cos_of_a, cos_of_b, sin_of_a, sin_of_b,
        k_heads, D, k_h, k_d, D, ROTARY, INTERLEAVED, BACKWARD, HALF, REST, HEADS,
    )  # fmt: skip


def _plan(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, backward: bool) -> Callable:
    (batch, heads, length, width), key_heads, rotary = q.shape, k.shape[1], cos.shape[2]
    of_batch = [0 if t.shape[0] == 1 else t.stride(0) for t in (cos, sin)]
    angles = of_batch[0], *cos.stride()[1:], of_batch[1], *sin.stride()[1:]
    launch = Launch(
        rope_kernel, (batch * length,),
        (length, width, heads, key_heads, *q.stride(), *k.stride(), *angles),
        ROTARY=rotary, INTERLEAVED=interleaved, BACKWARD=backward,
        HALF=triton.next_power_of_2(max(rotary // 2, 1)),
        REST=triton.next_power_of_2(width - rotary) if width > rotary else 0,
        HEADS=min(triton.next_power_of_2(max(heads, key_heads)), HEADS), num_warps=WARPS,
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        q_out, k_out = empty_rotated(q), empty_rotated(k)
        if batch * length:
            launch(q, k, cos, sin, q_out, k_out)
        return q_out, k_out

    return run


@rope_fwd.backend("triton", refuses=refuses, planned=True)
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Callable:
    return _plan(q, k, cos, sin, interleaved, backward=False)


@rope_bwd.backend("triton", refuses=refuses, planned=True)
def _(grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Callable:
    return _plan(grad_q, grad_k, cos, sin, interleaved, backward=True)
