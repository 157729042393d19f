"""From the largest magnitude of a block to its scale, bit for bit as `quantize`'s reference."""

import triton
import triton.language as tl

AMAX_FLOOR = tl.constexpr(2.0**-110)  # as in quantize/op.py


@triton.jit
def largest(x, y):
    """The larger of two, or NaN: one instruction, which tl.max() spells without NaN."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude(x):
    return tl.abs(x.to(tl.float32))


@triton.jit
def bits_of(amax):
    """amax as integer bits: they order like the floats, and NaN is the largest, so atomics keep it."""
    return amax.to(tl.int32, bitcast=True)


@triton.jit
def spread(values):
    """values [N] with one element a thread. A reduction leaves each in all lanes of its row, and every lane
    would pay for the divisions of `scale_and_inverse`: a third of the time of a blockwise cast."""
    return tl.gather(values, tl.arange(0, values.shape[0]), 0)


@triton.jit
def scale_and_inverse(amax, LIMIT: tl.constexpr, E8M0: tl.constexpr):
    """amax fp32 -> scale (E8M0: its byte) and the factor that data is multiplied with."""
    floored = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
    floored = tl.where(amax == 0, LIMIT, floored)
    limit = tl.full(floored.shape, LIMIT, tl.float32)
    scale = tl.div_rn(floored, limit)
    if E8M0:
        scale_bits = scale.to(tl.int32, bitcast=True)
        exponent = (scale_bits >> 23) + ((scale_bits & 0x7FFFFF) != 0).to(tl.int32)
        finite = scale_bits < 0x7F800000
        inverse = tl.where(finite, (254 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
        scale = tl.where(finite, exponent, 255).to(tl.uint8)
    else:
        inverse = tl.div_rn(limit, floored)
    return scale, inverse
