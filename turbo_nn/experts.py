"""The experts of a mixture (gated MLPs in 3-D weights), and the rule for those that models define."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_nn.grouped_linear import checked_recipe, grouped_backends, recipe_problem, start_as_linear
from turbo_nn.linear import has_hooks
from turbo_nn.recipes import RecipeLike, name_of
from turbo_nn.rule import Probe, Rule, Twin, draw, parameters_of_forward, twin_class
from turbo_ops import Recipe
from turbo_ops.arch import DTYPES

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")
# What a probe's weights measure, and the attributes that models keep it in.
EXTENTS = {
    "num_experts": 4,
    **dict.fromkeys(("hidden_size", "hidden_dim"), 6),
    **dict.fromkeys(("intermediate_size", "intermediate_dim", "expert_dim"), 10),
}


class Experts(nn.Module):
    """x [..., H], experts and weights [..., k] -> [..., H]: the weighted sum of k gated MLPs for each token.

    gate_up_proj [E, 2I, H], down_proj [E, H, I] and biases [E, 2I], [E, H]: names and layout of transformers'
    fused experts. interleaved: gate and up are the even and the odd rows (gpt-oss), not the first and the
    last. A choice of E or more counts nothing (expert parallelism). activation: one of
    `turbo_ops.ACTIVATIONS`. recipe: of all linear layers, as `Linear`'s. ValueError for another activation,
    an unknown recipe, and one with an amax history or MX blocks.
    """

    activation = "silu"
    interleaved = False
    is_transposed = False  # of a model's experts: [E, H, 2I] and [E, I, H]
    others: tuple[tuple[str, type], ...] = ()  # of a model's experts, what they hold besides: the activation
    recipe: Recipe

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        interleaved: bool = False,
        recipe: RecipeLike = "bf16",
    ):
        super().__init__()
        if activation not in turbo_ops.ACTIVATIONS:
            known = ", ".join(turbo_ops.ACTIVATIONS)
            raise ValueError(f"Experts: activation={activation!r}: use one of {known}")
        self.num_experts, self.hidden_size, self.intermediate_size = (
            num_experts,
            hidden_size,
            intermediate_size,
        )
        self.activation, self.interleaved = activation, interleaved
        self.recipe = checked_recipe("Experts", recipe)
        inward, outward = (2 * intermediate_size, hidden_size), (hidden_size, intermediate_size)
        for name, shape in zip(WEIGHTS, (inward, outward), strict=True):
            weight = torch.empty(num_experts, *shape, device=device, dtype=dtype)
            shift = torch.empty(num_experts, shape[0], device=device, dtype=dtype) if bias else None
            self.register_parameter(name, nn.Parameter(weight))
            self.register_parameter(f"{name}_bias", None if shift is None else nn.Parameter(shift))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each linear layer of each expert starts as an nn.Linear."""
        for weight, bias in zip(_inward(self), _biases(self), strict=True):
            start_as_linear(weight, bias)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        for name, cls in self.others:  # the activation, which is not called here
            other = self._modules.get(name)
            if other is None or type(other) is not cls or has_hooks(other):  # another one since, or watched
                return super().forward(hidden_states, top_k_index, top_k_weights)
        inputs = hidden_states, top_k_index, top_k_weights
        return run(self, inputs, self.activation, self.interleaved, self.recipe)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(getattr(self, name).shape)}" for name in WEIGHTS)
        return f"{shapes}, activation={self.activation}, recipe={name_of(self.recipe)}"


def run(
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Tensor],
    activation: str,
    interleaved: bool,
    recipe: Recipe,
) -> Tensor:
    """The forward of any module with the parameters of `Experts`; inputs are what `Experts` takes."""
    x, *routing = inputs
    gathered = "_is_fsdp_managed_module" in module.__dict__
    gate_up_bias, down_bias = _biases(module)
    y = turbo_ops.moe_experts(
        *(part.reshape(-1, part.shape[-1]) for part in (x, *routing)),
        *_inward(module),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        interleaved=interleaved,
        recipe=recipe,
        resident=not gathered,
    )
    return y.to(x.dtype).view(x.shape)


def _inward(module: Any) -> list[Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I], in whichever order the module keeps the extents.

    Through attributes: PEFT puts computed weights in place of the parameters while it runs a module.
    """
    weights = [getattr(module, name) for name in WEIGHTS]
    return [weight.transpose(1, 2) for weight in weights] if module.is_transposed else weights


def _biases(module: nn.Module) -> list[Tensor | None]:
    return [getattr(module, name, None) for name in BIASES]


def _holds(module: nn.Module, *names: str) -> bool:
    found = [module._parameters.get(name) for name in names]
    return all(weight is not None and weight.ndim == 3 for weight in found)


def _is_transposed(module: nn.Module) -> bool | None:
    """None where the shapes are no experts'. Both orders at once would need 2I = H and 2H = I."""
    if not _holds(module, *WEIGHTS):
        return None
    (experts, *inward), (same, *outward) = (module._parameters[name].shape for name in WEIGHTS)  # type: ignore[union-attr]
    for transposed in (False, True):
        if (experts, *inward) == (same, 2 * outward[1], outward[0]):
            return transposed
        inward, outward = inward[::-1], outward[::-1]
    return None


def _refuses(module: nn.Module, recipe: Recipe) -> str | None:
    parameters = {name: weight for name, weight in module._parameters.items() if weight is not None}
    if "up_proj" in parameters or not getattr(module, "has_gate", True):
        return "its experts have no gate"
    if not parameters.keys() >= {*WEIGHTS}:
        return "its weights are no parameters (sharded, parametrize)"
    if getattr(module, "has_post_expert_norm", False):
        return "it normalises what each expert returns"
    unknown = sorted(parameters.keys() - {*WEIGHTS, *BIASES})
    unknown += [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    if unknown:
        return f"it has {unknown[0]} besides"
    for name, weight in parameters.items():
        if type(weight) is not nn.Parameter:
            return f"its {name} is a {type(weight).__name__}: patch before quantising or sharding"
    dtypes = {weight.dtype for weight in parameters.values()}
    if not dtypes <= {*DTYPES} or len(dtypes) > 1:
        return f"its weights are {', '.join(sorted(map(str, dtypes)))}, not all fp32, bf16 or fp16"
    if _is_transposed(module) is None:
        shapes = " and ".join(str(tuple(parameters[name].shape)) for name in WEIGHTS)
        return f"its weights are {shapes}, not [E, 2I, H] and [E, H, I], nor transposed"
    count, known = len(parameters["down_proj"]), getattr(module, "num_experts", None)
    if known not in (None, count):
        return f"it counts {known} experts and has weights for {count}"
    for name, child in module.named_children():
        if has_hooks(child):
            return f"its {name} has hooks"
    inputs = parameters_of_forward(module)
    if len(inputs) != 3:
        return f"its forward takes {', '.join(inputs)}"
    return recipe_problem(recipe)


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    if isinstance(module, Experts):
        interleaved = [module.interleaved]
    else:
        concatenated: Any = getattr(module, "is_concatenated", None)
        interleaved = [False, True] if concatenated is None else [not concatenated]
    known = {
        "recipe": recipe,
        "is_transposed": _is_transposed(module),
        "others": tuple((name, type(child)) for name, child in module.named_children()),
    }
    return [
        Twin(
            twin_class(Experts, type(module)),  # type: ignore[arg-type]
            known | {"activation": activation, "interleaved": order},
        )
        for activation in turbo_ops.ACTIVATIONS
        for order in interleaved
    ]


class _Eager:
    """A configuration that asks for the forward of the model's own file."""

    _experts_implementation = "eager"

    def __init__(self, config: Any):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def _probe(module: nn.Module) -> list[Probe]:
    """Two experts of four for each token, one for none; a second time with gates and ups that limits cut."""
    experts, hidden, middle = (EXTENTS[name] for name in ("num_experts", "hidden_size", "intermediate_size"))
    shapes = {"gate_up_proj": (2 * middle, hidden), "down_proj": (hidden, middle)}
    x, share, *values = draw(
        (5, hidden),
        (5, 2),
        *((experts, *shape) for shape in shapes.values()),
        *((experts, shape[0]) for shape in shapes.values()),
    )
    if _is_transposed(module):
        values[:2] = [weight.transpose(1, 2).contiguous() for weight in values[:2]]
    weights = {
        name: value
        for name, value in zip((*WEIGHTS, *BIASES), values, strict=True)
        if module._parameters.get(name) is not None
    }
    index = torch.tensor([[0, 2], [2, 3], [3, 0], [2, 0], [0, 3]])
    others = {name: copy.deepcopy(child) for name, child in module.named_children()}

    def probe(x: Tensor, size: float) -> Probe:
        own = weights | {"down_proj": size * weights["down_proj"]}
        return Probe(own, x, modules=others, run=lambda stand_in: _call(stand_in, x, index, share.softmax(1)))

    return [probe(x, 1.0), probe(50 * x, 1e-4)]


def _call(stand_in: nn.Module, *inputs: Tensor) -> Tensor:
    attributes = vars(stand_in)
    attributes |= {name: extent for name, extent in EXTENTS.items() if name in attributes}
    if "config" in attributes:
        attributes["config"] = _Eager(attributes["config"])
    return stand_in.forward(*(part.clone() for part in inputs))


def _backend(module: nn.Module, twin: Twin) -> str:
    gate_up: Any = module._parameters["gate_up_proj"]
    gate_up = gate_up.transpose(1, 2) if twin.attributes["is_transposed"] else gate_up
    return grouped_backends(gate_up, twin.attributes["recipe"])


RULE = Rule(
    "experts",
    match=lambda module: (
        isinstance(module, Experts) or _holds(module, *WEIGHTS) or _holds(module, "up_proj", "down_proj")
    ),
    convert=_convert,
    probe=_probe,
    refuses=_refuses,
    backend=_backend,
    casts=True,
    uncast=True,
)
