"""Blocks of models that keep their experts as a list of gated MLPs, and the rule that finds them."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import turbo_ops
from turbo_nn import gated_mlp, linear
from turbo_nn.gated_mlp import LAYOUTS, GatedMLP, layout_of
from turbo_nn.grouped_linear import grouped_backends, recipe_problem
from turbo_nn.linear import Linear, has_hooks, is_plain
from turbo_nn.moe import SHARED, SHARED_GATE, rows_of, shared_of, with_shared
from turbo_nn.recipes import BF16
from turbo_nn.rule import (
    BARE,
    Probe,
    Prover,
    Rule,
    Twin,
    draw,
    parameters_of_forward,
    plain_linear,
    twin_class,
)
from turbo_ops import Recipe

GATES = ("gate", "router")
# The options of `turbo_ops.router`, and the attributes that models keep them in.
OPTIONS = {
    "k": ("top_k", "num_experts_per_tok"),
    "normalize": ("norm_topk_prob",),
    "scale": ("routed_scaling_factor",),
}
REFERENCE = dict.fromkeys(("router", "moe_permute", "grouped_gemm", "swiglu", "gemm"), "reference")


class Middle(NamedTuple):
    """Attributes of `GatedMLP`."""

    layout: tuple[str, str | None, str]
    activation: str
    up_first: bool
    others: tuple[tuple[str, type], ...]


class Mixture(NamedTuple):
    """How a model's block works.

    gate: the child that routes. expert: the class of each expert. middle: what `GatedMLP` says of one.
    guessed: options of `turbo_ops.router` that no attribute of the block gives. returns_logits: beside the
    result. adds_loss: the gate's third result is a loss, which backward adds to the model's.
    """

    gate: str
    expert: type[nn.Module]
    middle: Middle
    guessed: dict[str, Any]
    returns_logits: bool
    adds_loss: bool


class MoEBlock(nn.Module):
    """A model's block with `experts`, a ModuleList of gated MLPs, whose products run for all experts at once.

    Parameters stay where they are. Each forward copies the experts' weights into a stack, kept for backward:
    checkpoint the block, or use a model with stacked weights (`MoE`; transformers' own since 5.0). An expert
    without tokens gets gradients of 0, where a model's loop may give None. The recipe is that of the experts'
    layers; where these have several, or one that experts cannot have, and where an expert is more than its
    layers by now (hooks, LoRA), the model's own forward runs.
    """

    mixture: Mixture

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        how, x = self.mixture, hidden_states
        layers = _layers(self, how)
        recipe = None if layers is None else _recipe(layers)
        if layers is None or recipe is None:
            return super().forward(x)
        gate, rows = getattr(self, how.gate), rows_of(x)
        routed = gate(rows if _gives_logits(gate) else x)
        if isinstance(routed, Tensor):
            loss, (weights, experts) = None, turbo_ops.router(rows_of(routed), **how.guessed | _options(self))
        else:
            weights, experts, loss = _routing(routed)
        gate_up_bias, down_bias = _stack(layers, "bias", how.middle.up_first)
        y = turbo_ops.moe_experts(
            rows,
            experts,
            weights,
            *_stack(layers, "weight", how.middle.up_first),  # type: ignore[arg-type]
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            activation=how.middle.activation,
            recipe=recipe,
            resident=False,  # the stacked weights are of this forward
        )
        y = with_shared(self, rows, y.to(x.dtype)).view(x.shape)
        if how.adds_loss and loss is not None:
            y = AddLossFunction.apply(y, loss)
        return (y, routed) if how.returns_logits else y


class AddLossFunction(torch.autograd.Function):
    """y; in backward, loss has the gradient that it would have as part of the model's loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.shape, loss.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.loss
        return grad, grad.new_ones(shape, dtype=dtype)


def _layers(block: Any, how: Mixture) -> list[list[nn.Linear]] | None:
    """The linear layers of each expert; None where calling an expert is more than those and an activation."""
    names, found = [name for name in how.middle.layout if name], []
    for expert in block.experts:
        cls, children = type(expert), expert._modules
        is_own = isinstance(expert, how.expert) and cls.forward in (how.expert.forward, GatedMLP.forward)
        if not is_own or "forward" in vars(expert) or has_hooks(expert):
            return None
        for name, other in how.middle.others:
            if type(children.get(name)) is not other or has_hooks(children[name]):
                return None
        layers = [children[name] for name in names]
        for layer in layers:
            weight = layer._parameters.get("weight") if is_plain(layer) else None
            # Megatron's main_grad is what Linear sums into, and autograd of a stack does not
            if weight is None or hasattr(weight, "main_grad"):
                return None
        found.append(layers)
    return found


def _recipe(layers: list[list[nn.Linear]]) -> Recipe | None:
    """The recipe that all layers have; None where there is none, or one that experts cannot have."""
    first, *rest = (
        layer.recipe if isinstance(layer, Linear) else BF16 for expert in layers for layer in expert
    )
    same = all(recipe is first or recipe == first for recipe in rest)
    return first if same and not recipe_problem(first) else None


def _stack(layers: list[list[nn.Linear]], name: str, up_first: bool) -> tuple[Tensor | None, Tensor | None]:
    """weight or bias of all experts: gate_up [E, 2I, ...], the gate first, and down [E, H, ...]."""
    columns: list[list[Any]] = [[layer._parameters[name] for layer in expert] for expert in layers]
    gate, *_, down = columns[0]
    halves = [half for *inward, _ in columns for half in inward]
    if gate is not None and len(columns[0]) == 2:
        order = (1, 0) if up_first else (0, 1)
        halves = [gate_up.chunk(2)[place] for gate_up in halves for place in order]
    return (
        None if gate is None else torch.stack(halves).unflatten(0, (len(layers), 2)).flatten(1, 2),
        None if down is None else torch.stack([expert[-1] for expert in columns]),
    )


def _gives_logits(gate: nn.Module) -> bool:
    return isinstance(gate, nn.Linear) or "base_layer" in gate._modules


def _options(block: nn.Module) -> dict[str, Any]:
    """The options of `turbo_ops.router` that the block's attributes give."""
    held = {option: [n for n in names if hasattr(block, n)] for option, names in OPTIONS.items()}
    return {option: getattr(block, names[0]) for option, names in held.items() if names}


def _routing(answer: tuple) -> tuple[Tensor, Tensor, Tensor | None]:
    """weights [T, k], experts [T, k] and a loss, if there is one, of what a router gives, in any order."""
    tensors = [part for part in answer if isinstance(part, Tensor)]
    experts = next(part for part in tensors if not part.is_floating_point())
    floats = [part for part in tensors if part.is_floating_point()]
    weights = [part for part in floats if part.shape == experts.shape][-1]
    loss = next((part for part in floats if part is not weights and part.numel() == 1), None)
    return rows_of(weights), rows_of(experts), loss


def _experts(block: Any) -> list[nn.Module]:
    return list(block.experts)


def _gate(block: nn.Module) -> str:
    return next((name for name in GATES if block._modules.get(name) is not None), "")


def _holds_experts(module: nn.Module) -> bool:
    experts = module._modules.get("experts")
    held = list(experts.children()) if isinstance(experts, nn.ModuleList) else []
    return bool(held) and all(map(layout_of, held))


def _refuses(module: nn.Module, recipe: Recipe) -> str | None:
    experts, gate = _experts(module), _gate(module)
    if any(expert is None for expert in experts):
        return "it holds a part of its experts (expert parallelism)"
    if any(True for _ in module.parameters(recurse=False)) or any(
        True for _ in module.buffers(recurse=False)
    ):
        return "it holds parameters or buffers of its own"
    if not gate:
        return f"it has no {' or '.join(GATES)} beside its experts"
    for name, child in module.named_children():
        if name not in (gate, "experts", *SHARED, SHARED_GATE):
            return f"it has a layer {name} besides"
        if name in SHARED and layout_of(child) is None:
            return f"its {name} is no gated MLP"
    for name, value in vars(module).items():
        if "jitter" in name and value:
            return f"it adds noise in training ({name}={value}): set it to 0"
    if _gives_logits(getattr(module, gate)) and "k" not in _options(module):
        return f"it has no {' or '.join(OPTIONS['k'])}"
    inputs = parameters_of_forward(module)
    if len(inputs) != 1:
        return f"its forward takes {', '.join(inputs)}"
    return _experts_problem(experts) or recipe_problem(recipe)


def _experts_problem(experts: list[nn.Module]) -> str | None:
    """Why these are no gated MLPs that differ in values only."""
    first = _signature(experts[0])
    for index, expert in enumerate(experts):
        if _signature(expert) != first:
            return f"its experts 0 and {index} differ in class, shapes or dtypes"
        if has_hooks(expert) or "forward" in vars(expert):
            return f"its expert {index} has hooks"
        for name in filter(None, layout_of(expert) or ()):
            layer: Any = expert._modules[name]
            if not is_plain(layer):
                return f"{name} of its expert {index} is no plain linear layer (hooks, LoRA, quantised)"
            if problem := linear.RULE.refuses(layer, BF16):
                return f"{name} of its expert {index}: {problem}"
    middle = _middle(experts[0])
    return f"its experts: {middle}" if isinstance(middle, str) else None


def _signature(expert: nn.Module) -> tuple:
    return type(expert), *((name, p.shape, p.dtype) for name, p in expert.named_parameters())


def _middle(expert: nn.Module) -> Middle | str:
    """How the rule `gated_mlp` understands an expert, or why it does not."""
    if isinstance(expert, GatedMLP):
        return Middle(*(getattr(expert, name) for name in Middle._fields))
    rule = gated_mlp.RULE
    twin = rule.refuses(expert, BF16) or Prover(True).pick(rule, expert, BF16)
    return twin if isinstance(twin, str) else Middle(**twin.attributes)


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    gate, expert = _gate(module), _experts(module)[0]
    middle = _middle(expert)
    assert isinstance(middle, Middle)  # or it was refused
    ways: list[tuple[dict[str, Any], bool, bool]] = [({}, False, False), ({}, False, True)]
    if _gives_logits(getattr(module, gate)):
        ways = [
            ({"score": score, "normalize": normalize}, returns_logits, False)
            for score in ("softmax", "sigmoid")
            for normalize in ((False,) if "normalize" in _options(module) else (True, False))
            for returns_logits in (True, False)
        ]
    cls = twin_class(MoEBlock, type(module))  # type: ignore[arg-type]
    return [Twin(cls, {"mixture": Mixture(gate, type(expert), middle, *way)}) for way in ways]


def _stand_in(module: nn.Module, modules: dict[str, nn.Module], **state: Any) -> nn.Module:
    """One of its class, with its attributes, and no hooks."""
    made = type(module).__new__(type(module))
    nn.Module.__init__(made)
    made.__dict__.update({name: value for name, value in vars(module).items() if name not in BARE})
    made.__dict__.update(state, _modules=modules)
    return made


def _copies(module: nn.Module, *but: str | None) -> dict[str, nn.Module]:
    return {name: copy.deepcopy(child) for name, child in module.named_children() if name not in but}


def _small_mlp(mlp: nn.Module, gate: Tensor, up: Tensor, down: Tensor) -> nn.Module:
    gate_name, up_name, down_name = layout_of(mlp) or LAYOUTS[0]
    weights = {gate_name: gate, up_name: up} if up_name else {gate_name: torch.cat((gate, up))}
    layers = {name: plain_linear(weight) for name, weight in (weights | {down_name: down}).items() if name}
    return _stand_in(mlp, layers | _copies(mlp, *layers))


def _random_gate(gate: Any, width: int) -> nn.Module:
    """Of the gate's own shape: a router may name extents in its forward."""
    held = {name: t for name, t in (gate._parameters | gate._buffers).items() if t is not None}
    shapes = [tuple(t.shape) for t in held.values()]
    if _gives_logits(gate):
        shapes = [(getattr(gate, "base_layer", gate).weight.shape[0], width)]
    _, *values = draw((6 * width,), *shapes)  # not the numbers of the input
    if _gives_logits(gate):
        return plain_linear(values[0] / width**0.5)
    random = {name: value / width**0.5 for name, value in zip(held, values, strict=True)}
    parameters = {n: None if p is None else nn.Parameter(random[n]) for n, p in gate._parameters.items()}
    buffers = {n: None if b is None else random[n] for n, b in gate._buffers.items()}
    return _stand_in(gate, _copies(gate), _parameters=parameters, _buffers=buffers)


def _probe(module: nn.Module) -> list[Probe]:
    """All experts, since blocks name their number, with 4 features in the middle of each."""
    experts, gate, shared = _experts(module), _gate(module), shared_of(module)
    width, middle = _down(module).shape[0], 4
    inward, outward = (len(experts) + 1, middle, width), (len(experts) + 1, width, middle)
    x, gates, ups, downs, shared_gate = draw((2, 3, width), inward, inward, outward, (1, width))
    *own, last = zip(gates / width**0.5, ups / width**0.5, downs / 2, strict=True)
    modules: dict[str, nn.Module] = {
        gate: _random_gate(getattr(module, gate), width),
        "experts": nn.ModuleList([_small_mlp(e, *w) for e, w in zip(experts, own, strict=True)]),
    }
    if shared is not None:
        modules[shared] = _small_mlp(getattr(module, shared), *last)
    if module._modules.get(SHARED_GATE) is not None:
        modules[SHARED_GATE] = plain_linear(shared_gate / width**0.5)
    return [Probe({}, x, modules=modules, run=lambda stand_in: _outcome(stand_in, x))]


def _outcome(stand_in: nn.Module, x: Tensor) -> Tensor:
    """Shapes and values of all results; in training also the gradients of x and each weight."""
    with torch.enable_grad(), turbo_ops.force(**REFERENCE):
        x = x.clone().requires_grad_()
        leaves = [x, *stand_in.requires_grad_().parameters()]
        answer = stand_in.forward(1 * x)
        results = answer if isinstance(answer, tuple) else (answer,)
        if not all(isinstance(y, Tensor) for y in results):
            raise TypeError(f"it returns {', '.join(type(y).__name__ for y in results)}")
        found = [part for y in results for part in (torch.tensor(y.shape), y.flatten())]
        loss = sum((y * torch.arange(y.numel()).sin().view(y.shape)).mean() for y in results)
        if stand_in.training and isinstance(loss, Tensor) and loss.requires_grad:
            for grad in torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True):
                size = grad.square().mean().sqrt().clamp(min=1e-30)
                found += size.log() / 100, grad / size / 100  # fp32 may err by a thousandth of the mean
    return torch.cat([part.detach().float().flatten() for part in found])


def _down(module: nn.Module) -> Tensor:
    """The weight [H, I] of the first expert's last layer."""
    expert: Any = _experts(module)[0]
    return expert._modules[(layout_of(expert) or LAYOUTS[0])[-1]].weight


def _backend(module: nn.Module, twin: Twin) -> str:
    down = _down(module)
    with FakeTensorMode():
        stacked = torch.empty((len(_experts(module)), *down.shape), dtype=down.dtype, device=down.device)
    return grouped_backends(stacked, BF16)


RULE = Rule(
    "moe",
    match=_holds_experts,
    convert=_convert,
    probe=_probe,
    refuses=_refuses,
    backend=_backend,
)
