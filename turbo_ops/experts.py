"""A mixture of experts behind its router: tokens go to their experts, through two linear layers, and back."""

from typing import Any

import torch
from torch import Tensor

from turbo_ops.casting import Recipe
from turbo_ops.dispatch import refuse_second_derivative
from turbo_ops.grouped_linear import Source, grouped_linear
from turbo_ops.moe_permute import Permutation, moe_permute, moe_unpermute
from turbo_ops.quantize import ALIGN
from turbo_ops.swiglu import swiglu


class RowWeightsFunction(torch.autograd.Function):
    """weights [..., k] -> [R], each row's own, 0 where a row has no source; a gather in both directions."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, permutation: Permutation) -> Tensor:
        ctx.places, ctx.like = permutation.places, weights
        sources = permutation.sources
        if not weights.numel():
            return weights.new_zeros(len(sources))
        return torch.where(sources >= 0, weights.reshape(-1)[sources.clamp(min=0)], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        refuse_second_derivative("moe_experts")
        places = ctx.places
        if not grad.numel():
            return torch.zeros_like(ctx.like), None
        return torch.where(places >= 0, grad[places.clamp(min=0)], 0).view(ctx.like.shape), None


def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    recipe: Recipe | None = None,
    resident: bool = True,
) -> Tensor:
    """x [T, H], experts [T, k] int64, weights [T, k], gate_up [E, 2I, H], down [E, H, I] -> [T, H].

    Each token's sum over its experts e of weight * down[e](act(gate) * up) where gate and up are the halves
    of gate_up[e](x), or interleaved its even and odd rows; biases [E, 2I] and [E, H]. An expert number
    from E on counts nothing (expert parallelism: it is another rank's). activation: see `swiglu_fwd`; recipe,
    resident and dtypes: see `grouped_linear`. Differentiable once in x, weights and all parameters. Nothing
    waits for the device. ValueError where shapes, dtypes or options do not fit.
    """
    problem = _problem(x, experts, weights, gate_up, down)
    if problem:
        raise ValueError(f"moe_experts: {problem}")
    align = ALIGN if recipe is not None and recipe.casts else 1
    rows, permutation = moe_permute(x, experts, len(gate_up), align=align)
    how: dict[str, Any] = {"recipe": recipe, "align": align, "resident": resident}
    source = Source(x.detach(), permutation.sources, experts.shape[1])
    hidden = grouped_linear(rows, gate_up, permutation.ends, gate_up_bias, source=source, **how)
    # a bias is weighted, too: then the sum is; else what down reads, which spares keeping what it gives
    early = down_bias is None
    probs = RowWeightsFunction.apply(weights, permutation) if early else None
    if interleaved:
        middle = swiglu(hidden[:, ::2], hidden[:, 1::2], activation, probs)
    else:
        middle = swiglu(hidden, None, activation, probs, consume=True)
    y = grouped_linear(middle, down, permutation.ends, down_bias, **how)
    return moe_unpermute(y, permutation, None if early else weights)


def _problem(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> str | None:
    if x.ndim != 2:
        return f"x {tuple(x.shape)}: give [T, H]"
    if gate_up.ndim != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != x.shape[1]:
        return f"gate_up {tuple(gate_up.shape)}: give [E, 2I, {x.shape[1]}]"
    right = len(gate_up), x.shape[1], gate_up.shape[1] // 2
    if tuple(down.shape) != right:
        return f"down {tuple(down.shape)}: give {right}, as x and gate_up"
    if experts.ndim != 2 or len(experts) != len(x) or experts.dtype != torch.int64:
        return f"experts {tuple(experts.shape)} of {experts.dtype}: give [{len(x)}, k] of torch.int64"
    if weights.shape != experts.shape or not weights.is_floating_point():
        return f"weights {tuple(weights.shape)} of {weights.dtype}: give {tuple(experts.shape)} of floats"
    return None
