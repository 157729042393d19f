"""Casts of weights, kept until the weight changes: once an optimizer step, not once a micro-batch.

A weight whose last step had one forward only is not kept, since 1 byte an element would be kept for nothing.
An entry is valid for one address, version, dtype and layout of its weight, and until `weights_changed`, which
every `torch.optim` step calls: fused optimizers write without a new version. It holds the storage that it was
cast from, so that `p.data = new` cannot come back to the same address. Only forwards that record gradients
look here. A write through `p.data` itself (`p.data.add_(...)`) moves nothing that can be seen: call
`weights_changed` after it. TURBO_CHECK_CACHE=1 casts again at each use and compares bitwise;
TURBO_WEIGHT_CACHE=0 turns the cache off.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from turbo_ops import policy
from turbo_ops.casting import Scaled

Casts = tuple[Scaled, Scaled | None]
CastsLike = TypeVar("CastsLike", bound=Casts)


class _Entry:
    """Of one weight: its casts, what they were made of, how often they were wanted since the last step."""

    def __init__(self, weight: Tensor, name: weakref.ref):
        self.dropped = weakref.ref(
            weight, lambda _: _ENTRIES.pop(name, None)
        )  # the entry dies with its weight
        self.wanted_before = 0
        self.forget()

    def forget(self) -> None:
        self.key: tuple | None = None
        self.casts: Any = None
        self.storage: Tensor | None = None  # keeps the address taken
        self.wanted = 0


_ENTRIES: dict[weakref.ref, _Entry] = {}
_FLAGS = {"TURBO_WEIGHT_CACHE": True, "TURBO_CHECK_CACHE": False}


def kept(weight: Tensor, how: tuple, cast: Callable[[], CastsLike]) -> CastsLike:
    """`cast()`, or what it gave before for the weight as it is; `how` says all that the cast depends on."""
    if (
        not _FLAGS["TURBO_WEIGHT_CACHE"]
        or not weight.is_leaf
        or weight.is_inference()
        or isinstance(weight, FakeTensor)
    ):
        return cast()
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return cast()  # a graph casts at each replay: it would not see that the weight changed
    key = weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.dtype, how
    name = weakref.ref(weight)  # always the same object for one weight, and no other's while it lives
    entry = _ENTRIES.get(name)
    if entry is None:
        entry = _ENTRIES[name] = _Entry(weight, name)
    if entry.key != key:
        entry.forget()
        entry.key = key
    entry.wanted += 1
    if entry.casts is not None:
        if _FLAGS["TURBO_CHECK_CACHE"]:
            _check(entry.casts, cast())
        return entry.casts
    casts = cast()
    if entry.wanted > 1 or entry.wanted_before > 1:
        entry.casts, entry.storage = casts, weight.detach()
    return casts


def _check(casts: Casts, fresh: Casts) -> None:
    for kept_one, right in zip(_tensors(casts), _tensors(fresh), strict=True):
        if not torch.equal(kept_one.view(torch.uint8), right.view(torch.uint8)):
            raise RuntimeError(
                f"TURBO_CHECK_CACHE: the cast of a weight, {tuple(kept_one.shape)}, is stale: something "
                "wrote through p.data; call turbo_nn.weights_changed(model) after it"
            )


def _tensors(casts: Casts) -> list[Tensor]:
    return [tensor for scaled in casts if scaled for tensor in scaled if tensor is not None]


def weights_changed(weights: Iterable[Tensor] | None = None) -> None:
    """Forget the casts of these weights, or of all: they were written in a way that torch does not count."""
    names = list(_ENTRIES) if weights is None else map(weakref.ref, weights)
    for entry in filter(None, map(_ENTRIES.get, names)):
        entry.wanted_before = entry.wanted
        entry.forget()


def reset() -> None:
    """Read the environment again, and forget every cast."""
    for name, default in (("TURBO_WEIGHT_CACHE", True), ("TURBO_CHECK_CACHE", False)):
        _FLAGS[name] = policy.flag(name, default)
    _ENTRIES.clear()


register_optimizer_step_post_hook(lambda *_: weights_changed())
