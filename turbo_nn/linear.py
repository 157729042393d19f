"""`torch.nn.Linear` in the precision of a recipe."""

from typing import cast

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_nn.recipes import resolve
from turbo_nn.rule import Rule, Site, Trial, Twin, draw
from turbo_ops import Recipe
from turbo_ops.arch import arch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Below this many weights a layer gains nothing from FP8: casts and launches cost more than the GEMMs save.
SMALLEST = {"sm90": 4096 * 4096, "gfx942": 4096 * 4096, "gfx950": 4096 * 4096}


class Linear(nn.Linear):
    """y = x @ weight.T + bias, x [..., in_features] -> [..., out_features].

    recipe: a name of `turbo_nn.RECIPES`, a `Recipe`, or a policy (in which this layer's name is ""). Raises
    ValueError for an unknown name. Everything else is `torch.nn.Linear`.
    """

    recipe: Recipe

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: object = "bf16",
    ):
        found = resolve(recipe).at("")
        if found is None:
            raise ValueError(f"recipe={recipe!r}: no rule of this policy matches a layer by itself, add '*'")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = found[1]

    def forward(self, x: Tensor) -> Tensor:
        return turbo_ops.linear(x, self.weight, self.bias, self.recipe)

    def extra_repr(self) -> str:
        name = resolve(self.recipe).rules[0][1]
        return f"{super().extra_repr()}, recipe={name}"


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    return [Twin(Linear, {"recipe": recipe})]


def _trials(module: nn.Module) -> list[Trial]:
    """A corner of the layer: the mapping does not depend on extents, and a head has 500 million weights."""
    out_features, in_features = (min(n, 64) for n in cast(Tensor, module.weight).shape)
    parameters: dict[str, Tensor | None] = {"weight": draw(out_features, in_features)}
    parameters["bias"] = None if module.bias is None else draw(out_features)
    return [Trial(parameters, draw(3, 5, in_features))]


def _protects(site: Site) -> str | None:
    if site.is_adapter:
        return "a LoRA factor stays in high precision"
    if site.module.weight in site.embeddings:
        return "its weight is an embedding's too: a tied head stays in high precision"
    if site.name.endswith(("gate", "router")) and hasattr(site.parent, "experts"):
        return "a router stays in high precision"
    return None


def _refuses(site: Site, convert_small: bool) -> str | None:
    module, weight = site.module, cast(Tensor, site.module.weight)
    if type(module) not in (nn.Linear, Linear):
        return f"{type(module).__name__} is a subclass of nn.Linear with behaviour of its own"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}: fp32, bf16 and fp16 are cast"
    device = weight.device
    if convert_small or device.type != "cuda":
        return None
    smallest = SMALLEST.get(arch(device), SMALLEST["sm90"])
    if weight.numel() < smallest:
        extents = "x".join(map(str, weight.shape))
        return f"{extents} is too small to gain on {arch(device)}; convert_small=True takes it"
    return None


RULE = Rule(
    "linear",
    casts=True,
    match=lambda module: isinstance(module, nn.Linear),
    convert=_convert,
    kind=lambda module: (module.bias is None,),
    trials=_trials,
    protects=_protects,
    refuses=_refuses,
    backend=lambda module, recipe: turbo_ops.linear_backends(cast(Tensor, module.weight), recipe),
)
