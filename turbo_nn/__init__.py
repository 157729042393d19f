"""Accelerated layers and FP8 recipes, swapped into PyTorch models that exist."""

from typing import TYPE_CHECKING, Any

from turbo_nn.causal_lm import CausalLM
from turbo_nn.experts import Experts
from turbo_nn.gated_mlp import GatedMLP
from turbo_nn.grouped_linear import GroupedLinear
from turbo_nn.linear import Linear, weights_changed
from turbo_nn.linear_cross_entropy import LinearCrossEntropy
from turbo_nn.moe import MoE
from turbo_nn.patch import RULES, patch, unpatch
from turbo_nn.precision import heat_map, precision_log
from turbo_nn.recipe_state import RecipeState, load_recipe_state, recipe_state
from turbo_nn.recipes import RECIPES, Policy, load_policy
from turbo_nn.report import LeftError, Report, Verdict
from turbo_nn.rms_norm import RMSNorm
from turbo_nn.rotary import RotaryAttention
from turbo_nn.router import Router
from turbo_nn.rule import Probe, Rule, Twin
from turbo_ops import Cast, Gemm, Recipe

if TYPE_CHECKING:
    from turbo_nn.huggingface import register_experts
    from turbo_nn.trainer import TurboCallback, patch_for

__all__ = [
    "RECIPES",
    "RULES",
    "Cast",
    "CausalLM",
    "Experts",
    "GatedMLP",
    "Gemm",
    "GroupedLinear",
    "LeftError",
    "Linear",
    "LinearCrossEntropy",
    "MoE",
    "Policy",
    "Probe",
    "RMSNorm",
    "Recipe",
    "RecipeState",
    "Report",
    "RotaryAttention",
    "Router",
    "Rule",
    "TurboCallback",
    "Twin",
    "Verdict",
    "heat_map",
    "load_policy",
    "load_recipe_state",
    "patch",
    "patch_for",
    "precision_log",
    "recipe_state",
    "register_experts",
    "unpatch",
    "weights_changed",
]


def __getattr__(name: str) -> Any:
    """What needs transformers is imported with the first use of it."""
    if name in ("TurboCallback", "patch_for"):
        from turbo_nn import trainer

        return getattr(trainer, name)
    if name == "register_experts":
        from turbo_nn import huggingface

        return huggingface.register_experts
    raise AttributeError(f"module 'turbo_nn' has no attribute {name!r}")
