"""One scale for a row, a column or all of a tensor: a first pass finds amax, or the steps before gave it."""

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import hardware
from turbo_ops.device.launch import Launch
from turbo_ops.device.scale import bits_of, largest, magnitude, scale_and_inverse
from turbo_ops.quantize.backend_triton.layout import Layout, Plan
from turbo_ops.quantize.backend_triton.tiles import (
    largest4,
    limited,
    load4,
    store_rows,
    store_transposed,
    this_tile,
    visible,
)


@triton.jit
def amax_kernel(
    x, amax, N, C, stride_r, stride_c,
    FLAT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of each program's share of the N values; FLAT: x is dense."""
    found = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(tl.program_id(0), tl.cdiv(N, BLOCK * STEPS), tl.num_programs(0)):
        for i in tl.static_range(STEPS):
            at = chunk * (BLOCK * STEPS) + i * BLOCK + tl.arange(0, BLOCK)
            offset = at if FLAT else (at // C).to(tl.int64) * stride_r + (at % C).to(tl.int64) * stride_c
            if EVEN:
                found = largest(found, magnitude(tl.load(x + offset)))
            else:
                found = largest(found, magnitude(tl.load(x + offset, mask=at < N, other=0.0)))
    tl.store(amax + tl.program_id(0), tl.reduce(found, 0, largest))


@triton.jit
def amax_rows_kernel(
    x, amax, amax_t, R, C, stride_r, stride_c,
    BR: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude of each row (amax, or None) and each column (amax_t); both start at 0."""
    first, cols = tl.program_id(0).to(tl.int64) * (BR * STEPS), tl.program_id(1).to(tl.int64) * BC
    cols += tl.arange(0, BC)
    found = tl.zeros((BR, BC), tl.float32)
    for step in range(STEPS):
        rows = first + step * BR + tl.arange(0, BR)
        at = x + rows[:, None] * stride_r + cols[None, :] * stride_c
        values = magnitude(tl.load(at, mask=(rows[:, None] < R) & (cols[None, :] < C), other=0.0))
        found = largest(found, values)
        if amax is not None:
            tl.atomic_max(amax + rows, bits_of(tl.reduce(values, 1, largest)), mask=rows < R)
    tl.atomic_max(amax_t + cols, bits_of(tl.reduce(found, 0, largest)), mask=cols < C)


@triton.jit
def tensor_amax(
    x, amax, R, C, stride_r, stride_c, PARTS: tl.constexpr, G: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """The largest of the PARTS that `amax_kernel` left; without them, of a small x itself."""
    if PARTS:
        found = tl.load(amax + tl.arange(0, PARTS))
    else:
        rows, cols = 4 * tl.arange(0, G), tl.arange(0, BC)
        tile = tl.zeros((G, BC), tl.float32)
        for r in range(0, R, 4 * G):
            for c in range(0, C, BC):
                a, b, c_, d = load4(
                    x + r * stride_r + c * stride_c, rows, cols, R - r, C - c, stride_r, stride_c, False
                )
                tile = largest(tile, largest4(a, b, c_, d))
        found = tl.reduce(tile, 1, largest)
    return tl.reduce(found, 0, largest)


@triton.jit
def cast_by_amax(
    tile, x, amax, amax_t, data, scale, data_t, scale_t, R, C, stride_r, stride_c,
    LIMIT: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast `this_tile` by a scale a row and its transpose by one a column (STEP 1), or both by one (0)."""
    first_r, first_c, left_r, left_c, groups, cols, tiles = tile
    rows = 4 * groups
    if data is not None:
        out = data + first_r * C + first_c
        if STEP == 0:
            found = tensor_amax(x, amax, R, C, stride_r, stride_c, PARTS, G, BC)
            whole, inverse = scale_and_inverse(found, LIMIT, False)
            if tl.program_id(0) == 0:
                tl.store(scale, whole)
            for i in tl.static_range(4):
                store_rows(out, tiles[i], inverse, rows + i, cols, left_r, left_c, C, EVEN)
        else:
            for i in tl.static_range(4):
                inside = rows + i < left_r
                found = tl.load(amax + first_r + rows + i, mask=inside, other=0)
                row_scale, inverse = scale_and_inverse(found.to(tl.float32, bitcast=True), LIMIT, False)
                if first_c == 0:
                    tl.store(scale + first_r + rows + i, row_scale, mask=inside)
                store_rows(out, tiles[i], inverse[:, None], rows + i, cols, left_r, left_c, C, EVEN)
    if data_t is not None:
        out = data_t + first_c * R + first_r
        if STEP == 0:
            found = tensor_amax(x, amax_t, R, C, stride_r, stride_c, PARTS, G, BC)
            whole, inverse = scale_and_inverse(found, LIMIT, False)
            if tl.program_id(0) == 0:
                tl.store(scale_t, whole)
            store_transposed(out, tiles, inverse, groups, cols, left_r, left_c, R, EVEN, PACK)
        else:
            found = tl.load(amax_t + first_c + cols, mask=cols < left_c, other=0)
            col_scale, inverse = scale_and_inverse(found.to(tl.float32, bitcast=True), LIMIT, False)
            if first_r == 0:
                tl.store(scale_t + first_c + cols, col_scale, mask=cols < left_c)
            store_transposed(out, tiles, inverse[None, :], groups, cols, left_r, left_c, R, EVEN, PACK)


@triton.jit
def cast_kernel(
    x, amax, amax_t, data, scale, data_t, scale_t, R, C, stride_r, stride_c,
    LIMIT: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile = this_tile(x, R, C, stride_r, stride_c, EVEN, WIDE, G, BC)
    cast_by_amax(
        tile, x, amax, amax_t, data, scale, data_t, scale_t, R, C, stride_r, stride_c,
        LIMIT, PARTS, STEP, EVEN, PACK, G, BC,
    )  # fmt: skip


@triton.jit
def past_amax(history, H: tl.constexpr, SLOTS: tl.constexpr):
    """The largest of slots 1..H."""
    slots = tl.arange(0, SLOTS)
    return tl.reduce(tl.load(history + slots, mask=(slots > 0) & (slots <= H), other=0.0), 0, largest)


@triton.jit
def cast_by_history(
    tile, history, history_t, data, scale, data_t, scale_t, R, C,
    LIMIT: tl.constexpr, SATURATES: tl.constexpr, H: tl.constexpr, SLOTS: tl.constexpr, ROW: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Cast `this_tile` and its transpose by the amax of the steps before, and note its own.

    history_t is history: see `store_transposed`.
    """
    first_r, first_c, left_r, left_c, groups, cols, tiles = tile
    rows = 4 * groups
    tiles = visible(tiles[0]), visible(tiles[1]), visible(tiles[2]), visible(tiles[3])
    history += ROW * (H + 1)
    history_t += ROW * (H + 1)
    own = tl.reduce(largest4(tiles[0], tiles[1], tiles[2], tiles[3]), 1, largest)
    own, slot = bits_of(tl.reduce(own, 0, largest)), history.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(slot, own, mask=own > tl.load(slot))  # most programs need not queue for it
    if data is not None:
        whole, inverse = scale_and_inverse(past_amax(history, H, SLOTS), LIMIT, False)
        if tl.program_id(0) == 0:
            tl.store(scale, whole)
        out = data + first_r * C + first_c
        for i in tl.static_range(4):
            values = limited(tiles[i], inverse, LIMIT, SATURATES)
            store_rows(out, values, 1.0, rows + i, cols, left_r, left_c, C, EVEN)
    if data_t is not None:
        whole, inverse = scale_and_inverse(past_amax(history_t, H, SLOTS), LIMIT, False)
        if tl.program_id(0) == 0:
            tl.store(scale_t, whole)
        values = (
            limited(tiles[0], inverse, LIMIT, SATURATES), limited(tiles[1], inverse, LIMIT, SATURATES),
            limited(tiles[2], inverse, LIMIT, SATURATES), limited(tiles[3], inverse, LIMIT, SATURATES),
        )  # fmt: skip
        out = data_t + first_c * R + first_r
        store_transposed(out, values, 1.0, groups, cols, left_r, left_c, R, EVEN, PACK)


@triton.jit
def delayed_cast_kernel(
    x, history, history_t, data, scale, data_t, scale_t, R, C, stride_r, stride_c,
    LIMIT: tl.constexpr, SATURATES: tl.constexpr, H: tl.constexpr, SLOTS: tl.constexpr, ROW: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile = this_tile(x, R, C, stride_r, stride_c, EVEN, WIDE, G, BC)
    cast_by_history(
        tile, history, history_t, data, scale, data_t, scale_t, R, C,
        LIMIT, SATURATES, H, SLOTS, ROW, EVEN, PACK,
    )  # fmt: skip


@triton.jit
def row_cast_kernel(
    x, data, scale, R, C, stride_r, stride_c, LIMIT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Cast BR rows, each by a scale of its own: the second read of a row finds it in a cache."""
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    found = tl.zeros((BR, BC), tl.float32)
    for first in range(0, C, BC):
        cols = first + tl.arange(0, BC)
        at = x + rows[:, None] * stride_r + cols[None, :].to(tl.int64) * stride_c
        inside = (rows[:, None] < R) & (cols[None, :] < C)
        found = largest(found, magnitude(tl.load(at, mask=inside, other=0.0)))
    row_scale, inverse = scale_and_inverse(tl.reduce(found, 1, largest), LIMIT, False)
    tl.store(scale + rows, row_scale, mask=rows < R)
    for first in range(0, C, BC):
        cols = first + tl.arange(0, BC)
        at = x + rows[:, None] * stride_r + cols[None, :].to(tl.int64) * stride_c
        inside = (rows[:, None] < R) & (cols[None, :] < C)
        values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        cast = (values * inverse[:, None]).to(data.dtype.element_ty)
        tl.store(data + rows[:, None] * C + cols[None, :], cast, mask=inside)


PARTS = 512  # shares of a tensor's amax: 4 for each of an H200's 132 multiprocessors
SMALL = 1 << 16  # elements up to which a program finds amax itself: a pass before it costs more


def plan_tensorwise(layout: Layout) -> Plan:
    elements, scalars = math.prod(layout.extents), (*layout.extents, *layout.strides)
    parts = 0 if elements <= SMALL else PARTS
    find_amax = Launch(
        amax_kernel, (parts,), (elements, *scalars[1:]),
        FLAT=layout.dense, EVEN=elements % 8192 == 0, BLOCK=2048, STEPS=4, num_warps=8,
    )  # fmt: skip
    grid, facts = layout.tiles(64, 128)
    cast = Launch(cast_kernel, grid, scalars, LIMIT=layout.limit, PARTS=parts, STEP=0, **facts, num_warps=4)

    def run(x: Tensor, *_: object) -> tuple[Tensor, ...]:
        outputs = layout.allocate()
        amax = None
        if parts:
            amax = torch.empty_strided((parts,), (1,), dtype=torch.float32, device=layout.device)
            find_amax(x, amax)
        cast(x, amax, amax, *outputs)
        return layout.results(outputs)

    return run


def plan_delayed(
    layout: Layout, history: Tensor, row: int, kernel: object = delayed_cast_kernel, scalars: tuple = (),
    **constants: object,
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    """What casts (*inputs, history). kernel, scalars, constants: as in `plan_blockwise`."""
    length = history.shape[1] - 1
    grid, facts = layout.tiles(64, 128)
    cast = Launch(
        kernel, grid, (*layout.extents, *layout.strides, *scalars),
        LIMIT=layout.limit, SATURATES=hardware(layout.device).startswith("sm"),
        H=length, SLOTS=triton.next_power_of_2(length + 1), ROW=row, **facts, **constants, num_warps=4,
    )  # fmt: skip

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = layout.allocate()
        cast(*inputs, inputs[-1], *outputs)
        return layout.results(outputs)

    return run


def plan_rowwise(layout: Layout) -> Plan:
    (rows, cols), scalars = layout.extents, (*layout.extents, *layout.strides)
    find_amax = Launch(
        amax_rows_kernel, (triton.cdiv(rows, 512), triton.cdiv(cols, 128)), scalars,
        BR=64, BC=128, STEPS=8, num_warps=4,
    )  # fmt: skip
    grid, facts = layout.tiles(64, 128)
    cast = Launch(cast_kernel, grid, scalars, LIMIT=layout.limit, PARTS=0, STEP=1, **facts, num_warps=4)

    def run(x: Tensor, *_: object) -> tuple[Tensor, ...]:
        outputs = layout.allocate()
        amax_t = torch.zeros(cols + rows, dtype=torch.int32, device=layout.device)
        amax = amax_t[cols:] if layout.rows else None
        find_amax(x, amax, amax_t)
        cast(x, amax, amax_t, *outputs)
        return layout.results(outputs)

    return run


def plan_rows(layout: Layout) -> Plan:
    """Each row by a scale of its own; where both orientations are wanted, columns by another launch."""
    by_row = _row_cast(layout, *layout.extents, *layout.strides)
    by_col = _row_cast(layout, *layout.extents[::-1], *layout.strides[::-1])

    def run(x: Tensor, *_: object) -> tuple[Tensor, ...]:
        outputs = layout.allocate()
        data, scale, data_t, scale_t = outputs
        if data is not None:
            by_row(x, data, scale)
        if data_t is not None:
            by_col(x, data_t, scale_t)
        return layout.results(outputs)

    return run


def _row_cast(layout: Layout, rows: int, cols: int, stride_r: int, stride_c: int) -> Launch:
    return Launch(
        row_cast_kernel, (triton.cdiv(rows, 4),), (rows, cols, stride_r, stride_c),
        LIMIT=layout.limit, BR=4, BC=min(triton.next_power_of_2(cols), 1024), num_warps=4,
    )  # fmt: skip
