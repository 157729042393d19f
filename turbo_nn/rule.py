"""A rule says which modules become what; a probe proves it: the original and its twin must agree."""

import copyreg
import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_ops import Recipe

BARE = frozenset(vars(nn.Module()))  # what every module holds: parameters, hooks, training, ...
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
# A probe is on the CPU: it must not meet a backend that the user pinned for the GPU.
PROBED = ("gemm", "rms_norm_fwd", "swiglu_fwd", "rope_fwd", "cross_entropy_", "grouped_gemm")
PERMUTED = ("moe_permute_sort", "moe_permute_gather", "moe_permute_combine")
ON_CPU = dict.fromkeys(PROBED + PERMUTED, "reference")


class Twin(NamedTuple):
    """What a module becomes: a class, and the attributes that this class reads from the instance."""

    cls: type[nn.Module]
    attributes: dict[str, Any]


class TwinType(type):
    """The class of the classes that `twin_class` makes: pickle finds no module that holds those by name."""


@functools.cache
def twin_class(base: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """`base`, and for other modules than torch's own both: they stay instances of their own class."""
    if issubclass(original, base):
        return original
    if original in base.__mro__:
        return base
    return TwinType(original.__name__, (base, original), {"__module__": base.__module__})  # type: ignore[return-value]


copyreg.pickle(TwinType, lambda cls: (twin_class, cls.__bases__))  # type: ignore[arg-type, return-value]


class Probe(NamedTuple):
    """Random CPU weights by parameter name, the input, and how alike two 16-bit results must be.

    modules: children of the stand-in, by name. run: what calls the stand-in, where that is no forward(input).
    """

    weights: dict[str, Tensor]
    input: Tensor
    differing: float = 1.0  # largest share of 16-bit results whose last bits may differ
    modules: dict[str, nn.Module] | None = None
    run: Callable[[nn.Module], Tensor] | None = None


def _accepts(module: nn.Module, *args: Any) -> str | None:
    return None


def _no_backend(module: nn.Module, twin: Twin) -> str | None:
    return None


@dataclass(frozen=True)
class Rule:
    """How `patch` treats a kind of module. Append one to `turbo_nn.RULES` to extend it.

    match(module): whether the rule is about this module; the first rule that matches has it.
    convert(module, recipe): the twins that may replace it; the first that the probes confirm does.
    probe(module): the probes, no larger than the structure asks for.
    refuses(module, recipe): why the module is left, as a sentence, or None.
    small(module): the same for a module too small to gain; `convert_small=True` does not ask.
    backend(module, twin): which backends will run it, for the report.
    casts: whether the recipe's casts are for such modules. If not, any recipe patches them.
    uncast: of a rule that casts, whether a recipe without casts patches them, too.
    """

    name: str
    match: Callable[[nn.Module], bool]
    convert: Callable[[nn.Module, Recipe], list[Twin]]
    probe: Callable[[nn.Module], list[Probe]]
    refuses: Callable[[nn.Module, Recipe], str | None] = _accepts
    small: Callable[[nn.Module], str | None] = _accepts
    backend: Callable[[nn.Module, Twin], str | None] = _no_backend
    casts: bool = False
    uncast: bool = False


class Prover:
    """Picks the twin that agrees with the original. A kind of module is probed once, not once a block."""

    def __init__(self, verify: bool):
        self.verify = verify
        self.answers: dict[tuple, int | str] = {}

    def pick(self, rule: Rule, module: nn.Module, recipe: Recipe) -> Twin | str:
        """The twin, or why there is none. verify=False trusts a rule that offers only one."""
        twins = rule.convert(module, recipe)
        if len(twins) == 1 and not self.verify:
            return twins[0]
        key = (rule.name, *kind(module))
        if key not in self.answers:
            self.answers[key] = _prove(rule, module)
        answer = self.answers[key]
        return answer if isinstance(answer, str) else twins[answer]


def kind(module: nn.Module) -> tuple:
    """Modules of one kind compute the same function of their parameters."""
    parameters = [
        (n, None if p is None else (p.shape, p.dtype, p.device)) for n, p in module._parameters.items()
    ]
    config = {name: value for name, value in vars(module).items() if name not in BARE}
    plain = (bool, int, float, str, type(None), torch.dtype)
    return (
        type(module),
        *parameters,
        *((name, value if isinstance(value, plain) else id(value)) for name, value in config.items()),
        *((name, *_plain_state(child)) for name, child in module.named_modules() if child is not module),
    )


def _plain_state(module: nn.Module) -> tuple:
    """The type and the plain attributes: two activations of one class may differ in them."""
    plain = (bool, int, float, str, torch.dtype)
    return type(module), *((n, v) for n, v in vars(module).items() if n not in BARE and isinstance(v, plain))


@torch.no_grad()
def _prove(rule: Rule, module: nn.Module) -> int | str:
    """The index of the first twin that agrees on every probe, in training and eval; or why there is none."""
    reasons = []
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), turbo_ops.force(**ON_CPU):
        runs = list(itertools.product(rule.probe(module), (module.training, not module.training)))
        uncast = {name: Recipe() for name, value in vars(module).items() if isinstance(value, Recipe)}
        original = Twin(type(module), uncast)
        try:
            expected = [_run(module, original, *run) for run in runs]
        except FAILURES as error:
            return f"its forward fails on a probe: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        for index, twin in enumerate(rule.convert(module, Recipe())):
            answers = zip(runs, expected, strict=True)
            problems = (_disagreement(_run(module, twin, *run), y, run[0]) for run, y in answers)
            try:
                problem = next(filter(None, problems), None)
            except FAILURES as error:
                problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if problem is None:
                return index
            reasons.append(problem)
    return f"disagrees with {type(module).__name__} on a probe: {'; or '.join(reasons)}"


def _run(module: nn.Module, twin: Twin, probe: Probe, training: bool) -> Tensor:
    """The forward of a stand-in: it has `module`'s attributes, the probe's weights, and no hooks."""
    stand_in = twin.cls.__new__(twin.cls)
    nn.Module.__init__(stand_in)
    own = {name: value for name, value in vars(module).items() if name not in BARE}
    stand_in.__dict__.update(own | twin.attributes)
    stand_in.__dict__.update(_parameters=module._parameters | probe.weights, _modules=probe.modules or {})
    stand_in.train(training)
    return probe.run(stand_in) if probe.run else stand_in.forward(probe.input.clone())


def _disagreement(actual: Tensor, expected: Tensor, probe: Probe) -> str | None:
    if not isinstance(expected, Tensor):
        return f"it returns a {type(expected).__name__}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{tuple(actual.shape)} {actual.dtype}, not {tuple(expected.shape)} {expected.dtype}"
    exact = expected.dtype in (torch.float32, torch.float64)
    within = 1e-5 if exact else 1e-2
    if not torch.allclose(actual, expected, rtol=within, atol=within):
        return f"off by {(actual.float() - expected.float()).abs().max().item():.1e}"
    differing = (actual != expected).float().mean().item()
    if not exact and differing > probe.differing:
        return f"{differing:.0%} of its {expected.dtype} results round differently"
    return None


def plain_linear(weight: Tensor) -> nn.Linear:
    """An nn.Linear on the CPU, for a probe."""
    out, width = weight.shape
    layer = nn.Linear(width, out, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def parameters_of_forward(module: nn.Module) -> list[str]:
    """The names of what `module.forward` takes, but for self."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Normal CPU tensors from a generator of their own: the global random state does not move."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes]
