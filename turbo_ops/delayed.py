"""Delayed scaling: the largest amax of the optimizer steps before gives the scale of this one (arXiv
2209.05433, TransformerEngine's DelayedScaling): a cast then reads its tensor once.

A history is [3, H + 1] fp32, a row for input, weight and grad_output: slot 0 gathers the amax of the step
that runs, 1..H hold those of the steps before. It moves on at each `torch.optim` step and at no other time,
so that micro-batches and the recomputed forwards of activation checkpointing have the same scales. As long as
a row knows nothing, its tensors are cast by their own amax; so are gradients under torch.compile.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from turbo_ops.distributed import all_reduce_max

_LIVE: dict[weakref.ref[Tensor], weakref.ref] = {}
_group: Any = None


def new_history(length: int, device: torch.device) -> Tensor:
    """[3, length + 1] of zeros: no amax is known. It moves on with each optimizer step while it lives."""
    return track_history(torch.zeros(3, length + 1, device=device))


def restore_history(history: Tensor, saved: Tensor) -> None:
    """Fill a history with the values of another, which may be on another device."""
    history.copy_(saved)
    rows = frozenset(row for row in range(len(saved)) if saved[row, 1:].any())
    history.known = rows  # type: ignore[attr-defined]


def track_history(history: Tensor) -> Tensor:
    """Let a history move on that came from elsewhere: a copy, a pickle."""
    name = weakref.ref(history)
    if name not in _LIVE:
        _LIVE[name] = weakref.ref(history, lambda _: _LIVE.pop(name, None))
    return history


def reduce_amax_over(group: Any) -> None:
    """Give all ranks of a process group the same histories; None: each rank keeps its own.

    Needed where a tensor is sharded over the group, as in tensor parallelism. Every rank must have the same
    layers and step its optimizer at the same time.
    """
    global _group
    _group = group


@torch.no_grad()
def step() -> None:
    """Move every history on by one optimizer step."""
    kinds: dict[tuple, list[Tensor]] = {}
    for history in [name() for name in list(_LIVE)]:
        if history is None or history.is_meta:
            continue
        kinds.setdefault((history.shape, history.device), []).append(history)
    for histories in kinds.values():
        now = torch.stack(histories)
        if _group is not None:
            now[..., 0] = all_reduce_max(now[..., 0].contiguous(), _group)
        moved = now.roll(1, -1)
        # what is not finite must not become a scale: the step before stands in for it
        moved[..., 1] = torch.where(now[..., 0].isfinite(), now[..., 0], now[..., 1])
        moved[..., 0] = 0
        idle = now[..., :1] == 0  # nothing was cast since: an optimizer of other parameters stepped
        moved = torch.where(idle, now, moved)
        torch._foreach_copy_(histories, list(moved.unbind()))
        _learn(histories, moved)


def _learn(histories: list[Any], moved: Tensor) -> None:
    """Tell the host which rows know something, after 1, 2, 4, 8, ... steps: looking waits for the device."""
    asked = []
    for index, history in enumerate(histories):
        history.age = getattr(history, "age", 0) + 1
        if len(getattr(history, "known", ())) < len(history) and history.age & (history.age - 1) == 0:
            asked.append(index)
    if asked:
        for index, rows in zip(asked, (moved[asked][..., 1:] > 0).any(-1).tolist(), strict=True):
            histories[index].known = frozenset(row for row, some in enumerate(rows) if some)


register_optimizer_step_post_hook(lambda *_: step())
