"""Accelerated layers and FP8 recipes, swapped into PyTorch models that exist."""

from turbo_nn.linear import Linear, weights_changed
from turbo_nn.patch import RULES, patch, unpatch
from turbo_nn.recipes import RECIPES, Policy, load_policy
from turbo_nn.report import LeftError, Report, Verdict
from turbo_nn.rms_norm import RMSNorm
from turbo_nn.rule import Probe, Rule, Twin
from turbo_ops import Cast, Gemm, Recipe

__all__ = [
    "RECIPES",
    "RULES",
    "Cast",
    "Gemm",
    "LeftError",
    "Linear",
    "Policy",
    "Probe",
    "RMSNorm",
    "Recipe",
    "Report",
    "Rule",
    "Twin",
    "Verdict",
    "load_policy",
    "patch",
    "unpatch",
    "weights_changed",
]
