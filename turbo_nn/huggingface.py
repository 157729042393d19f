"""transformers' registry of experts: what `model.set_experts_implementation` offers."""

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

import turbo_ops
from turbo_nn import experts
from turbo_nn.grouped_linear import recipe_problem
from turbo_nn.recipes import RECIPES
from turbo_nn.rule import ON_CPU, draw
from turbo_ops import Recipe

FORMS: WeakKeyDictionary[nn.Module, tuple[str, bool]] = WeakKeyDictionary()


def register_experts() -> list[str]:
    """Give transformers the experts "turbo" (no casts) and "turbo_<recipe>"; returns their names.

    Then `model.set_experts_implementation("turbo_fp8_rowwise")`, or from_pretrained's experts_implementation.
    Recipes with an amax history or MX blocks have none. Experts unlike `Experts` raise ValueError
    when they run.
    """
    names = {
        f"turbo_{name}" if recipe.casts else "turbo": recipe
        for name, recipe in RECIPES.items()
        if not recipe_problem(recipe)
    }
    for name, recipe in names.items():
        ExpertsInterface.register(name, functools.partial(_forward, recipe=recipe))
    return list(names)


def _forward(module: Any, x: Tensor, index: Tensor, weights: Tensor, *, recipe: Recipe) -> Tensor:
    activation, interleaved = _form(module)
    return experts.run(module, (x, index, weights), activation, interleaved, recipe)


@torch.compiler.assume_constant_result
def _form(module: Any) -> tuple[str, bool]:
    """The activation, and whether gate and up are interleaved: of those that agree with the module's own."""
    if module not in FORMS:
        FORMS[module] = _found_form(module)
    return FORMS[module]


@torch.no_grad()
def _found_form(module: Any) -> tuple[str, bool]:
    who = f"{type(module).__name__} with experts_implementation='turbo'"
    if not module.has_gate or module.has_post_expert_norm:
        raise ValueError(f"{who}: it has no gate, or a norm behind each expert: use 'grouped_mm'")
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), turbo_ops.force(**ON_CPU):
        (gate_up,) = draw((64, 20))
        gate_up[32:] *= 100  # past what limits cut
        expected = module._apply_gate(gate_up)
        halves = {False: gate_up.chunk(2, 1), True: (gate_up[:, ::2], gate_up[:, 1::2])}
        for activation in turbo_ops.ACTIVATIONS:
            for interleaved, (gate, up) in halves.items():
                if torch.allclose(turbo_ops.swiglu(gate, up, activation), expected, rtol=1e-5, atol=1e-5):
                    return activation, interleaved
    known = ", ".join(turbo_ops.ACTIVATIONS)
    raise ValueError(f"{who}: its gate agrees with none of {known}: use 'grouped_mm'")
