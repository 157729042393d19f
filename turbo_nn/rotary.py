"""Attention modules whose queries and keys are rotated by one kernel, and the rule that finds them.

transformers' attention calls a function of its file, `apply_rotary_pos_emb(q, k, cos, sin)`. The twin runs
the code of that forward with another name in this place. The name is added to the file's globals (compiled
code finds nothing anywhere else); nothing that was there changes.
"""

import inspect
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_nn.rule import Probe, Rule, Twin, draw, twin_class
from turbo_ops import Recipe

NAME = "apply_rotary_pos_emb"


def rotate_halves(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """As transformers' function: q and k are [B, H, S, D], or [B, S, H, D] with unsqueeze_dim 2."""
    if unsqueeze_dim == 2:
        q, k = turbo_ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)
    return turbo_ops.rope(q, k, cos, sin, interleaved=interleaved)


def rotate_pairs(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Cohere's: a feature's partner is its neighbour."""
    return rotate_halves(q, k, cos, sin, unsqueeze_dim, interleaved=True)


def rotate_pairs_by_halves(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """GLM's: a feature's partner is its neighbour, while the angles are laid out for halves."""
    half = cos.shape[-1] // 2
    cos, sin = (angles[..., :half].repeat_interleave(2, dim=-1) for angles in (cos, sin))
    return rotate_pairs(q, k, cos, sin, unsqueeze_dim)


def where_it_fits(rotation: Any, original: Any) -> Any:
    """The rotation for angles [B or 1, S, R] that need no gradient, and the model's own for any others."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        fits = q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape[0] in (1, q.shape[0])
        if fits and unsqueeze_dim in (1, 2) and not (cos.requires_grad or sin.requires_grad):
            return rotation(q, k, cos, sin, unsqueeze_dim)
        return original(q, k, cos, sin, *(() if unsqueeze_dim == 1 else (unsqueeze_dim,)))

    return rotate


def with_rotation(function: Any, rotation: Any) -> Any:
    """A copy of the function, and of what decorates it, that calls `rotation`."""
    code, cells, inner = function.__code__, function.__closure__, getattr(function, "__wrapped__", None)
    if inner is None:
        name = f"turbo_nn_{rotation.__name__}"
        function.__globals__[name] = where_it_fits(rotation, function.__globals__[NAME])
        code = code.replace(co_names=tuple(name if n == NAME else n for n in code.co_names))
    else:
        decorated = with_rotation(inner, rotation)
        cells = tuple(CellType(decorated) if holds(cell, inner) else cell for cell in cells)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    if inner is not None:
        vars(copy)["__wrapped__"] = decorated
    return copy


def holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


class RotaryAttention(nn.Module):
    """An attention module that rotates queries and keys by `turbo_ops.rope`."""

    rotation: Any = staticmethod(rotate_halves)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if len(cls.__bases__) == 2:  # of twin_class: this base, then the model's class
            cls.forward = with_rotation(cls.__bases__[1].forward, cls.rotation)  # type: ignore[attr-defined]


class PairedRotaryAttention(RotaryAttention):
    rotation = staticmethod(rotate_pairs)


class PairedByHalvesRotaryAttention(RotaryAttention):
    rotation = staticmethod(rotate_pairs_by_halves)


KINDS = (RotaryAttention, PairedRotaryAttention, PairedByHalvesRotaryAttention)


def rotation_of(cls: type) -> Any:
    """What the class's forward calls to rotate; None where it calls nothing of that name."""
    if issubclass(cls, RotaryAttention):
        return cls.rotation
    forward: Any = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return forward.__globals__.get(NAME) if NAME in names else None


def as_written(rotation: Any) -> Any:
    """The function of the model's file: the `kernels` package makes a module of it that takes anything."""
    cells = type(rotation).forward.__closure__ or () if isinstance(rotation, nn.Module) else ()
    inside = (cell.cell_contents for cell in cells)
    return next((found for found in inside if isinstance(found, FunctionType)), rotation)


def _refuses(module: nn.Module, recipe: Recipe) -> str | None:
    if isinstance(module, RotaryAttention):
        return "rotates by turbo_ops.rope already"
    layer: Any = type(module).forward
    while hasattr(layer, "__wrapped__"):
        if not any(holds(cell, layer.__wrapped__) for cell in getattr(layer, "__closure__", None) or ()):
            return "its forward's decorator does not show what it calls"
        layer = layer.__wrapped__
    inputs = list(inspect.signature(as_written(rotation_of(type(module)))).parameters)
    known = inputs in (["q", "k", "cos", "sin"], ["q", "k", "cos", "sin", "unsqueeze_dim"])
    return None if known else f"its {NAME} takes {', '.join(inputs)}"


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    return [Twin(twin_class(kind, type(module)), {}) for kind in KINDS]  # type: ignore[arg-type]


def _probe(module: nn.Module) -> list[Probe]:
    """The function alone: angles whose halves differ, of two batch entries, of one, of half the features."""
    q, k, cos, sin = draw((2, 4, 5, 8), (2, 2, 5, 8), (2, 5, 8), (2, 5, 8))

    def rotated(stand_in: nn.Module, *angles: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in rotation_of(type(stand_in))(q, k, *angles)])

    def probe(*angles: Tensor) -> Probe:
        return Probe({}, q, run=lambda stand_in: rotated(stand_in, *angles))

    probes = [probe(cos, sin), probe(cos[:1], sin[:1])]
    try:
        rotated(module, cos[..., :4], sin[..., :4])
    except RuntimeError:  # it rotates all features
        return probes
    return [*probes, probe(cos[..., :4], sin[..., :4])]


RULE = Rule(
    "rotary",
    match=lambda module: rotation_of(type(module)) is not None,
    convert=_convert,
    probe=_probe,
    refuses=_refuses,
    backend=lambda module, twin: turbo_ops.rope_backend(
        next(module.parameters()).device, next(module.parameters()).dtype
    ),
)
