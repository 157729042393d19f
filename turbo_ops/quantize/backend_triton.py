"""Casts that read a tensor once and write one orientation or both.

Scales of a whole axis need a first pass for amax; scales of a block are found in the tile that is cast. A
tile is held as four, of every fourth row: four rows of a column are one 32-bit word of the transpose, so that
a quarter of the elements cross the threads. Nothing is clamped: with amax known, a cast ends at the limit.
"""

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import hardware
from turbo_ops.device.launch import Launch
from turbo_ops.device.scale import bits_of, largest, magnitude, scale_and_inverse, spread
from turbo_ops.device.target import refuses_device
from turbo_ops.quantize.op import block_of, dequantize, quantize, quantize_both, scale_layout

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


# ---- tiles of four


@triton.jit
def load4(x, rows, cols, left_r, left_c, stride_r, stride_c, EVEN: tl.constexpr):
    """Rows `rows`, `rows + 1`, ... of a tile at x, zeros where it ends."""
    at = x + (rows[:, None] * stride_r + cols[None, :] * stride_c)
    if EVEN:
        tiles = (
            tl.load(at), tl.load(at + stride_r), tl.load(at + 2 * stride_r), tl.load(at + 3 * stride_r)
        )  # fmt: skip
    else:
        row, col = rows[:, None], cols[None, :] < left_c
        tiles = (
            tl.load(at, mask=(row < left_r) & col, other=0.0),
            tl.load(at + stride_r, mask=(row + 1 < left_r) & col, other=0.0),
            tl.load(at + 2 * stride_r, mask=(row + 2 < left_r) & col, other=0.0),
            tl.load(at + 3 * stride_r, mask=(row + 3 < left_r) & col, other=0.0),
        )
    return tiles


@triton.jit
def largest4(a, b, c, d):
    return largest(largest(magnitude(a), magnitude(b)), largest(magnitude(c), magnitude(d)))


@triton.jit
def store_rows(data, values, inverse, rows, cols, left_r, left_c, C, EVEN: tl.constexpr):
    """Cast one of the four and store it."""
    at = data + (rows[:, None] * C + cols[None, :])
    cast = (values.to(tl.float32) * inverse).to(data.dtype.element_ty)
    if EVEN:
        tl.store(at, cast)
    else:
        tl.store(at, cast, mask=(rows[:, None] < left_r) & (cols[None, :] < left_c))


@triton.jit
def byte(values, inverse, DTYPE: tl.constexpr):
    return (values.to(tl.float32) * inverse).to(DTYPE).to(tl.uint8, bitcast=True).to(tl.uint32)


@triton.jit
def store_transposed(
    data_t, tiles, inverse, groups, cols, left_r, left_c, R, EVEN: tl.constexpr, PACK: tl.constexpr
):  # fmt: skip
    """Cast the four and store them transposed: as words where R is a multiple of 4, else byte by byte.

    The inverse may not be the value that `store_rows` took: cast once and stored in both orientations, the
    transpose comes out wrong (Triton 3.6, sm90). Each caller works it out again.
    """
    col = cols[:, None]
    if PACK:
        word = byte(tiles[0], inverse, data_t.dtype.element_ty)
        word |= byte(tiles[1], inverse, data_t.dtype.element_ty) << 8
        word |= byte(tiles[2], inverse, data_t.dtype.element_ty) << 16
        word |= byte(tiles[3], inverse, data_t.dtype.element_ty) << 24
        at = data_t.to(tl.pointer_type(tl.uint32), bitcast=True) + (col * (R // 4) + groups[None, :])
        if EVEN:
            tl.store(at, tl.trans(word))
        else:
            tl.store(at, tl.trans(word), mask=(col < left_c) & (4 * groups[None, :] < left_r))
    else:
        for i in tl.static_range(4):
            row = 4 * groups[None, :] + i
            cast = (tiles[i].to(tl.float32) * inverse).to(data_t.dtype.element_ty)
            tl.store(data_t + (col * R + row), tl.trans(cast), mask=(col < left_c) & (row < left_r))


# ---- scales of a whole axis


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
def cast_kernel(
    x, amax, amax_t, data, scale, data_t, scale_t, R, C, stride_r, stride_c,
    LIMIT: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast x by a scale per row and its transpose by a scale per column (STEP 1), or both by one (STEP 0)."""
    tile, tiles_c = tl.program_id(0), tl.cdiv(C, BC)
    first_r, first_c = (tile // tiles_c).to(tl.int64) * (4 * G), (tile % tiles_c).to(tl.int64) * BC
    left_r, left_c = R - first_r, C - first_c
    groups, cols = tl.arange(0, G), tl.arange(0, BC)
    if WIDE:
        groups, cols = groups.to(tl.int64), cols.to(tl.int64)
    rows = 4 * groups
    corner = x + first_r * stride_r + first_c * stride_c
    tiles = load4(corner, rows, cols, left_r, left_c, stride_r, stride_c, EVEN)
    if data is not None:
        out = data + first_r * C + first_c
        if STEP == 0:
            found = tensor_amax(x, amax, R, C, stride_r, stride_c, PARTS, G, BC)
            whole, inverse = scale_and_inverse(found, LIMIT, False)
            if tile == 0:
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
            if tile == 0:
                tl.store(scale_t, whole)
            store_transposed(out, tiles, inverse, groups, cols, left_r, left_c, R, EVEN, PACK)
        else:
            found = tl.load(amax_t + first_c + cols, mask=cols < left_c, other=0)
            col_scale, inverse = scale_and_inverse(found.to(tl.float32, bitcast=True), LIMIT, False)
            if first_r == 0:
                tl.store(scale_t + first_c + cols, col_scale, mask=cols < left_c)
            store_transposed(out, tiles, inverse[None, :], groups, cols, left_r, left_c, R, EVEN, PACK)


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


# ---- scales of a block


@triton.jit
def join4(a, b, c, d, N: tl.constexpr):
    """Four [N / 4] -> [N] with a's values at 0, 4, 8, ..., b's at 1, 5, 9, ..."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (N,))


@triton.jit
def split4(values, N: tl.constexpr):
    even, odd = tl.split(tl.reshape(values, (N // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def store_row_blocks(
    data, scale, tiles, rows, cols, left_r, left_c, C, scale_r, scale_c,
    LIMIT: tl.constexpr, E8M0: tl.constexpr, B: tl.constexpr, EVEN: tl.constexpr,
    G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast and store the four in blocks of 1 x B."""
    if B == BC:
        a, b = tl.reduce(magnitude(tiles[0]), 1, largest), tl.reduce(magnitude(tiles[1]), 1, largest)
        c, d = tl.reduce(magnitude(tiles[2]), 1, largest), tl.reduce(magnitude(tiles[3]), 1, largest)
        block_scale, inverse = scale_and_inverse(spread(join4(a, b, c, d, 4 * G)), LIMIT, E8M0)
        all_rows = tl.arange(0, 4 * G)
        tl.store(scale + all_rows * scale_r, block_scale, mask=all_rows < left_r)
        inverses = split4(inverse, 4 * G)
        for i in tl.static_range(4):
            store_rows(data, tiles[i], inverses[i][:, None], rows + i, cols, left_r, left_c, C, EVEN)
    else:
        blocks = tl.arange(0, BC // B)
        for i in tl.static_range(4):
            found = tl.reduce(tl.reshape(magnitude(tiles[i]), (G, BC // B, B)), 2, largest)
            block_scale, inverse = scale_and_inverse(found, LIMIT, E8M0)
            inside = (rows[:, None] + i < left_r) & (blocks[None, :] * B < left_c)
            tl.store(scale + (rows[:, None] + i) * scale_r + blocks[None, :] * scale_c, block_scale, inside)
            inverse = tl.broadcast_to(inverse[:, :, None], (G, BC // B, B))
            store_rows(
                data, tiles[i], tl.reshape(inverse, (G, BC)), rows + i, cols, left_r, left_c, C, EVEN
            )  # fmt: skip


@triton.jit
def store_col_blocks(
    data_t, scale_t, tiles, groups, cols, left_r, left_c, R, scale_r, scale_c,
    LIMIT: tl.constexpr, E8M0: tl.constexpr, B: tl.constexpr, EVEN: tl.constexpr, PACK: tl.constexpr,
    G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast and store the transpose of the four in blocks of 1 x B along its own rows."""
    found = largest4(tiles[0], tiles[1], tiles[2], tiles[3])
    if B == 4 * G:
        block_scale, inverse = scale_and_inverse(spread(tl.reduce(found, 0, largest)), LIMIT, E8M0)
        tl.store(scale_t + cols * scale_r, block_scale, mask=cols < left_c)
        inverse = inverse[None, :]
    else:
        blocks = tl.arange(0, 4 * G // B)
        found = tl.reduce(tl.reshape(found, (4 * G // B, B // 4, BC)), 1, largest)
        block_scale, inverse = scale_and_inverse(found, LIMIT, E8M0)
        inside = (blocks[:, None] * B < left_r) & (cols[None, :] < left_c)
        tl.store(scale_t + cols[None, :] * scale_r + blocks[:, None] * scale_c, block_scale, inside)
        inverse = tl.reshape(tl.broadcast_to(inverse[:, None, :], (4 * G // B, B // 4, BC)), (G, BC))
    store_transposed(data_t, tiles, inverse, groups, cols, left_r, left_c, R, EVEN, PACK)


@triton.jit
def block_cast_kernel(
    x, data, scale, data_t, scale_t, R, C, stride_r, stride_c, scale_r, scale_c, scale_t_r, scale_t_c,
    LIMIT: tl.constexpr, E8M0: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast x in blocks of 1 x B (SQUARE: B x B), and x.t() in the like along its own axes."""
    tile, tiles_c = tl.program_id(0), tl.cdiv(C, BC)
    first_r, first_c = (tile // tiles_c).to(tl.int64) * (4 * G), (tile % tiles_c).to(tl.int64) * BC
    left_r, left_c = R - first_r, C - first_c
    groups, cols = tl.arange(0, G), tl.arange(0, BC)
    if WIDE:
        groups, cols = groups.to(tl.int64), cols.to(tl.int64)
    rows = 4 * groups
    corner = x + first_r * stride_r + first_c * stride_c
    tiles = load4(corner, rows, cols, left_r, left_c, stride_r, stride_c, EVEN)
    if data is not None:
        out = data + first_r * C + first_c
        if SQUARE:
            found = tl.reduce(largest4(tiles[0], tiles[1], tiles[2], tiles[3]), 1, largest)
            block_scale, inverse = scale_and_inverse(tl.reduce(found, 0, largest), LIMIT, E8M0)
            tl.store(scale + first_r // B * scale_r + first_c // B * scale_c, block_scale)
            for i in tl.static_range(4):
                store_rows(out, tiles[i], inverse, rows + i, cols, left_r, left_c, C, EVEN)
        else:
            store_row_blocks(
                out, scale + first_r * scale_r + first_c // B * scale_c, tiles, rows, cols, left_r, left_c,
                C, scale_r, scale_c, LIMIT, E8M0, B, EVEN, G, BC,
            )  # fmt: skip
    if data_t is not None:
        out = data_t + first_c * R + first_r
        if SQUARE:  # reduced in the other order: see store_transposed
            found = tl.reduce(largest4(tiles[0], tiles[1], tiles[2], tiles[3]), 0, largest)
            block_scale, inverse = scale_and_inverse(tl.reduce(found, 0, largest), LIMIT, E8M0)
            tl.store(scale_t + first_c // B * scale_t_r + first_r // B * scale_t_c, block_scale)
            store_transposed(out, tiles, inverse, groups, cols, left_r, left_c, R, EVEN, PACK)
        else:
            store_col_blocks(
                out, scale_t + first_c * scale_t_r + first_r // B * scale_t_c, tiles, groups, cols, left_r,
                left_c, R, scale_t_r, scale_t_c, LIMIT, E8M0, B, EVEN, PACK, G, BC,
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


# ---- plans: all that can be worked out once for tensors of one kind

PARTS = 512  # shares of a tensor's amax: 4 for each of an H200's 132 multiprocessors
SMALL = 1 << 16  # elements up to which every program finds amax itself: a launch costs more
Plan = Callable[..., tuple[Tensor, ...]]  # x, ... -> data, scale of each orientation


class Layout:
    """How a kernel sees x, and what it writes: data and scale where `rows`, their transposes where `cols`.

    A transposed view is seen as the tensor that it is a view of, and the orientations change places.
    """

    def __init__(
        self, x: Tensor, dtype: torch.dtype, block: tuple[int, int], scale_dtype: torch.dtype, both: bool
    ):
        self.swapped = x.stride(0) == 1 and x.stride(1) != 1
        seen = x.t() if self.swapped else x
        self.extents, self.strides = tuple(seen.shape), tuple(seen.stride())
        self.rows, self.cols = both or not self.swapped, both or self.swapped
        self.device, self.dtype, self.block, self.scale_dtype = x.device, dtype, block, scale_dtype
        self.limit = torch.finfo(dtype).max
        self.dense = self.strides == (self.extents[1], 1)
        wanted = (self.rows, self.extents), (self.cols, self.extents[::-1])
        self._outputs = [spec for want, extents in wanted for spec in self._specs(want, *extents)]
        order = (2, 3, 0, 1) if self.swapped else (0, 1, 2, 3)
        self._order = [i for i in order if self._outputs[i]]

    def _specs(self, wanted: bool, rows: int, cols: int) -> list[tuple | None]:
        """Shape, strides, type and true columns of data and scale."""
        if not wanted:
            return [None, None]
        shape, strides = scale_layout(rows, cols, *self.block)
        padded = (shape[0], strides[0]) if strides[0] > shape[1] and strides[1] == 1 else shape
        return [
            ((rows, cols), (max(cols, 1), 1), self.dtype, cols),
            (padded, strides, self.scale_dtype, shape[1]),
        ]

    def allocate(self) -> list[Tensor | None]:
        """data, scale, data_t, scale_t; None where not wanted."""
        outputs: list[Tensor | None] = []
        for spec in self._outputs:
            if spec is None:
                outputs.append(None)
                continue
            shape, strides, dtype, cols = spec
            output = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            outputs.append(output if shape[1] == cols else output[:, :cols])  # padding included
        return outputs

    def results(self, outputs: list[Tensor | None]) -> tuple[Tensor, ...]:
        """What the op returns of `allocate`'s."""
        return tuple([outputs[i] for i in self._order])  # type: ignore[misc]

    def tiles(self, rows: int, cols: int) -> tuple[tuple[int], dict]:
        """The grid of tiles of rows x cols, and what the kernel is told of them."""
        (R, C), largest_step = self.extents, max(*self.extents, *self.strides)
        facts = {"EVEN": R % rows == C % cols == 0, "PACK": R % 4 == 0, "WIDE": largest_step >= 1 << 22}
        return (triton.cdiv(R, rows) * triton.cdiv(C, cols),), facts | {"G": rows // 4, "BC": cols}


def _plan(layout: Layout) -> Plan:
    if 0 in layout.extents:
        return functools.partial(_cast_empty, layout)
    if layout.block == (0, 0):
        return _plan_tensorwise(layout)
    if layout.block == (1, 0):
        return _plan_rowwise(layout) if layout.cols else _plan_rows(layout)
    return _plan_blockwise(layout)


def _cast_empty(layout: Layout, x: Tensor, *_: object) -> tuple[Tensor, ...]:
    results = layout.results(layout.allocate())
    for scale in results[1::2]:  # an empty block has amax 0, so scale 1
        if scale.dtype == torch.float8_e8m0fnu:
            scale.view(torch.uint8).fill_(127)
        else:
            scale.fill_(1.0)
    return results


def _plan_tensorwise(layout: Layout) -> Plan:
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


def _plan_rowwise(layout: Layout) -> Plan:
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


def _plan_rows(layout: Layout) -> Plan:
    rows, cols = layout.extents
    block = min(triton.next_power_of_2(cols), 1024)
    cast = Launch(
        row_cast_kernel, (triton.cdiv(rows, 4),), (rows, cols, *layout.strides),
        LIMIT=layout.limit, BR=4, BC=block, num_warps=4,
    )  # fmt: skip

    def run(x: Tensor, *_: object) -> tuple[Tensor, ...]:
        outputs = layout.allocate()
        data, scale = outputs[:2]
        cast(x, data, scale)
        return layout.results(outputs)

    return run


def _plan_blockwise(layout: Layout) -> Plan:
    e8m0 = layout.scale_dtype == torch.float8_e8m0fnu
    (rows, cols), (block_rows, block) = layout.extents, layout.block
    layouts = scale_layout(rows, cols, *layout.block), scale_layout(cols, rows, *layout.block)
    scale_strides = [stride for _, strides in layouts for stride in strides]
    grid, facts = layout.tiles(128, 128)
    if not e8m0 and hardware(layout.device).startswith("sm"):
        facts |= {"maxnreg": 168}  # three programs a multiprocessor; ptxas would take 228, and two fit
    cast = Launch(
        block_cast_kernel, grid, (*layout.extents, *layout.strides, *scale_strides),
        LIMIT=layout.limit, E8M0=e8m0, B=block, SQUARE=block_rows == block, **facts, num_warps=4,
    )  # fmt: skip

    def run(x: Tensor, *_: object) -> tuple[Tensor, ...]:
        outputs = layout.allocate()
        if e8m0:
            data, scale, data_t, scale_t = outputs
            cast(x, data, _bytes(scale), data_t, _bytes(scale_t))
        else:
            cast(x, *outputs)
        return layout.results(outputs)

    return run


def _bytes(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.view(torch.uint8)


@quantize.backend("triton", refuses=refuses, planned=True)
def _(x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype) -> Callable:
    return _plan(Layout(x, dtype, (block_rows, block_cols), scale_dtype, both=False))


@quantize_both.backend("triton", refuses=refuses, planned=True)
def _(x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype) -> Callable:
    return _plan(Layout(x, dtype, (block_rows, block_cols), scale_dtype, both=True))


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
