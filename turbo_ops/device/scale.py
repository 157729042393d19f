"""From the largest magnitude of a block to its scale, bit for bit as `quantize`'s reference."""

import triton
import triton.language as tl

AMAX_FLOOR = tl.constexpr(2.0**-110)  # as in quantize/op.py


@triton.jit
def magnitude(x):
    """|x| as integer bits: they order like the floats, and NaN is the largest, so max() keeps it."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_and_inverse(bits, LIMIT: tl.constexpr, E8M0: tl.constexpr):
    """bits of amax -> scale (E8M0: its byte) and the factor that data is multiplied with."""
    amax = bits.to(tl.float32, bitcast=True)
    floored = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
    floored = tl.where(bits == 0, LIMIT, floored)
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


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """x within +-LIMIT, NaN kept: an FP8 cast past its limit is NaN on some devices and LIMIT on others."""
    return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
