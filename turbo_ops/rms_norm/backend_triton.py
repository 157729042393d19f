"""A row per step; rows up to MAX_BLOCK wide stay in registers, so x is read once."""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import interpreted, refuses_device
from turbo_ops.rms_norm.op import rms_norm_add_bwd, rms_norm_add_fwd, rms_norm_bwd, rms_norm_fwd

MAX_BLOCK = 32768
HELD, PER_MULTIPROCESSOR = 512, 2  # of backward: elements a warp, programs
MAX_AHEAD = 8192  # wider, a second row or another summand spills registers on gfx942


def refuses(x: Tensor, weight: Tensor, *variant: object) -> str | None:
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"x and weight must be fp32, bf16 or fp16, are {x.dtype} and {weight.dtype}"
    if not (x.is_contiguous() and weight.is_contiguous()):
        return f"x and weight must be contiguous, have strides {x.stride()} and {weight.stride()}"
    if x.shape[1] > MAX_BLOCK:
        return f"D={x.shape[1]} is over {MAX_BLOCK}, what one program holds"
    return refuses_device(x)


def refuses_bwd(grad_y: Tensor, x: Tensor, weight: Tensor, *variant: object) -> str | None:
    if not grad_y.is_contiguous():
        return f"grad_y must be contiguous, has strides {grad_y.stride()}"
    return refuses(x, weight)


def refuses_add(x: Tensor, residual: Tensor, weight: Tensor, *variant: object) -> str | None:
    if not residual.is_contiguous() or residual.dtype != x.dtype:
        return f"residual must be contiguous {x.dtype}, is {residual.dtype} of strides {residual.stride()}"
    return refuses(x, weight)


def refuses_add_bwd(
    grad_y: Tensor, grad_total: Tensor, total: Tensor, weight: Tensor, *variant: object
) -> str | None:
    if not grad_total.is_contiguous() or grad_total.dtype != total.dtype:
        given = f"{grad_total.dtype} of strides {grad_total.stride()}"
        return f"grad_total must be contiguous {total.dtype}, is {given}"
    return refuses_bwd(grad_y, total, weight)


@triton.jit
def rms_norm_fwd_kernel(
    x, residual, weight, y, total, rstd, eps, offset, D, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = cols < D
    values = tl.load(x + row * D + cols, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * D + cols, mask=inside, other=0.0).to(tl.float32)
        stored = values.to(x.dtype.element_ty)
        tl.store(total + row * D + cols, stored, mask=inside)
        values = stored.to(tl.float32)
    row_rstd = tl.rsqrt(tl.sum(values * values) / D + eps)
    values = values * row_rstd
    if ROUND_FIRST:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(y + row * D + cols, (values * gain).to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, row_rstd)


@triton.jit
def rms_norm_bwd_kernel(
    grad_y, grad_total, x, weight, rstd, grad_x, partial, offset, T, D,
    ROUND_FIRST: tl.constexpr, AHEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every program takes each num_programs-th row and leaves its share of grad_weight in partial.

    AHEAD loads a row while the one before it is summed: a row's own loads and its sum follow one another.
    """
    program, programs, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    inside = cols < D
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    grad_gain = tl.zeros((BLOCK,), tl.float32)
    at, step = (
        program.to(tl.int64) * D,
        programs.to(tl.int64) * D,
    )  # scalars: pointers of a row take no registers
    if AHEAD:
        next_x = tl.load(x + at + cols, mask=inside, other=0.0)
        next_grad = tl.load(grad_y + at + cols, mask=inside, other=0.0)
        next_rstd = tl.load(rstd + program)
    for row in range(program, T, programs):
        if AHEAD:
            now_x, now_grad, now_rstd = next_x, next_grad, next_rstd
            is_next = row + programs < T
            next_x = tl.load(x + at + step + cols, mask=inside & is_next, other=0.0)
            next_grad = tl.load(grad_y + at + step + cols, mask=inside & is_next, other=0.0)
            next_rstd = tl.load(rstd + row + programs, mask=is_next, other=0.0)
        else:
            now_x = tl.load(x + at + cols, mask=inside, other=0.0)
            now_grad = tl.load(grad_y + at + cols, mask=inside, other=0.0)
            now_rstd = tl.load(rstd + row)
        grad, x_hat = now_grad.to(tl.float32), now_x.to(tl.float32) * now_rstd
        scaled = grad * gain
        mean = tl.sum(scaled * x_hat) / D
        result = now_rstd * (scaled - x_hat * mean)
        if grad_total is not None:
            result += tl.load(grad_total + at + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at + cols, result.to(grad_x.dtype.element_ty), mask=inside)
        if ROUND_FIRST:
            x_hat = x_hat.to(x.dtype.element_ty).to(tl.float32)
        grad_gain += grad * x_hat
        at += step
    tl.store(partial + program.to(tl.int64) * D + cols, grad_gain, mask=inside)


@triton.jit
def sum_partials_kernel(partial, out, P, D, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out [D] is the sum over the rows of partial [P, D], in one order."""
    rows, cols = tl.arange(0, ROWS)[:, None], tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, P, ROWS):
        inside = (first + rows < P) & (cols < D)
        total += tl.load(partial + (first + rows) * D + cols, mask=inside, other=0.0)
    at = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=at < D)


def _forward(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> Callable:
    rows, width = x.shape
    dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
    block = triton.next_power_of_2(width)
    launch = Launch(
        rms_norm_fwd_kernel, (rows,), (eps, offset, width),
        ROUND_FIRST=round_first, BLOCK=block, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip

    def run(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        y, rstd = torch.empty_like(x, dtype=dtype), torch.empty(rows, dtype=torch.float32, device=x.device)
        total = None if residual is None else torch.empty_like(x)
        if rows:
            launch(x, residual, weight, y, total, rstd)
        return y, total, rstd

    return run


def _backward(x: Tensor, weight: Tensor, offset: float, round_first: bool) -> Callable:
    rows, width = x.shape
    programs, dtype = min(rows, _programs(x.device)), weight.dtype
    block = triton.next_power_of_2(width)
    launch = Launch(
        rms_norm_bwd_kernel, (programs,), (offset, rows, width),
        ROUND_FIRST=round_first, AHEAD=block <= MAX_AHEAD, BLOCK=block,
        num_warps=min(max(block // HELD, 1), 16),
    )  # fmt: skip
    add = Launch(sum_partials_kernel, (triton.cdiv(width, 32),), (programs, width), ROWS=64, COLS=32)

    def run(
        grad_y: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not rows:
            return torch.empty_like(x), torch.zeros_like(weight)
        later = None if block <= MAX_AHEAD else grad_total
        grad_x, grad_weight = torch.empty_like(x), torch.empty(width, dtype=dtype, device=x.device)
        partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
        launch(grad_y, None if later is not None else grad_total, x, weight, rstd, grad_x, partial)
        add(partial, grad_weight)
        return grad_x if later is None else grad_x.add_(later), grad_weight

    return run


@rms_norm_fwd.backend("triton", refuses=refuses, planned=True)
def _(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = False) -> Callable:
    forward = _forward(x, weight, eps, offset, round_first)
    return lambda x, weight, *_: forward(x, None, weight)[::2]


@rms_norm_add_fwd.backend("triton", refuses=refuses_add, planned=True)
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = False
) -> Callable:
    forward = _forward(x, weight, eps, offset, round_first)
    return lambda x, residual, weight, *_: forward(x, residual, weight)


@rms_norm_bwd.backend("triton", refuses=refuses_bwd, planned=True)
def _(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0, round_first: bool = False
) -> Callable:
    backward = _backward(x, weight, offset, round_first)
    return lambda grad_y, x, weight, rstd, *_: backward(grad_y, None, x, weight, rstd)


@rms_norm_add_bwd.backend("triton", refuses=refuses_add_bwd, planned=True)
def _(
    grad_y: Tensor,
    grad_total: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float = 0.0,
    round_first: bool = False,
) -> Callable:
    backward = _backward(total, weight, offset, round_first)
    return lambda grad_y, grad_total, total, weight, rstd, *_: backward(
        grad_y, grad_total, total, weight, rstd
    )


@functools.lru_cache(maxsize=64)
def _programs(device: torch.device) -> int:
    """PER_MULTIPROCESSOR programs hide each other's loads; more would only grow `partial`."""
    if interpreted():
        return 4
    return PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
