"""Casts that read a tensor once and write one orientation or both.

Scales of a whole axis need a first pass for amax; scales of a block are found in the tile that is cast.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.device.launch import Launch
from turbo_ops.device.scale import magnitude, saturate, scale_and_inverse
from turbo_ops.device.target import refuses_device
from turbo_ops.quantize.op import block_of, dequantize, empty_scale, quantize, quantize_both, scale_layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuses(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> str | None:
    if x.ndim != 2 or x.dtype not in DTYPES:
        return f"x must be 2-D of fp32, bf16 or fp16, is {x.ndim}-D of {x.dtype}"
    block = (block_rows, block_cols, scale_dtype == torch.float8_e8m0fnu)
    if block not in ((0, 0, False), (1, 0, False), (1, 128, False), (128, 128, False), (1, 32, True)):
        return f"no kernel for blocks of {block_rows}x{block_cols} with {scale_dtype} scales"
    return refuses_device(x, dtype)


def refuses_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"dtype must be fp32, bf16 or fp16, is {dtype}"
    return refuses_device(data, data.dtype)


@triton.jit
def amax_kernel(
    x, amax, amax_t, R, C, stride_r, stride_c,
    PER_ROW: tl.constexpr, BOTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude of x, of each row (amax) and each column (amax_t); both start at 0."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    inside = (rows[:, None] < R) & (cols[None, :] < C)
    bits = magnitude(tl.load(x + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=inside, other=0.0))
    if PER_ROW:
        tl.atomic_max(amax + rows, tl.max(bits, 1), mask=rows < R)
        if BOTH:
            tl.atomic_max(amax_t + cols, tl.max(bits, 0), mask=cols < C)
    else:
        tl.atomic_max(amax, tl.max(tl.max(bits, 1), 0))


@triton.jit
def cast_kernel(
    x, amax, amax_t, data, scale, data_t, scale_t, R, C, stride_r, stride_c,
    LIMIT: tl.constexpr, PER_ROW: tl.constexpr, BOTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast x by the scales that follow from amax: one, or one per row (and per column for the transpose)."""
    first_r, first_c = tl.program_id(0).to(tl.int64) * BR, tl.program_id(1).to(tl.int64) * BC
    rows, cols = first_r + tl.arange(0, BR), first_c + tl.arange(0, BC)
    inside = (rows[:, None] < R) & (cols[None, :] < C)
    values = tl.load(x + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=inside, other=0.0)
    values = values.to(tl.float32)
    out, out_t = data + rows[:, None] * C + cols[None, :], data_t + cols[:, None] * R + rows[None, :]
    if PER_ROW:
        row_scale, inverse = scale_and_inverse(tl.load(amax + rows, mask=rows < R, other=0), LIMIT, False)
        tl.store(out, saturate(values * inverse[:, None], LIMIT).to(data.dtype.element_ty), mask=inside)
        if first_c == 0:
            tl.store(scale + rows, row_scale, mask=rows < R)
        if BOTH:
            col_scale, inverse = scale_and_inverse(
                tl.load(amax_t + cols, mask=cols < C, other=0), LIMIT, False
            )
            cast_t = tl.trans(saturate(values * inverse[None, :], LIMIT).to(data.dtype.element_ty))
            tl.store(out_t, cast_t, mask=tl.trans(inside))
            if first_r == 0:
                tl.store(scale_t + cols, col_scale, mask=cols < C)
    else:
        one_scale, inverse = scale_and_inverse(tl.load(amax + tl.arange(0, 1)), LIMIT, False)
        cast = saturate(values * inverse[:, None], LIMIT).to(data.dtype.element_ty)
        tl.store(out, cast, mask=inside)
        if BOTH:
            tl.store(out_t, tl.trans(cast), mask=tl.trans(inside))
        if first_r + first_c == 0:
            tl.store(scale + tl.arange(0, 1), one_scale)
            if BOTH:
                tl.store(scale_t + tl.arange(0, 1), one_scale)


@triton.jit
def store_blocks(
    values, data, scale, first_r, first_c, R, C, scale_r, scale_c,
    LIMIT: tl.constexpr, E8M0: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast the tile of values [BR, BC] in blocks of B_R x B_C (B_R is 1 or BR) and store data and scales."""
    bits = tl.max(tl.reshape(magnitude(values), (BR, BC // B_C, B_C)), 2)
    if B_R > 1:
        bits = tl.max(bits, 0)[None, :]
    block_scale, inverse = scale_and_inverse(bits, LIMIT, E8M0)
    inverse = tl.broadcast_to(inverse, (BR, BC // B_C))
    inverse = tl.reshape(tl.broadcast_to(inverse[:, :, None], (BR, BC // B_C, B_C)), (BR, BC))
    rows, cols = first_r + tl.arange(0, BR), first_c + tl.arange(0, BC)
    cast = saturate(values * inverse, LIMIT).to(data.dtype.element_ty)
    tl.store(data + rows[:, None] * C + cols[None, :], cast, mask=(rows[:, None] < R) & (cols[None, :] < C))
    scale_rows = first_r // B_R + tl.arange(0, BR // B_R)
    scale_cols = first_c // B_C + tl.arange(0, BC // B_C)
    at = scale + scale_rows[:, None] * scale_r + scale_cols[None, :] * scale_c
    tl.store(at, block_scale, mask=(scale_rows[:, None] * B_R < R) & (scale_cols[None, :] * B_C < C))


@triton.jit
def block_cast_kernel(
    x, data, scale, data_t, scale_t, R, C, stride_r, stride_c, scale_r, scale_c, scale_t_r, scale_t_c,
    LIMIT: tl.constexpr, E8M0: tl.constexpr, B_R: tl.constexpr, B_C: tl.constexpr,
    BOTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast x in blocks of B_R x B_C, and x.t() in blocks of the same extents along its own axes."""
    first_r, first_c = tl.program_id(0).to(tl.int64) * BR, tl.program_id(1).to(tl.int64) * BC
    rows, cols = first_r + tl.arange(0, BR), first_c + tl.arange(0, BC)
    inside = (rows[:, None] < R) & (cols[None, :] < C)
    values = tl.load(x + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=inside, other=0.0)
    values = values.to(tl.float32)
    store_blocks(values, data, scale, first_r, first_c, R, C, scale_r, scale_c, LIMIT, E8M0, B_R, B_C, BR, BC)
    if BOTH:
        store_blocks(
            tl.trans(values), data_t, scale_t, first_c, first_r, C, R, scale_t_r, scale_t_c,
            LIMIT, E8M0, B_R, B_C, BC, BR,
        )  # fmt: skip


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


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: torch.Size, strides: tuple[int, int], device: torch.device,
    dtype: torch.dtype, block: tuple[int, int], scale_dtype: torch.dtype, both: bool,
) -> Callable[[Tensor], Any]:  # fmt: skip
    """The cast of every tensor of one shape: all that can be worked out once."""
    rows, cols = shape
    limit, e8m0 = torch.finfo(dtype).max, scale_dtype == torch.float8_e8m0fnu

    def allocate() -> tuple[Tensor, ...]:
        outputs = (
            torch.empty((rows, cols), dtype=dtype, device=device),
            empty_scale(device, rows, cols, *block, scale_dtype),
        )
        if not both:
            return outputs
        data_t = torch.empty((cols, rows), dtype=dtype, device=device)
        return *outputs, data_t, empty_scale(device, cols, rows, *block, scale_dtype)

    def for_kernel(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (
            tuple(t.view(torch.uint8) if t.dtype == scale_dtype else t for t in outputs) if e8m0 else outputs
        )

    if rows * cols == 0:

        def run_empty(x: Tensor) -> tuple[Tensor, ...]:
            outputs = allocate()
            for scale in for_kernel(outputs)[1::2]:
                scale.fill_(127 if e8m0 else 1.0)
            return outputs

        return run_empty

    if block[1] == 0:
        per_row = block[0] == 1
        grid, scalars = (triton.cdiv(rows, 64), triton.cdiv(cols, 128)), (rows, cols, *strides)
        tile = {"PER_ROW": per_row, "BOTH": both, "BR": 64, "BC": 128, "num_warps": 8}
        find_amax = Launch(amax_kernel, grid, scalars, **tile)
        cast = Launch(cast_kernel, grid, scalars, LIMIT=limit, **tile)
        extent = rows + (cols if both else 0) if per_row else 1

        def run_whole(x: Tensor) -> tuple[Tensor, ...]:
            outputs = allocate()
            amax = torch.zeros(extent, dtype=torch.int32, device=device)
            amax_t = amax[rows:] if per_row and both else amax
            find_amax(x, amax, amax_t)
            cast(x, amax, amax_t, *outputs, *outputs[: 0 if both else 2])
            return outputs

        return run_whole

    scale_strides = [scale_layout(*extents, *block)[1] for extents in ((rows, cols), (cols, rows))]
    cast_blocks = Launch(
        block_cast_kernel,
        (triton.cdiv(rows, 128), triton.cdiv(cols, 128)),
        (rows, cols, *strides, *scale_strides[0], *scale_strides[1]),
        LIMIT=limit, E8M0=e8m0, B_R=block[0], B_C=block[1], BOTH=both, BR=128, BC=128, num_warps=8,
    )  # fmt: skip

    def run_blocks(x: Tensor) -> tuple[Tensor, ...]:
        outputs = allocate()
        cast_blocks(x, *for_kernel(outputs), *for_kernel(outputs[: 0 if both else 2]))
        return outputs

    return run_blocks


@quantize.backend("triton", refuses=refuses)
def _(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _plan(x.shape, x.stride(), x.device, dtype, (block_rows, block_cols), scale_dtype, False)(x)


@quantize_both.backend("triton", refuses=refuses)
def _(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _plan(x.shape, x.stride(), x.device, dtype, (block_rows, block_cols), scale_dtype, True)(x)


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
