"""`torch.nn.RMSNorm`, and the variants that Hugging Face models define for themselves."""

from itertools import product
from typing import cast

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_nn.rule import Rule, Site, Trial, Twin, draw
from turbo_ops import Recipe


class RMSNorm(nn.RMSNorm):
    """Normalise the last dimension of x [..., D] (arXiv 1910.07467).

    offset is added to the weight (Gemma: 1). round_first rounds the normalised x to x's dtype before it
    meets the weight (Llama). Everything else is `torch.nn.RMSNorm`; normalized_shape must be one dimension.
    """

    offset: float
    round_first: bool

    def __init__(
        self,
        normalized_shape: int | tuple[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        round_first: bool = False,
    ):
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if len(self.normalized_shape) != 1:
            raise ValueError(f"normalized_shape={normalized_shape}: must be one dimension")
        self.offset, self.round_first = offset, round_first

    def forward(self, x: Tensor) -> Tensor:
        return turbo_ops.rms_norm(x, self.weight, self.eps, offset=self.offset, round_first=self.round_first)

    def extra_repr(self) -> str:
        variant = f", offset={self.offset}" if self.offset else ""
        return f"{super().extra_repr()}{variant}" + (", round_first=True" if self.round_first else "")


def _matches(module: nn.Module) -> bool:
    """By structure: a name and one vector of weights. The trials tell the variants, and impostors, apart."""
    return isinstance(module, nn.RMSNorm) or (
        type(module).__name__.endswith("RMSNorm") and any(True for _ in module.parameters())
    )


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    if isinstance(module, RMSNorm):
        return [Twin(RMSNorm, {})]
    shared = {
        "eps": _eps(module),
        "normalized_shape": tuple(cast(Tensor, module.weight).shape),
        "elementwise_affine": True,
    }
    return [
        Twin(RMSNorm, {**shared, "offset": offset, "round_first": round_first})
        for offset, round_first in product((0.0, 1.0), (True, False))
    ]


def _trials(module: nn.Module) -> list[Trial]:
    """fp32 for the formula, bf16 for the order of its roundings, and a mix for the dtype that comes out."""
    width = cast(Tensor, module.weight).shape[0]
    weight, x = draw(width), draw(2, 7, width)
    bf16 = torch.bfloat16
    return [
        Trial({"weight": weight}, x),
        Trial({"weight": weight.to(bf16)}, x.to(bf16)),
        Trial({"weight": weight}, x.to(bf16)),
    ]


def _refuses(site: Site, convert_small: bool) -> str | None:
    parameters = dict(site.module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].ndim != 1:
        return f"has parameters {', '.join(parameters)}: one weight [D] is known"
    if _eps(site.module) is None and not isinstance(site.module, nn.RMSNorm):
        return "has neither `eps` nor `variance_epsilon`"
    return None


RULE = Rule(
    "rms_norm",
    casts=False,
    match=_matches,
    convert=_convert,
    kind=lambda module: (_eps(module), cast(Tensor, module.weight).shape),
    trials=_trials,
    protects=lambda site: None,
    refuses=_refuses,
    backend=lambda module, recipe: turbo_ops.rms_norm_backend(cast(Tensor, module.weight)),
)
