"""The middle of a gated MLP for kernels, as `swiglu_fwd`'s reference."""

import triton
import triton.language as tl

from turbo_ops.swiglu.op import ALPHA, LIMIT

ROOT_2_OVER_PI = tl.constexpr(0.7978845608028654)
OAI_ALPHA, OAI_LIMIT = tl.constexpr(ALPHA), tl.constexpr(LIMIT)


@triton.jit
def parts(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) and its slope, what multiplies it and its slope."""
    linear, linear_slope = up, 1.0
    if ACTIVATION == "gelu_tanh":
        inner = ROOT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        act = 0.5 * gate * (1 + tanh)
        slope = 0.5 * (1 + tanh)
        slope += 0.5 * gate * (1 - tanh * tanh) * ROOT_2_OVER_PI * (1 + 0.134145 * gate * gate)
    elif ACTIVATION == "swigluoai":
        inside, within = gate <= OAI_LIMIT, tl.abs(up) <= OAI_LIMIT
        gate = tl.where(gate > OAI_LIMIT, OAI_LIMIT, gate)  # NaN stays
        linear = tl.where(up > OAI_LIMIT, OAI_LIMIT, tl.where(up < -OAI_LIMIT, -OAI_LIMIT, up)) + 1
        linear_slope = tl.where(within, 1.0, 0.0)
        share = tl.sigmoid(OAI_ALPHA * gate)
        act = gate * share
        slope = tl.where(inside, share * (1 + OAI_ALPHA * gate * (1 - share)), 0.0)
    else:
        share = tl.sigmoid(gate)
        act = gate * share
        slope = share * (1 + gate * (1 - share))
    return act, slope, linear, linear_slope


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up, rounded to gate's dtype."""
    act, _, linear, _ = parts(gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
    return (act * linear).to(gate.dtype)
