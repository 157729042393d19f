"""A scale for each 1x128, 128x128 or 1x32 block, found in the tile that is cast."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import hardware
from turbo_ops.device.launch import Launch
from turbo_ops.device.scale import largest, magnitude, scale_and_inverse, spread
from turbo_ops.quantize.backend_triton.layout import Layout
from turbo_ops.quantize.backend_triton.tiles import largest4, store_rows, store_transposed, this_tile
from turbo_ops.quantize.op import scale_layout


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
def cast_blocks(
    tile, data, scale, data_t, scale_t, R, C, scale_r, scale_c, scale_t_r, scale_t_c,
    LIMIT: tl.constexpr, E8M0: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Cast `this_tile` in blocks of 1 x B (SQUARE: B x B), its transpose in the like along its own axes."""
    first_r, first_c, left_r, left_c, groups, cols, tiles = tile
    rows = 4 * groups
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
def block_cast_kernel(
    x, data, scale, data_t, scale_t, R, C, stride_r, stride_c, scale_r, scale_c, scale_t_r, scale_t_c,
    LIMIT: tl.constexpr, E8M0: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile = this_tile(x, R, C, stride_r, stride_c, EVEN, WIDE, G, BC)
    cast_blocks(
        tile, data, scale, data_t, scale_t, R, C, scale_r, scale_c, scale_t_r, scale_t_c,
        LIMIT, E8M0, B, SQUARE, EVEN, PACK, G, BC,
    )  # fmt: skip


def plan_blockwise(
    layout: Layout, kernel: object = block_cast_kernel, scalars: tuple = (), **constants: object
) -> Callable[..., tuple[Tensor, ...]]:
    """What casts `kernel`'s inputs. scalars, constants: what it takes beyond `block_cast_kernel`."""
    e8m0 = layout.scale_dtype == torch.float8_e8m0fnu
    (rows, cols), (block_rows, block) = layout.extents, layout.block
    layouts = scale_layout(rows, cols, *layout.block), scale_layout(cols, rows, *layout.block)
    scale_strides = [stride for _, strides in layouts for stride in strides]
    grid, facts = layout.tiles(128, 128)
    if not e8m0 and hardware(layout.device).startswith("sm"):
        facts |= {"maxnreg": 168}  # three programs a multiprocessor; ptxas would take 228, and two fit
    cast = Launch(
        kernel, grid, (*layout.extents, *layout.strides, *scale_strides, *scalars),
        LIMIT=layout.limit, E8M0=e8m0, B=block, SQUARE=block_rows == block, **facts, **constants, num_warps=4,
    )  # fmt: skip

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = layout.allocate()
        if e8m0:
            data, scale, data_t, scale_t = outputs
            cast(*inputs, data, _bytes(scale), data_t, _bytes(scale_t))
        else:
            cast(*inputs, *outputs)
        return layout.results(outputs)

    return run


def _bytes(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.view(torch.uint8)
