"""Casts that read a tensor once and write one orientation or both."""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.quantize.backend_triton import groups, made  # noqa: F401  attach
from turbo_ops.quantize.backend_triton.blocks import plan_blockwise
from turbo_ops.quantize.backend_triton.layout import Layout, Plan
from turbo_ops.quantize.backend_triton.whole_axis import (
    SMALL,
    plan_delayed,
    plan_rows,
    plan_rowwise,
    plan_tensorwise,
)
from turbo_ops.quantize.op import (
    block_of,
    cast_problem,
    dequantize,
    quantize,
    quantize_both,
    quantize_both_delayed,
    quantize_delayed,
)


def refuses(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> str | None:
    return cast_problem(x, dtype, block_rows, block_cols, scale_dtype) or refuses_device(x, dtype)


def refuses_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"dtype must be fp32, bf16 or fp16, is {dtype}"
    return refuses_device(data, data.dtype)


@triton.jit
def dequantize_kernel(
    data, scale, out, R, C, stride_r, stride_c, scale_r, scale_c,
    E8M0: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    inside = (rows[:, None] < R) & (cols[None, :] < C)
    values = tl.load(data + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=inside, other=0.0)
    factor = tl.load(
        scale + rows[:, None] // B_R * scale_r + cols[None, :] // B_C * scale_c, mask=inside, other=0
    )
    if E8M0:
        wide = factor.to(tl.int32)
        subnormal = tl.where(wide == 0, 1 << 22, wide << 23)  # 2^-127
        factor = tl.where(wide == 255, 0x7FC00000, subnormal).to(tl.float32, bitcast=True)
    tl.store(out + rows[:, None] * C + cols[None, :], values.to(tl.float32) * factor, mask=inside)


def _plan(layout: Layout) -> Plan:
    if 0 in layout.extents:
        return functools.partial(_cast_empty, layout)
    if layout.block == (0, 0):
        return plan_tensorwise(layout)
    if layout.block == (1, 0):
        small = layout.extents[0] * layout.extents[1] <= SMALL
        return plan_rows(layout) if small or not layout.cols else plan_rowwise(layout)
    cast = plan_blockwise(layout)
    return lambda x, *_: cast(x)


def _cast_empty(layout: Layout, x: Tensor, *_: object) -> tuple[Tensor, ...]:
    results = layout.results(layout.allocate())
    for scale in results[1::2]:  # an empty block has amax 0, so scale 1
        if scale.dtype == torch.float8_e8m0fnu:
            scale.view(torch.uint8).fill_(127)
        else:
            scale.fill_(1.0)
    return results


@quantize.backend("triton", refuses=refuses, planned=True)
def _(x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype) -> Callable:
    return _plan(Layout(x, dtype, (block_rows, block_cols), scale_dtype, both=False))


@quantize_both.backend("triton", refuses=refuses, planned=True)
def _(x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype) -> Callable:
    return _plan(Layout(x, dtype, (block_rows, block_cols), scale_dtype, both=True))


def refuses_delayed(x: Tensor, history: Tensor, row: int, dtype: torch.dtype) -> str | None:
    if history.dtype != torch.float32 or not history.is_contiguous():
        return f"history must be contiguous fp32, is {history.dtype} with strides {history.stride()}"
    return refuses(x, dtype, 0, 0, torch.float32)


def _plan_delayed(x: Tensor, history: Tensor, row: int, dtype: torch.dtype, *, both: bool) -> Callable:
    layout = Layout(x, dtype, (0, 0), torch.float32, both)
    if 0 in layout.extents:
        return (quantize_both_delayed if both else quantize_delayed).reference
    cast = plan_delayed(layout, history, row)
    return lambda x, history, *_: cast(x, history)


@quantize_delayed.backend("triton", refuses=refuses_delayed, planned=True)
def _(x: Tensor, history: Tensor, row: int, dtype: torch.dtype) -> Callable:
    return _plan_delayed(x, history, row, dtype, both=False)


@quantize_both_delayed.backend("triton", refuses=refuses_delayed, planned=True)
def _(x: Tensor, history: Tensor, row: int, dtype: torch.dtype) -> Callable:
    return _plan_delayed(x, history, row, dtype, both=True)


@dequantize.backend("triton", refuses=refuses_dequantize)
def _(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows, cols = data.shape
    out = torch.empty((rows, cols), dtype=dtype, device=data.device)
    if out.numel() == 0:
        return out
    blocks = [block_of(extent, n) for extent, n in zip(data.shape, scale.shape, strict=True)]
    strides = [stride if block else 0 for stride, block in zip(scale.stride(), blocks, strict=True)]
    e8m0 = scale.dtype == torch.float8_e8m0fnu
    launch = Launch(
        dequantize_kernel,
        (triton.cdiv(rows, 64), triton.cdiv(cols, 128)),
        (rows, cols, *data.stride(), *strides),
        E8M0=e8m0, B_R=blocks[0] or 1, B_C=blocks[1] or 1, BR=64, BC=128, num_warps=8,
    )  # fmt: skip
    launch(data, scale.view(torch.uint8) if e8m0 else scale, out)
    return out
