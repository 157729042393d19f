"""Casts that read a tensor once and write one orientation or both.

Scales of a whole axis need a first pass for amax; scales of a block are found in the tile that is cast.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
def amax_kernel(x, amax, R, C, stride_r, stride_c, BR: tl.constexpr, BC: tl.constexpr):
    """Bits of the largest magnitude into amax, which starts at 0; programs take turns at the tiles."""
    tiles_c = tl.cdiv(C, BC)
    largest = tl.zeros((BR, BC), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(R, BR) * tiles_c, tl.num_programs(0)):
        rows = (tile // tiles_c * BR + tl.arange(0, BR)).to(tl.int64)
        cols = (tile % tiles_c * BC + tl.arange(0, BC)).to(tl.int64)
        inside = (rows[:, None] < R) & (cols[None, :] < C)
        values = tl.load(x + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude(values))
    tl.atomic_max(amax, tl.max(tl.max(largest, 1), 0))


@triton.jit
def amax_rows_kernel(
    x, amax, amax_t, R, C, stride_r, stride_c, BOTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Bits of the largest magnitude of each row (amax) and each column (amax_t); both start at 0."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    inside = (rows[:, None] < R) & (cols[None, :] < C)
    bits = magnitude(tl.load(x + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=inside, other=0.0))
    tl.atomic_max(amax + rows, tl.max(bits, 1), mask=rows < R)
    if BOTH:
        tl.atomic_max(amax_t + cols, tl.max(bits, 0), mask=cols < C)


@triton.jit
def cast_kernel(
    x, amax, amax_t, data, scale, data_t, scale_t, R, C, stride_r, stride_c,
    LIMIT: tl.constexpr, STEP: tl.constexpr, BOTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast x by a scale per row, and its transpose by a scale per column."""
    first_r, first_c = tl.program_id(0).to(tl.int64) * BR, tl.program_id(1).to(tl.int64) * BC
    rows, cols = first_r + tl.arange(0, BR), first_c + tl.arange(0, BC)
    inside = (rows[:, None] < R) & (cols[None, :] < C)
    values = tl.load(x + rows[:, None] * stride_r + cols[None, :] * stride_c, mask=inside, other=0.0)
    values = values.to(tl.float32)
    row_scale, inverse = scale_and_inverse(tl.load(amax + rows * STEP, mask=rows < R, other=0), LIMIT, False)
    cast = saturate(values * inverse[:, None], LIMIT).to(data.dtype.element_ty)
    tl.store(data + rows[:, None] * C + cols[None, :], cast, mask=inside)
    if first_c == 0:
        tl.store(scale + rows, row_scale, mask=rows < (R if STEP else 1))
    if BOTH:
        col_scale, inverse = scale_and_inverse(
            tl.load(amax_t + cols * STEP, mask=cols < C, other=0), LIMIT, False
        )
        cast_t = tl.trans(saturate(values * inverse[None, :], LIMIT).to(data.dtype.element_ty))
        tl.store(data_t + cols[:, None] * R + rows[None, :], cast_t, mask=tl.trans(inside))
        if first_r == 0:
            tl.store(scale_t + cols, col_scale, mask=cols < (C if STEP else 1))


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


class Shape(NamedTuple):
    """All that a plan depends on; the launches see the rest."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    block: tuple[int, int]
    scale_dtype: torch.dtype
    both: bool

    def allocate(self) -> list[Tensor]:
        """data, scale and, where both are wanted, those of the transpose."""
        outputs = []
        for rows, cols in (self.extents, self.extents[::-1])[: 1 + self.both]:
            outputs.append(torch.empty((rows, cols), dtype=self.dtype, device=self.device))
            outputs.append(empty_scale(self.device, rows, cols, *self.block, self.scale_dtype))
        return outputs

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        return triton.cdiv(self.extents[0], rows), triton.cdiv(self.extents[1], cols)


Plan = Callable[[Tensor], Any]  # x -> the op's outputs
MOST_PROGRAMS = 1024  # that add to one amax: some 8 for each multiprocessor


@functools.lru_cache(maxsize=4096)
def _plan(shape: Shape) -> Plan:
    """The cast of every tensor of one shape: all that can be worked out once."""
    if 0 in shape.extents:
        return _plan_empty(shape)
    if shape.block == (0, 0):
        return _plan_tensorwise(shape)
    return _plan_rowwise(shape) if shape.block == (1, 0) else _plan_blockwise(shape)


def _plan_empty(shape: Shape) -> Plan:
    def run(x: Tensor) -> list[Tensor]:
        outputs = shape.allocate()
        for scale in outputs[1::2]:  # an empty block has amax 0, so scale 1
            if scale.dtype == torch.float8_e8m0fnu:
                scale.view(torch.uint8).fill_(127)
            else:
                scale.fill_(1.0)
        return outputs

    return run


def _plan_tensorwise(shape: Shape) -> Plan:
    scalars, tile = (*shape.extents, *shape.strides), {"BR": 64, "BC": 128, "num_warps": 8}
    programs = min(math.prod(shape.grid(64, 128)), MOST_PROGRAMS)
    find_amax = Launch(amax_kernel, (programs,), scalars, **tile)
    limit = torch.finfo(shape.dtype).max
    cast = Launch(cast_kernel, shape.grid(64, 128), scalars, LIMIT=limit, STEP=0, BOTH=shape.both, **tile)

    def run(x: Tensor) -> list[Tensor]:
        outputs = shape.allocate()
        amax = torch.zeros(1, dtype=torch.int32, device=shape.device)
        find_amax(x, amax)
        cast(x, amax, amax, *_four(outputs))
        return outputs

    return run


def _plan_rowwise(shape: Shape) -> Plan:
    rows, cols = shape.extents
    scalars, tile = (rows, cols, *shape.strides), {"BOTH": shape.both, "BR": 64, "BC": 128, "num_warps": 8}
    find_amax = Launch(amax_rows_kernel, shape.grid(64, 128), scalars, **tile)
    limit = torch.finfo(shape.dtype).max
    cast = Launch(cast_kernel, shape.grid(64, 128), scalars, LIMIT=limit, STEP=1, **tile)

    def run(x: Tensor) -> list[Tensor]:
        outputs = shape.allocate()
        amax = torch.zeros(rows + cols if shape.both else rows, dtype=torch.int32, device=shape.device)
        amax_t = amax[rows:] if shape.both else amax
        find_amax(x, amax, amax_t)
        cast(x, amax, amax_t, *_four(outputs))
        return outputs

    return run


def _plan_blockwise(shape: Shape) -> Plan:
    e8m0 = shape.scale_dtype == torch.float8_e8m0fnu
    rows, cols = shape.extents
    layouts = scale_layout(rows, cols, *shape.block), scale_layout(cols, rows, *shape.block)
    scale_strides = [stride for _, strides in layouts for stride in strides]
    cast = Launch(
        block_cast_kernel, shape.grid(128, 128), (*shape.extents, *shape.strides, *scale_strides),
        LIMIT=torch.finfo(shape.dtype).max, E8M0=e8m0, B_R=shape.block[0], B_C=shape.block[1],
        BOTH=shape.both, BR=128, BC=128, num_warps=8,
    )  # fmt: skip

    def run(x: Tensor) -> list[Tensor]:
        outputs = shape.allocate()
        data, scale, data_t, scale_t = _four(outputs)
        if e8m0:
            scale, scale_t = scale.view(torch.uint8), scale_t.view(torch.uint8)
        cast(x, data, scale, data_t, scale_t)
        return outputs

    return run


def _four(outputs: list[Tensor]) -> list[Tensor]:
    """Kernels take four outputs; those of the transpose are unused where only one orientation is wanted."""
    return outputs if len(outputs) == 4 else outputs * 2


@quantize.backend("triton", refuses=refuses)
def _(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = Shape(x.shape, x.stride(), x.device, dtype, (block_rows, block_cols), scale_dtype, both=False)
    return tuple(_plan(shape)(x))


@quantize_both.backend("triton", refuses=refuses)
def _(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = Shape(x.shape, x.stride(), x.device, dtype, (block_rows, block_cols), scale_dtype, both=True)
    return tuple(_plan(shape)(x))


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
