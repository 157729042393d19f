"""A tile as four: every fourth row of it. What a kernel reads, and how it is stored in both orientations.

Four rows of a column are one 32-bit word of the transpose: a quarter of the elements cross the threads.
Nothing is clamped where amax is known: a cast then ends at the limit.
"""

import triton
import triton.language as tl

from turbo_ops.device.scale import largest, magnitude


@triton.jit
def visible(values):
    """What is not finite as NaN, so that no cast makes a limit of it."""
    return tl.where(tl.abs(values.to(tl.float32)) == float("inf"), float("nan"), values)


@triton.jit
def limited(values, inverse, LIMIT: tl.constexpr, SATURATES: tl.constexpr):
    """values * inverse within +-LIMIT, if the cast itself does not see to that."""
    scaled = values.to(tl.float32) * inverse
    if not SATURATES:
        scaled = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return scaled


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
def this_tile(
    x, R, C, stride_r, stride_c, EVEN: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Of this program: where its tile begins, what is left of x there, groups of rows, columns, values."""
    tile, tiles_c = tl.program_id(0), tl.cdiv(C, BC)
    first_r, first_c = (tile // tiles_c).to(tl.int64) * (4 * G), (tile % tiles_c).to(tl.int64) * BC
    left_r, left_c = R - first_r, C - first_c
    groups, cols = tl.arange(0, G), tl.arange(0, BC)
    if WIDE:
        groups, cols = groups.to(tl.int64), cols.to(tl.int64)
    corner = x + first_r * stride_r + first_c * stride_c
    tiles = load4(corner, 4 * groups, cols, left_r, left_c, stride_r, stride_c, EVEN)
    return first_r, first_c, left_r, left_c, groups, cols, tiles


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


# Four values become one word. Spelled with shifts, Triton 3.6 extracts wrong bytes on sm90 (fp32 in, the
# transpose alone: one byte of eight), and needs 6 instructions where these are 3.
CONVERT = """
{{ .reg .b16 low, high;
cvt.rn.satfinite.{0}x2.f32 low, $2, $1;
cvt.rn.satfinite.{0}x2.f32 high, $4, $3;
mov.b32 $0, {{low, high}}; }}
"""
E4M3, E5M2 = tl.constexpr(CONVERT.format("e4m3")), tl.constexpr(CONVERT.format("e5m2"))


@triton.jit
def word_of(tiles, inverse, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The four cast, the first in the lowest byte."""
    if PTX:
        word = tl.inline_asm_elementwise(
            E5M2 if DTYPE.is_fp8e5() else E4M3,
            "=r,f,f,f,f",
            [
                tiles[0].to(tl.float32) * inverse,
                tiles[1].to(tl.float32) * inverse,
                tiles[2].to(tl.float32) * inverse,
                tiles[3].to(tl.float32) * inverse,
            ],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        word = byte(tiles[0], inverse, DTYPE)
        word |= byte(tiles[1], inverse, DTYPE) << 8
        word |= byte(tiles[2], inverse, DTYPE) << 16
        word |= byte(tiles[3], inverse, DTYPE) << 24
    return word


@triton.jit
def store_transposed(
    data_t, tiles, inverse, groups, cols, left_r, left_c, R, EVEN: tl.constexpr, PACK: tl.constexpr
):  # fmt: skip
    """Cast the four and store them transposed: as words (PACK 1, by PTX where 2), or byte by byte (0).

    The inverse may not be the value that `store_rows` took: cast once and stored in both orientations, the
    transpose comes out wrong (Triton 3.6, sm90). Each caller works it out again.
    """
    col = cols[:, None]
    if PACK:
        word = word_of(tiles, inverse, data_t.dtype.element_ty, PACK == 2)
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
