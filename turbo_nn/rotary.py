"""Attention modules whose queries and keys are rotated by one kernel, and the rule that finds them.

transformers' attention calls a function of its own module, `apply_rotary_pos_emb(q, k, cos, sin)`. The twin runs
the very code of that forward, with another function under this name: nothing outside of the module changes.
"""

import functools
import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_nn.rule import Probe, Rule, Twin, draw, twin_class
from turbo_ops import Recipe

NAME = "apply_rotary_pos_emb"


def applied(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """As transformers' function: q and k are [B, H, S, D], or [B, S, H, D] with unsqueeze_dim 2."""
    if unsqueeze_dim == 2:
        q, k = turbo_ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)
    return turbo_ops.rope(q, k, cos, sin, interleaved=interleaved)


class RotaryAttention(nn.Module):
    """An attention module that rotates queries and keys by `turbo_ops.rope`, halves with halves."""

    apply = staticmethod(functools.partial(applied, interleaved=False))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if len(cls.__bases__) == 2:  # of twin_class: this base, then the model's class
            original: Any = cls.__bases__[1].forward  # type: ignore[attr-defined]
            plain: Any = inspect.unwrap(original)
            names = {**plain.__globals__, NAME: cls.apply}
            forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
            forward.__kwdefaults__ = plain.__kwdefaults__
            cls.forward = functools.wraps(plain)(forward)


class InterleavedRotaryAttention(RotaryAttention):
    """The same, each feature with its neighbour."""

    apply = staticmethod(functools.partial(applied, interleaved=True))


KINDS = (RotaryAttention, InterleavedRotaryAttention)


def function_of(cls: type) -> Any:
    """What the class's forward calls to rotate; None where it calls nothing of that name."""
    forward: Any = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return forward.__globals__.get(NAME) if NAME in names else None


def _refuses(module: nn.Module, recipe: Recipe) -> str | None:
    if isinstance(module, RotaryAttention):
        return "rotates by turbo_ops.rope already"
    forward: Any = type(module).forward
    if inspect.unwrap(forward) is not forward:
        return "its forward is decorated"
    inputs = list(inspect.signature(function_of(type(module))).parameters)
    return None if inputs[:4] == ["q", "k", "cos", "sin"] else f"{NAME} takes {', '.join(inputs)}"


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    return [Twin(twin_class(kind, type(module)), {}) for kind in KINDS]  # type: ignore[arg-type]


def _probe(module: nn.Module) -> list[Probe]:
    """The function alone: whole and partial rotations, angles whose halves differ, with one batch entry or two."""
    q, k, cos, sin = draw((2, 4, 5, 8), (2, 2, 5, 8), (2, 5, 8), (2, 5, 8))

    def rotated(stand_in: nn.Module) -> Tensor:
        rotate, found = function_of(type(stand_in)), []
        for angles in ((cos, sin), (cos[:1], sin[:1]), (cos[..., :4], sin[..., :4])):
            try:
                found += rotate(q, k, *angles)
            except RuntimeError:  # most rotate all features
                found.append(torch.zeros(1))
        return torch.cat([part.flatten() for part in found])

    return [Probe({}, q, run=rotated)]


RULE = Rule(
    "rotary",
    match=lambda module: isinstance(module, RotaryAttention) or function_of(type(module)) is not None,
    convert=_convert,
    probe=_probe,
    refuses=_refuses,
    backend=lambda module, twin: turbo_ops.rope_backend(
        next(module.parameters()).device, next(module.parameters()).dtype
    ),
)
