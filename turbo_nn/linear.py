"""`torch.nn.Linear` whose three GEMMs run in the precision of a recipe, and the rule that patches it in."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

import turbo_ops
from turbo_nn.recipes import RecipeLike, layer_recipe, name_of
from turbo_nn.rule import Probe, Rule, Twin, draw, twin_class
from turbo_ops import Recipe
from turbo_ops.arch import DTYPES, arch

# Weights of the smallest layer that gained from FP8, eager, 8192 tokens. On an H200 4096x4096 and 2048x8192
# did (1.5x, 1.4x), 2048x2048 lost (0.3x), held up by the host: docs/performance.md. AMD's are the same until
# somebody measures.
SMALLEST = dict.fromkeys(("sm90", "gfx942", "gfx950"), 4096 * 4096)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook sees what the module takes or returns, forward or backward."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in names)


def is_plain(layer: object) -> bool:
    """Whether calling the layer is a product and nothing more: no hook sees it, no other code runs."""
    if not isinstance(layer, nn.Linear) or type(layer).forward not in (nn.Linear.forward, Linear.forward):
        return False
    everywhere = _module._global_forward_hooks, _module._global_forward_pre_hooks
    return "forward" not in vars(layer) and not has_hooks(layer) and not any(everywhere)


class Linear(nn.Linear):
    """Drop-in `torch.nn.Linear`: x [..., in] -> [..., out], with the casts of `recipe`.

    recipe: a name of `RECIPES`, a `Recipe`, or a policy (a `Policy`, its mapping or its YAML file), of which
    the rule "*" counts. ValueError for an unknown name. The state_dict is that of `torch.nn.Linear`.
    """

    recipe: Recipe
    # No buffer: .half() would round it, and DistributedDataParallel would broadcast it at each step.
    amax_history: Tensor | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike = "bf16",
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = layer_recipe(recipe)
        self.amax_history = _new_history(self.recipe, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        gathered = "_is_fsdp_managed_module" in self.__dict__
        return turbo_ops.linear(
            x, self.weight, self.bias, self.recipe, self.fitting_history(), resident=not gathered
        )

    def fitting_history(self) -> Tensor | None:
        """The amax history, made to fit the recipe and to follow the weight to its device."""
        old, steps = self.amax_history, self.recipe.history
        fits = old is not None and old.device == self.weight.device and old.shape[1] == steps + 1
        if fits or not steps:
            return old
        self.amax_history = turbo_ops.new_history(steps, self.weight.device)
        if old is not None and not old.is_meta and old.shape == self.amax_history.shape:
            turbo_ops.restore_history(self.amax_history, old)
        return self.amax_history

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a deepcopy and a pickle
        if self.amax_history is not None:
            turbo_ops.track_history(self.amax_history)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={name_of(self.recipe)}"


def _new_history(recipe: Recipe, weight: Tensor) -> Tensor | None:
    return turbo_ops.new_history(recipe.history, weight.device) if recipe.history else None


def weights_changed(model: nn.Module) -> None:
    """Cast the weights again at their next use: something wrote them through `p.data`, unseen by torch."""
    turbo_ops.weights_changed(model.parameters())


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _refuses(module: nn.Module, recipe: Recipe) -> str | None:
    cls = type(module)
    if _is_conv1d(module):
        return "Conv1D keeps its weight as [in, out], a Linear as [out, in]"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "MultiheadAttention reads its weight without calling it"
    if cls.forward not in (nn.Linear.forward, Linear.forward):
        return f"{cls.__name__} has a forward of its own"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed, not a parameter (parametrize, weight_norm)"
    if is_lazy(weight):
        return "its weight has no shape yet: run the model once"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}: patch before quantising or sharding"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}, neither fp32, bf16 nor fp16"
    return None


def _small(module: nn.Module) -> str | None:
    weight = cast(Tensor, module.weight)
    if weight.device.type != "cuda":
        return None
    least = SMALLEST.get(arch(weight.device), SMALLEST["sm90"])
    if weight.numel() >= least:
        return None
    out, width = weight.shape
    return f"{out}x{width} is too small to gain on {arch(weight.device)}; convert_small=True takes it"


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    history = _new_history(recipe, cast(Tensor, module.weight))
    return [Twin(twin_class(Linear, type(module)), {"recipe": recipe, "amax_history": history})]  # type: ignore[arg-type]


def _probe(module: nn.Module) -> list[Probe]:
    """A corner of the weight: nn.Linear's forward asks for no extents, and a head has 500 million weights."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    out, width = (min(extent, 64) for extent in weight.shape)
    x, corner, shift = draw((3, 5, width), (out, width), (out,), dtype=weight.dtype)
    return [Probe({"weight": corner} if bias is None else {"weight": corner, "bias": shift}, x)]


RULE = Rule(
    "linear",
    match=lambda module: isinstance(module, nn.Linear) or _is_conv1d(module),
    convert=_convert,
    probe=_probe,
    refuses=_refuses,
    small=_small,
    backend=lambda module, twin: turbo_ops.linear_backends(
        cast(Tensor, module.weight), twin.attributes["recipe"]
    ),
    casts=True,
)
