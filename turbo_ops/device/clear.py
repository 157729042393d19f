"""Zeros where a product of groups writes nothing."""

import triton
import triton.language as tl


@triton.jit
def clear_kernel(out, ends, R, N, E, BM: tl.constexpr, BN: tl.constexpr):
    """Zeros behind the last end."""
    last = tl.load(ends + E - 1)
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    if (tl.program_id(0).to(tl.int64) + 1) * BM > last:
        for start in range(0, N, BN):
            cols = start + tl.arange(0, BN)
            inside = (rows[:, None] >= last) & (rows[:, None] < R) & (cols[None, :] < N)
            tl.store(out + rows[:, None] * N + cols[None, :], 0.0, mask=inside)
