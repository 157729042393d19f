"""`torch.nn.RMSNorm`, also for the RMSNorm classes that models define for themselves, and its rule."""

from typing import Any

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_nn.rule import Probe, Rule, Twin, draw, parameters_of_forward
from turbo_ops import Recipe
from turbo_ops.arch import DTYPES

# (offset, round_first): which weight multiplies, and whether x_hat is rounded before it does.
VARIANTS = {"torch, Olmo": (0.0, False), "Llama": (0.0, True), "Gemma": (1.0, False)}


class RMSNorm(nn.RMSNorm):
    """Drop-in `torch.nn.RMSNorm` over the last dimension, statistics in fp32.

    offset is added to the weight (Gemma: 1). round_first rounds the normalised input to its dtype before the
    weight multiplies it (Llama). ValueError for a normalized_shape of more than one dimension.
    """

    offset = 0.0
    round_first = False

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
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
            raise ValueError(f"RMSNorm({self.normalized_shape}): only the last dimension can be normalised")
        self.offset, self.round_first = offset, round_first
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The layer starts as the plain normalisation: weight + offset = 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return turbo_ops.rms_norm(x, self.weight, self.eps, offset=self.offset, round_first=self.round_first)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, offset={self.offset}, round_first={self.round_first}"


def _width(module: nn.Module) -> int:
    weight = module._parameters.get("weight")
    return (weight.shape if weight is not None else getattr(module, "normalized_shape", None) or (64,))[0]


def _eps(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _refuses(module: nn.Module, recipe: Recipe) -> str | None:
    if isinstance(module, RMSNorm):
        return "is a turbo_nn.RMSNorm already"
    plain = type(module).forward is nn.RMSNorm.forward
    names = [name for name, _ in module.named_parameters()]
    if names not in (["weight"], []):
        return f"its parameters are {', '.join(names)}, not one weight"
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return "it holds buffers or modules of its own"
    weight = module._parameters.get("weight")
    if (weight is not None and weight.ndim != 1) or (plain and len(module.normalized_shape) != 1):  # type: ignore[arg-type]
        return "it normalises more than the last dimension"
    if weight is not None and weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}, neither fp32, bf16 nor fp16"
    if not plain and not isinstance(_eps(module), float):
        return "it has no eps"
    inputs = parameters_of_forward(module)
    return None if len(inputs) == 1 else f"its forward takes {', '.join(inputs)}"


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    if type(module).forward is nn.RMSNorm.forward:
        return [Twin(RMSNorm, {"offset": 0.0, "round_first": False})]
    weight = module._parameters.get("weight")
    attributes: dict[str, Any] = {"eps": _eps(module), "elementwise_affine": weight is not None}
    if weight is None:  # it takes any width
        nothing = {"normalized_shape": (), "weight": None, "offset": 0.0, "round_first": False}
        return [Twin(RMSNorm, attributes | nothing)]
    attributes["normalized_shape"] = tuple(weight.shape)
    return [
        Twin(RMSNorm, attributes | {"offset": offset, "round_first": round_first})
        for offset, round_first in VARIANTS.values()
    ]


def _probe(module: nn.Module) -> list[Probe]:
    """fp32, bf16, and a bf16 input with an fp32 weight: there the variants differ in dtype, too.

    Rounding in another order changes 1 result in 4, summing in another order fewer than 1 in 1000. A quarter
    of the rows are 1000 times smaller, so that eps counts.
    """
    width = _width(module)
    x, gain = draw((4, max(1, 4096 // max(width, 1)), width), (width,))
    x[0] *= 1e-3
    fp32, bf16 = torch.float32, torch.bfloat16
    weightless = module._parameters.get("weight") is None
    return [
        Probe({} if weightless else {"weight": gain.to(of_weight)}, x.to(of_x), differing=0.01)
        for of_x, of_weight in ((fp32, fp32), (bf16, bf16), (bf16, fp32))
    ]


def _backend(module: nn.Module, twin: Twin) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        weight = nn.Parameter(torch.empty(_width(module), device="meta"))
    return turbo_ops.rms_norm_backend(weight)


RULE = Rule(
    "rms_norm",
    match=lambda module: isinstance(module, nn.RMSNorm) or "RMSNorm" in type(module).__name__,
    convert=_convert,
    probe=_probe,
    refuses=_refuses,
    backend=_backend,
)
