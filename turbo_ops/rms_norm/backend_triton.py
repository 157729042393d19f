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
from turbo_ops.rms_norm.op import rms_norm_bwd, rms_norm_fwd

MAX_BLOCK = 32768


def refuses(x: Tensor, weight: Tensor, eps: float, offset: float, round_first: bool) -> str | None:
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"x and weight must be fp32, bf16 or fp16, are {x.dtype} and {weight.dtype}"
    if not (x.is_contiguous() and weight.is_contiguous()):
        return f"x and weight must be contiguous, have strides {x.stride()} and {weight.stride()}"
    if x.shape[1] > MAX_BLOCK:
        return f"D={x.shape[1]} is over {MAX_BLOCK}, what one program holds"
    return refuses_device(x)


def refuses_bwd(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, round_first: bool
) -> str | None:
    if not grad_y.is_contiguous():
        return f"grad_y must be contiguous, has strides {grad_y.stride()}"
    return refuses(x, weight, 0.0, offset, round_first)


@triton.jit
def rms_norm_fwd_kernel(
    x, weight, y, rstd, eps, offset, D, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = cols < D
    values = tl.load(x + row * D + cols, mask=inside, other=0.0).to(tl.float32)
    row_rstd = tl.rsqrt(tl.sum(values * values) / D + eps)
    values = values * row_rstd
    if ROUND_FIRST:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(y + row * D + cols, (values * gain).to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, row_rstd)


@triton.jit
def rms_norm_bwd_kernel(
    grad_y, x, weight, rstd, grad_x, partial, offset, T, D, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Every program takes each num_programs-th row and leaves its share of grad_weight in partial."""
    program, cols = tl.program_id(0), tl.arange(0, BLOCK)
    inside = cols < D
    gain = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    grad_gain = tl.zeros((BLOCK,), tl.float32)
    at, step = program.to(tl.int64) * D + cols, tl.num_programs(0).to(tl.int64) * D
    for row in range(program, T, tl.num_programs(0)):
        row_rstd = tl.load(rstd + row)
        x_hat = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * row_rstd
        grad = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        scaled = grad * gain
        mean = tl.sum(scaled * x_hat) / D
        tl.store(grad_x + at, (row_rstd * (scaled - x_hat * mean)).to(grad_x.dtype.element_ty), mask=inside)
        if ROUND_FIRST:
            x_hat = x_hat.to(x.dtype.element_ty).to(tl.float32)
        grad_gain += grad * x_hat
        at += step
    tl.store(partial + program.to(tl.int64) * D + cols, grad_gain, mask=inside)


def _launch(kernel: object, programs: int, scalars: tuple, round_first: bool) -> Launch:
    block = triton.next_power_of_2(scalars[-1])
    warps = min(max(block // 1024, 1), 16)
    return Launch(kernel, (programs,), scalars, ROUND_FIRST=round_first, BLOCK=block, num_warps=warps)


@rms_norm_fwd.backend("triton", refuses=refuses, planned=True)
def _(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = False) -> Callable:
    rows, width = x.shape
    dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
    launch = _launch(rms_norm_fwd_kernel, rows, (eps, offset, width), round_first)

    def run(x: Tensor, weight: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        y, rstd = torch.empty_like(x, dtype=dtype), torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            launch(x, weight, y, rstd)
        return y, rstd

    return run


@rms_norm_bwd.backend("triton", refuses=refuses_bwd, planned=True)
def _(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0, round_first: bool = False
) -> Callable:
    rows, width = x.shape
    programs, dtype = min(rows, _programs(x.device)), weight.dtype
    launch = _launch(rms_norm_bwd_kernel, programs, (offset, rows, width), round_first)

    def run(grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        grad_x = torch.empty_like(x)
        partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
        if rows:
            launch(grad_y, x, weight, rstd, grad_x, partial)
        return grad_x, partial.sum(0).to(dtype)

    return run


@functools.lru_cache(maxsize=64)
def _programs(device: torch.device) -> int:
    """Four programs a multiprocessor hide each other's loads; more would only grow `partial`."""
    return 4 if interpreted() else 4 * torch.cuda.get_device_properties(device).multi_processor_count
