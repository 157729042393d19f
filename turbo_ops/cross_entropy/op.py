"""Cross-entropy of each row, and its gradient in place of the logits: none of the two is in memory twice."""

import math
import numbers

import torch
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import op


@op("triton", mutates=("logits",))
def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    row_scale: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """logits [T, V], labels [T] int64 -> losses [T] fp32, computed in fp32; 0 where labels are ignore_index.

    With row_scale [T] fp32, logits become d(sum(row_scale * losses)) / d(logits); without, they stay as they
    are. z = softcap * tanh(logits / softcap), or logits where softcap is 0. A loss is
    lse(z) - (1 - label_smoothing) * z[label] - label_smoothing * mean(z) + z_loss * lse(z)^2
    (label smoothing: arXiv 1512.00567; z-loss: arXiv 2204.02311). NaN where a label is no class.
    """
    problem = entropy_problem(logits, labels, row_scale)
    problem = problem or option_problem(ignore_index, label_smoothing, z_loss, softcap)
    if problem:
        raise ValueError(f"cross_entropy_: {problem}")
    raw = logits.float()
    z = softcap * torch.tanh(raw / softcap) if softcap else raw
    kept, classes = labels != ignore_index, logits.shape[1]
    label = labels.clamp(0, classes - 1)[:, None]
    lse = z.logsumexp(1)
    losses = lse - (1 - label_smoothing) * z.gather(1, label)[:, 0] - label_smoothing * z.mean(1)
    losses = losses + z_loss * lse.square()
    losses = torch.where((labels < 0) | (labels >= classes), torch.nan, losses)
    if row_scale is not None:
        grad = torch.exp(z - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None] - label_smoothing / classes
        grad = grad.scatter_add(1, label, torch.full_like(grad[:, :1], label_smoothing - 1))
        grad = grad * (1 - (z / softcap).square()) if softcap else grad
        grad = torch.where(kept[:, None], grad * row_scale[:, None], 0.0)
        logits.copy_(grad)
    return torch.where(kept, losses, 0.0)


@op("triton")
def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T, V], labels [T] int64 -> losses, log-sum-exp and peak [T], all fp32.

    Losses as `cross_entropy_`'s. peak: the largest magnitude of a row's gradient, softmax less one at the
    label; 0 where labels are ignore_index.
    """
    problem = entropy_problem(logits, labels, None)
    if problem:
        raise ValueError(f"cross_entropy: {problem}")
    z, classes = logits.float(), logits.shape[1]
    lse, label, kept = z.logsumexp(1), labels.clamp(0, classes - 1)[:, None], labels != ignore_index
    losses = torch.where((labels < 0) | (labels >= classes), torch.nan, lse - z.gather(1, label)[:, 0])
    grad = torch.exp(z - lse[:, None]).scatter_add(1, label, torch.full_like(z[:, :1], -1.0))
    peak = grad.abs().amax(1)
    return torch.where(kept, losses, 0.0), lse, torch.where(kept, peak, 0.0)


def entropy_problem(logits: Tensor, labels: Tensor, row_scale: Tensor | None) -> str | None:
    """What makes this no cross-entropy at all, for any backend."""
    if logits.ndim != 2 or logits.dtype not in DTYPES:
        return f"logits must be [T, V] of fp32, bf16 or fp16, are {tuple(logits.shape)} of {logits.dtype}"
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        given = f"{tuple(labels.shape)} of {labels.dtype}"
        return f"labels must be {tuple(logits.shape[:1])} of torch.int64, are {given}"
    if row_scale is not None and (row_scale.shape != labels.shape or row_scale.dtype != torch.float32):
        given = f"{tuple(row_scale.shape)} of {row_scale.dtype}"
        return f"row_scale must be {tuple(labels.shape)} of fp32, is {given}"
    return None


def option_problem(
    ignore_index: object, label_smoothing: object, z_loss: object, softcap: object
) -> str | None:
    """Which option of `cross_entropy_` makes no loss."""
    if not isinstance(ignore_index, numbers.Integral):
        return f"ignore_index={ignore_index!r}: use a whole number"
    if not _at_least_zero(label_smoothing) or not label_smoothing < 1:  # type: ignore[operator]
        return f"label_smoothing={label_smoothing!r}: use a number from 0 to below 1"
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not _at_least_zero(value):
            return f"{name}={value!r}: use a finite number, 0 for none"
    return None


def _at_least_zero(value: object) -> bool:
    return isinstance(value, numbers.Real | torch.SymFloat) and 0 <= float(value) < math.inf
