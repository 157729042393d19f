"""Adding a tile of a product to what is in memory."""

import triton
import triton.language as tl


@triton.jit
def halves(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Left and right half of x [ROWS, COLS]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def add_columns(out, part, rows, first, M, N, stride, COLS: tl.constexpr):
    """Add to some columns of a tile."""
    cols = first + tl.arange(0, COLS)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = out + rows[:, None] * stride + cols[None, :]
    total = part + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_tile(out, tile, rows, first, M, N, stride, BM: tl.constexpr, BN: tl.constexpr):
    """Add tile [BM, BN] to rows of out [M, N], from column first on; a wide one by quarters.

    All of it at once, what is there and its addresses spill registers.
    """
    if BN >= 256:
        left, right = halves(tile, BM, BN)
        a_part, b_part = halves(left, BM, BN // 2)
        c_part, d_part = halves(right, BM, BN // 2)
        add_columns(out, a_part, rows, first, M, N, stride, BN // 4)
        add_columns(out, b_part, rows, first + BN // 4, M, N, stride, BN // 4)
        add_columns(out, c_part, rows, first + BN // 2, M, N, stride, BN // 4)
        add_columns(out, d_part, rows, first + 3 * (BN // 4), M, N, stride, BN // 4)
    else:
        add_columns(out, tile, rows, first, M, N, stride, BN)
