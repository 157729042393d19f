"""Differentiable ops with interchangeable backends, for training in low precision."""

from turbo_ops.casting import Cast, Gemm, Recipe, Scaled
from turbo_ops.cross_entropy import cross_entropy_
from turbo_ops.delayed import new_history, reduce_amax_over, restore_history, track_history
from turbo_ops.dispatch import UnsupportedError, explain, force, reset
from turbo_ops.experts import moe_experts
from turbo_ops.gated_linear import gated_input
from turbo_ops.gemm import gemm, gemm_accumulate_
from turbo_ops.grouped_gemm import grouped_gemm, grouped_gemm_accumulate_, grouped_gemm_wgrad
from turbo_ops.grouped_linear import grouped_linear
from turbo_ops.linear import linear, linear_backends
from turbo_ops.linear_cross_entropy import linear_cross_entropy
from turbo_ops.moe_permute import Permutation, moe_permute, moe_unpermute
from turbo_ops.quantize import cast, cast_both, dequantize, quantize, quantize_both
from turbo_ops.rms_norm import add_rms_norm, rms_norm, rms_norm_backend
from turbo_ops.rope import rope, rope_backend
from turbo_ops.router import Routing, router, router_losses
from turbo_ops.swiglu import ACTIVATIONS, swiglu, swiglu_backend
from turbo_ops.weight_cache import weights_changed

reset()

__all__ = [
    "ACTIVATIONS",
    "Cast",
    "Gemm",
    "Permutation",
    "Recipe",
    "Routing",
    "Scaled",
    "UnsupportedError",
    "add_rms_norm",
    "cast",
    "cast_both",
    "cross_entropy_",
    "dequantize",
    "explain",
    "force",
    "gated_input",
    "gemm",
    "gemm_accumulate_",
    "grouped_gemm",
    "grouped_gemm_accumulate_",
    "grouped_gemm_wgrad",
    "grouped_linear",
    "linear",
    "linear_backends",
    "linear_cross_entropy",
    "moe_experts",
    "moe_permute",
    "moe_unpermute",
    "new_history",
    "quantize",
    "quantize_both",
    "reduce_amax_over",
    "reset",
    "restore_history",
    "rms_norm",
    "rms_norm_backend",
    "rope",
    "rope_backend",
    "router",
    "router_losses",
    "swiglu",
    "swiglu_backend",
    "track_history",
    "weights_changed",
]
