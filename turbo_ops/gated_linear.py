"""act(gate) * up as the input of one linear layer: cast as it is made, where that pays, and nowhere else."""

from typing import Any

import torch
from torch import Tensor

from turbo_ops import casting
from turbo_ops.arch import arch, fp8_dtype
from turbo_ops.casting import INPUT, AmaxRow, Recipe, Scaled
from turbo_ops.linear import carry_casts
from turbo_ops.quantize import cast_arguments, quantize_both_swiglu, quantize_both_swiglu_delayed
from turbo_ops.swiglu import swiglu


def gated_input(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    recipe: Recipe,
    history: Tensor | None = None,
    *,
    consume: bool = False,
) -> Tensor:
    """`swiglu(gate, up, activation)` [..., D] for `linear(it, weight, bias, recipe, history)`.

    Nothing else may read it: its values may be NaN, and what they should be only in the casts it carries.
    """
    how, found = recipe.fprop.lhs, []
    past = AmaxRow(history, INPUT) if how is not None and how.history and history is not None else None
    if not _on_the_way(gate, recipe, past):
        return swiglu(gate, up, activation, consume=consume)

    def cast(gate: Tensor, up: Tensor) -> None:
        if past is None:
            found.extend(quantize_both_swiglu(gate, up, activation, *cast_arguments(gate, how)))  # type: ignore[arg-type]
        else:
            dtype = fp8_dtype(how.dtype, gate.device)  # type: ignore[union-attr]
            found.extend(quantize_both_swiglu_delayed(gate, up, activation, past.history, past.row, dtype))

    y = swiglu(gate, up, activation, consume=consume, cast=cast)
    carry_casts(y, how, Scaled(*found[:2]), Scaled(*found[2:]))
    return y


def _on_the_way(gate: Tensor, recipe: Recipe, past: Any) -> bool:
    how = recipe.fprop.lhs
    if how is None or how != recipe.wgrad.rhs or arch(gate.device) not in casting.ON_THE_WAY:
        return False
    if (
        torch.compiler.is_compiling()
        or not (torch.is_grad_enabled() and gate.requires_grad)
        or not gate.numel()
    ):
        return False
    # elsewhere amax is known only when all of it is made
    return 0 not in how.block if past is None else past.known
