"""Accelerated layers and FP8 recipes, swapped into PyTorch models that exist."""

from turbo_nn.causal_lm import CausalLM
from turbo_nn.gated_mlp import GatedMLP
from turbo_nn.linear import Linear, weights_changed
from turbo_nn.patch import RULES, patch, unpatch
from turbo_nn.precision import heat_map, precision_log
from turbo_nn.recipe_state import RecipeState, load_recipe_state, recipe_state
from turbo_nn.recipes import RECIPES, Policy, load_policy
from turbo_nn.report import LeftError, Report, Verdict
from turbo_nn.rms_norm import RMSNorm
from turbo_nn.rotary import RotaryAttention
from turbo_nn.rule import Probe, Rule, Twin
from turbo_ops import Cast, Gemm, Recipe

__all__ = [
    "RECIPES",
    "RULES",
    "Cast",
    "CausalLM",
    "GatedMLP",
    "Gemm",
    "LeftError",
    "Linear",
    "Policy",
    "Probe",
    "RMSNorm",
    "Recipe",
    "RecipeState",
    "Report",
    "RotaryAttention",
    "Rule",
    "Twin",
    "Verdict",
    "heat_map",
    "load_policy",
    "load_recipe_state",
    "patch",
    "precision_log",
    "recipe_state",
    "unpatch",
    "weights_changed",
]
