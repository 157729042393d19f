"""What a patch rule is made of, and the trial that proves it."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_ops import Recipe

CLOSE = 1e-5  # of the largest output: fp32 sums in another order
SAME = 0.98  # share of equal bf16 outputs: another order of roundings leaves a third of them different


@dataclass(frozen=True)
class Site:
    """A module in its model."""

    fqn: str
    module: nn.Module
    parent: nn.Module | None
    is_adapter: bool  # inside a PEFT layer, beside its base layer
    embeddings: frozenset[Tensor]  # weights of the model's embeddings

    @property
    def name(self) -> str:
        return self.fqn.rpartition(".")[2]


@dataclass(frozen=True)
class Twin:
    """The class that a module takes, and the attributes that come with it."""

    cls: type[nn.Module]
    attributes: dict[str, object]


@dataclass(frozen=True)
class Trial:
    """CPU parameters and one input, on which a module and its twin must agree."""

    parameters: dict[str, Tensor | None]
    x: Tensor


@dataclass(frozen=True)
class Rule:
    """One kind of module that can be patched.

    casts: whether the recipe applies to it. match(module): whether this rule is about it.
    convert(module, recipe): its possible twins, best first. trials(module): what a twin must agree on;
    modules of one class and kind(module) are tried once. protects(site): why nobody would want it cast.
    refuses(site, convert_small): why it cannot be patched. backend(module, recipe): what it runs on.
    """

    name: str
    casts: bool
    match: Callable[[nn.Module], bool]
    convert: Callable[[nn.Module, Recipe], list[Twin]]
    kind: Callable[[nn.Module], tuple]
    trials: Callable[[nn.Module], list[Trial]]
    protects: Callable[[Site], str | None]
    refuses: Callable[[Site, bool], str | None]
    backend: Callable[[nn.Module, Recipe], str]


def draw(*shape: int) -> Tensor:
    """Seeded normal values on the CPU; the global generator is not touched."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def disagreement(module: nn.Module, twin: Twin, trial: Trial) -> str | None:
    """Why `twin` is not `module` by another name, on one trial; None where they agree.

    It proves the mapping, not the precision: no casts, and the reference backends whatever is pinned.
    """
    if type(module) is twin.cls:
        return None
    uncast = {
        name: Recipe() if isinstance(value, Recipe) else value for name, value in twin.attributes.items()
    }
    with torch.no_grad(), turbo_ops.force(gemm="reference", rms_norm="reference"):
        try:
            expected = _run(module, type(module), {}, trial)
        except Exception as error:  # the model's own code, which may fail in any way
            return f"fails on a CPU probe: {type(error).__name__}: {error}"
        actual = _run(module, twin.cls, uncast, trial)
    if not isinstance(expected, Tensor) or expected.shape != actual.shape or expected.dtype != actual.dtype:
        return "returns another shape or dtype on a probe"
    if expected.dtype == torch.float32:
        apart = ((expected - actual).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
        return None if apart < CLOSE else f"differs by {apart:.1e} on a probe"
    same = (expected == actual).float().mean().item()
    return (
        None
        if same > SAME
        else f"rounds in another order: {1 - same:.0%} of its bf16 outputs differ on a probe"
    )


def _run(module: nn.Module, cls: type[nn.Module], attributes: dict, trial: Trial) -> Tensor:
    """forward of a copy of `module` that has other parameters, no hooks, and is a `cls`."""
    clone = cls.__new__(cls)
    clone.__dict__ = {
        **module.__dict__,
        **attributes,
        "_parameters": OrderedDict(trial.parameters),
        "training": False,
    }
    return cls.forward(clone, trial.x)
