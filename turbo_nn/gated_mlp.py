"""down(act(gate(x)) * up(x)) with its middle in one kernel, and the rule for the MLPs that models define."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

import turbo_ops
from turbo_nn.linear import Linear, has_hooks, is_plain
from turbo_nn.recipes import RecipeLike
from turbo_nn.rule import Probe, Rule, Twin, draw, parameters_of_forward, plain_linear, twin_class
from turbo_ops import Recipe

# The children that are gate, up and down; None: one of them gives gate and up side by side.
LAYOUTS: tuple[tuple[str, str | None, str], ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", None, "down_proj"),
)


class GatedMLP(nn.Module):
    """x [..., hidden] -> down(act(gate(x)) * up(x)) [..., hidden] (arXiv 2002.05202).

    activation: one of `turbo_ops.ACTIVATIONS`. recipe: of the three linear layers. In backward act(gate) is
    found again: gate and up are all that the middle keeps. ValueError for another activation.
    """

    layout: tuple[str, str | None, str] = LAYOUTS[0]
    activation = "silu"
    up_first = False  # of a fused gate_up
    others: tuple[tuple[str, type], ...] = ()  # of a model's MLP, what it holds besides: its activation

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike = "bf16",
    ):
        super().__init__()
        if activation not in turbo_ops.ACTIVATIONS:
            known = ", ".join(turbo_ops.ACTIVATIONS)
            raise ValueError(f"GatedMLP: activation={activation!r}: use one of {known}")
        self.activation = activation
        inward, outward = (hidden_size, intermediate_size), (intermediate_size, hidden_size)
        for name, (width, out) in zip(LAYOUTS[0], (inward, inward, outward), strict=True):
            self.add_module(str(name), Linear(width, out, bias, device, dtype, recipe=recipe))

    def forward(self, x: Tensor) -> Tensor:
        gate_name, up_name, down_name = self.layout
        for name, cls in self.others:  # the activation, which is not called here
            other = self._modules.get(name)
            if other is None or type(other) is not cls or has_hooks(other):  # another one since, or watched
                return super().forward(x)
        inward = [getattr(self, name) for name in (gate_name, up_name) if name]
        gate, up = inward[0](x), inward[1](x) if up_name else None
        if self.up_first:
            up, gate = gate.chunk(2, -1)
        # backward may write over what nobody else can have seen
        consume = all(map(is_plain, inward))
        down = getattr(self, down_name)
        if isinstance(down, Linear) and is_plain(down):  # nobody else can read its input, either
            recipe, history = down.recipe, down.fitting_history()
            return down(turbo_ops.gated_input(gate, up, self.activation, recipe, history, consume=consume))
        return down(turbo_ops.swiglu(gate, up, self.activation, consume=consume))


def layout_of(module: nn.Module) -> tuple[str, str | None, str] | None:
    """Which children are gate, up and down; None where it has no such children."""
    return next((names for names in LAYOUTS if {*filter(None, names)} <= module._modules.keys()), None)


def _refuses(module: nn.Module, recipe: Recipe) -> str | None:
    if isinstance(module, GatedMLP):
        return "is a turbo_nn.GatedMLP already"
    if any(parameter is not None for parameter in module._parameters.values()):
        return "it holds parameters of its own"
    layout = layout_of(module)
    others = {name: child for name, child in module.named_children() if name not in (layout or ())}
    learning = [name for name, child in others.items() if any(True for _ in child.parameters())]
    if learning:
        return f"it has a layer {learning[0]} besides"
    for name, child in others.items():
        if any(isinstance(part, _DropoutNd) for part in child.modules()):
            return f"it drops out in {name}"
        if has_hooks(child):
            return f"its {name} has hooks"
    inputs = parameters_of_forward(module)
    return None if len(inputs) == 1 else f"its forward takes {', '.join(inputs)}"


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    layout = layout_of(module)
    orders = (False, True) if layout and layout[1] is None else (False,)
    children = module.named_children()
    others = tuple((name, type(child)) for name, child in children if name not in (layout or ()))
    return [
        Twin(
            twin_class(GatedMLP, type(module)),  # type: ignore[arg-type]
            {"layout": layout, "activation": activation, "up_first": up_first, "others": others},
        )
        for activation in turbo_ops.ACTIVATIONS
        for up_first in orders
    ]


def _probe(module: nn.Module) -> list[Probe]:
    """Small layers in place of the model's; copies of its activation and what else it has."""
    gate_name, up_name, down_name = layout_of(module) or LAYOUTS[0]
    width, middle = 6, 10
    x, gate, up, down = draw((3, 5, width), (middle, width), (middle, width), (width, middle))
    weights: dict[str, Tensor] = {gate_name: gate, down_name: down} | ({up_name: up} if up_name else {})
    if up_name is None:
        weights[gate_name] = torch.cat((gate, up))
    others = {n: copy.deepcopy(child) for n, child in module.named_children() if n not in weights}
    return [Probe({}, 2 * x, modules={n: plain_linear(w) for n, w in weights.items()} | others)]


def _backend(module: nn.Module, twin: Twin) -> str | None:
    weight = next(module.parameters())
    return turbo_ops.swiglu_backend(weight.device, weight.dtype)


RULE = Rule(
    "gated_mlp",
    match=lambda module: isinstance(module, GatedMLP) or layout_of(module) is not None,
    convert=_convert,
    probe=_probe,
    refuses=_refuses,
    backend=_backend,
)
