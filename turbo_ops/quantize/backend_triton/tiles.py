"""A tile as four: every fourth row of it. What a kernel reads, and how it is stored in both orientations.

Four rows of a column are one 32-bit word of the transpose: a quarter of the elements cross the threads.
Nothing is clamped where amax is known: a cast then ends at the limit.
"""

import triton
import triton.language as tl

from turbo_ops.device.scale import largest, magnitude


@triton.jit
def visible(values, inverse, LIMIT: tl.constexpr):
    """values * inverse within +-LIMIT; what is not finite becomes NaN, never a limit."""
    values = values.to(tl.float32)
    scaled = tl.clamp(values * inverse, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(tl.abs(values) == float("inf"), float("nan"), scaled)


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
