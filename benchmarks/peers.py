"""What a user would pick instead, where it imports: torchao, TransformerEngine, Liger."""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.session import Session, Variant

# package -> what it is imported as, and what it makes of a layer: nn.Linear -> module, or x, eps -> norm
Builders = dict[str, Callable[..., nn.Module]]


class Calls(nn.Module):
    """A function as a module, which is what a `Variant` builds."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]):
        super().__init__()
        self.forward = function  # type: ignore[method-assign]


def variants(session: Session, level: str, least_snr: float, *, say: bool = True) -> list[Variant]:
    """With --peers, those of a level that import. say: add a row for each package, with the reason if not."""
    if session.peers is None:
        return []
    found = []
    for package, (module, builders) in LIBRARIES[level].items():
        row = {"level": "peer", "name": package, "case": level}
        scratch = Session(session.device)
        row = (session if say else scratch).measure(row, functools.partial(_import, package, module))
        if row["status"] == "ok":
            found += [
                Variant(f"{package} {name}".strip(), build, least_snr, peer=True)
                for name, build in builders.items()
            ]
    return [variant for variant in found if session.peers in variant.name]


def _import(package: str, module: str) -> dict:
    importlib.import_module(module)
    return {"version": importlib.metadata.version(package)}


def _torchao(recipe: str, compiled: bool, linear: nn.Linear) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    layer = convert_to_float8_training(nn.Sequential(linear), config=config)
    return torch.compile(layer, dynamic=False) if compiled else layer


class _UnderAutocast(nn.Module):
    def __init__(self, layer: nn.Module, recipe: Any):
        super().__init__()
        self.layer, self.recipe = layer, recipe

    def forward(self, x: Tensor) -> Tensor:
        import transformer_engine.pytorch as te

        with te.autocast(enabled=True, recipe=self.recipe):
            return self.layer(x)


def _transformer_engine(recipe: str, linear: nn.Linear) -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    width, out = linear.in_features, linear.out_features
    layer = te.Linear(width, out, bias=False, params_dtype=linear.weight.dtype, device=linear.weight.device)
    with torch.no_grad():
        layer.weight.copy_(linear.weight)
    return _UnderAutocast(layer, getattr(recipes, recipe)())


def _liger(x: Tensor, eps: float) -> nn.Module:
    from liger_kernel.transformers import LigerRMSNorm

    return LigerRMSNorm(x.shape[-1], eps=eps).to(x.device, x.dtype)


def _transformer_engine_norm(x: Tensor, eps: float) -> nn.Module:
    import transformer_engine.pytorch as te

    return te.RMSNorm(x.shape[-1], eps=eps, dtype=x.dtype, device=x.device)


def _liger_swiglu() -> nn.Module:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return Calls(LigerSiLUMulFunction.apply)


def _liger_rope(cos: Tensor, sin: Tensor) -> nn.Module:
    from liger_kernel.ops.rope import LigerRopeFunction

    return Calls(lambda q, k: LigerRopeFunction.apply(q, k, cos, sin))


def _liger_loss(labels: Tensor) -> nn.Module:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return Calls(lambda hidden, weight: loss(weight, hidden, labels))


LIBRARIES: dict[str, dict[str, tuple[str, Builders]]] = {
    "linear": {
        "torchao": (
            "torchao.float8",
            {
                f"{recipe} {mode}": functools.partial(_torchao, recipe, mode == "compiled")
                for recipe in ("tensorwise", "rowwise")
                for mode in ("eager", "compiled")
            },
        ),
        "transformer_engine": (
            "transformer_engine.pytorch",
            {
                name: functools.partial(_transformer_engine, recipe)
                for name, recipe in {
                    "delayed": "DelayedScaling",
                    "tensorwise": "Float8CurrentScaling",
                    "blockwise": "Float8BlockScaling",
                }.items()
            },
        ),
    },
    "rms_norm": {
        "liger_kernel": ("liger_kernel.transformers", {"": _liger}),
        "transformer_engine": ("transformer_engine.pytorch", {"": _transformer_engine_norm}),
    },
    "swiglu": {"liger_kernel": ("liger_kernel.transformers", {"": _liger_swiglu})},
    "rope": {"liger_kernel": ("liger_kernel.transformers", {"": _liger_rope})},
    "loss": {"liger_kernel": ("liger_kernel.transformers", {"": _liger_loss})},
}
