"""Tokens in the order of the experts that they go to, and back: deterministic, and no wait for the device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import op, refuse_second_derivative


@op("triton")
def moe_permute_sort(
    experts: Tensor, num_experts: int, align: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """experts [T, k] int64 -> places [T, k], sources [R], ends [E] and dropped [1], all int64.

    Choices are numbered t * k + j. Those of an expert follow one another in that order, experts in theirs,
    each begun at a multiple of align. places: the row of a choice, -1 where it is dropped. sources: the
    choice of a row, -1 where there is none. ends: the row behind an expert's last, its padding included. An
    expert keeps its first capacity choices (0: all); dropped counts the rest, and none of no expert's here,
    below 0 or from num_experts on. R: see `rows_of`.
    """
    flat = experts.reshape(-1)
    ours = flat[:, None] == torch.arange(num_experts, device=flat.device)
    expert = flat.clamp(0, num_experts - 1)
    rank = (ours.cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
    counts, here = ours.sum(0), ours.any(1)
    kept = here if capacity == 0 else here & (rank < capacity)
    held = counts if capacity == 0 else counts.clamp(max=capacity)
    ends = ((held + align - 1) // align * align).cumsum(0)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0)) if num_experts else ends
    places = torch.where(kept, starts[expert] + rank, -1)
    sources = torch.full((rows_of(flat.numel(), num_experts, align) + 1,), -1, device=flat.device)
    sources[places] = torch.where(
        kept, torch.arange(len(flat), device=flat.device), -1
    )  # -1: the spare last row
    return places.view(experts.shape), sources[:-1].clone(), ends, (here & ~kept).sum().view(1)


@op("triton")
def moe_permute_gather(x: Tensor, sources: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """x [T, D], sources [R], weights [T, k] fp32 -> rows [R, D]: x of each row's token, times its weight.

    Rows without a source are zero.
    """
    if not len(x):
        return x.new_zeros((len(sources), x.shape[1]))
    choice = sources.clamp(min=0)
    rows = x[choice // k].float()
    rows = rows if weights is None else rows * weights.reshape(-1)[choice][:, None]
    return torch.where((sources >= 0)[:, None], rows, 0.0).to(x.dtype).contiguous()


@op("triton")
def moe_permute_combine(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """rows [R, D], places [T, k], weights [T, k] fp32 -> [T, D]: the weighted sum of a token's rows, in fp32.

    A place of -1 counts nothing.
    """
    picked = rows[places.clamp(min=0)].float()
    picked = picked if weights is None else picked * weights[:, :, None]
    return torch.where((places >= 0)[:, :, None], picked, 0.0).sum(1).to(rows.dtype).contiguous()


@op("triton")
def moe_permute_dot(rows: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """rows [R, D], x [T, D], places [T, k] -> [T, k] fp32: each token times its rows; 0 where dropped."""
    picked = rows[places.clamp(min=0)].float()
    return torch.where(places >= 0, (picked * x[:, None].float()).sum(2), 0.0)


def rows_of(choices: int, num_experts: int, align: int) -> int:
    """How many rows hold any distribution of the choices: whole blocks of align."""
    return (choices + min(choices, num_experts) * (align - 1)) // align * align


class Permutation(NamedTuple):
    """Where each choice of an expert went: see `moe_permute_sort`. dropped [1] int64 stays on the device."""

    places: Tensor
    sources: Tensor
    ends: Tensor
    dropped: Tensor


class PermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        ctx.save_for_backward(x if weights is not None else None, weights)
        return moe_permute_gather(x, permutation.sources, weights, permutation.places.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("moe_permute")
        (x, weights), places, grad = ctx.saved_tensors, ctx.permutation.places, grad.contiguous()
        need_x, need_weights, _ = ctx.needs_input_grad
        grad_x = moe_permute_combine(grad, places, weights) if need_x else None
        return grad_x, moe_permute_dot(grad, x, places) if need_weights else None, None


class UnpermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, permutation: Permutation) -> Tensor:
        ctx.permutation = permutation
        ctx.save_for_backward(rows if weights is not None else None, weights)
        return moe_permute_combine(rows, permutation.places, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("moe_unpermute")
        (rows, weights), (places, sources, *_), grad = ctx.saved_tensors, ctx.permutation, grad.contiguous()
        need_rows, need_weights, _ = ctx.needs_input_grad
        grad_rows = moe_permute_gather(grad, sources, weights, places.shape[1]) if need_rows else None
        return grad_rows, moe_permute_dot(rows, grad, places) if need_weights else None, None


def moe_permute(
    x: Tensor,
    experts: Tensor,
    num_experts: int,
    weights: Tensor | None = None,
    *,
    align: int = 1,
    capacity: int = 0,
) -> tuple[Tensor, Permutation]:
    """x [..., D] and experts [..., k] int64 -> rows [R, D] in the experts' order, and the way back.

    R is the same for any routing (nothing waits for the device); rows behind the last end, and those between
    an expert's last token and its end, are zero. weights [..., k]: multiply each row. align: each expert's
    rows begin at a multiple of it. capacity: the most tokens that an expert keeps, in their order; 0: all.
    Choices of other experts than 0 to num_experts - 1 (expert parallelism: those of other ranks) get no row.
    Differentiable once in x and weights. ValueError where shapes or numbers do not fit.
    """
    problem = _problem(x, experts, weights, num_experts, align, capacity)
    if problem:
        raise ValueError(f"moe_permute: {problem}")
    choices = experts.reshape(-1, experts.shape[-1]).contiguous()
    permutation = Permutation(*moe_permute_sort(choices, num_experts, align, capacity))
    rows = x.reshape(len(choices), x.shape[-1]).contiguous()
    return permute_rows(rows, permutation, _flat(weights)), permutation


def permute_rows(x: Tensor, permutation: Permutation, weights: Tensor | None = None) -> Tensor:
    """x [T, D] contiguous, weights [T, k] fp32 -> rows [R, D], by a permutation that is known already."""
    return PermuteFunction.apply(x, weights, permutation)


def unpermute_rows(rows: Tensor, permutation: Permutation, weights: Tensor | None = None) -> Tensor:
    """The way back of `permute_rows`: rows [R, D] contiguous -> [T, D], summed."""
    return UnpermuteFunction.apply(rows, weights, permutation)


def moe_unpermute(rows: Tensor, permutation: Permutation, weights: Tensor | None = None) -> Tensor:
    """rows [R, D] of `moe_permute` -> [T, D]: each token's rows, times weights [..., k], summed in fp32.

    A choice that was dropped counts nothing. Differentiable once in rows and weights. ValueError where shapes
    do not fit.
    """
    places = permutation.places
    if rows.ndim != 2 or len(rows) != len(permutation.sources) or rows.dtype not in DTYPES:
        given = f"rows {tuple(rows.shape)} of {rows.dtype}"
        raise ValueError(
            f"moe_unpermute: {given}: give [{len(permutation.sources)}, D] of fp32, bf16 or fp16"
        )
    if weights is not None and weights.numel() != places.numel():
        raise ValueError(f"moe_unpermute: weights {tuple(weights.shape)}: give {tuple(places.shape)}")
    return unpermute_rows(rows.contiguous(), permutation, _flat(weights))


def _flat(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.reshape(-1, weights.shape[-1]).float().contiguous()


def _problem(
    x: Tensor, experts: Tensor, weights: Tensor | None, num_experts: int, align: int, capacity: int
) -> str | None:
    if x.ndim == 0 or x.dtype not in DTYPES:
        return f"x {tuple(x.shape)} of {x.dtype}: give [..., D] of fp32, bf16 or fp16"
    if experts.dtype != torch.int64 or experts.shape[:-1] != x.shape[:-1] or experts.ndim == 0:
        given = f"experts {tuple(experts.shape)} of {experts.dtype}"
        return f"{given}: give {(*x.shape[:-1], 'k')} of torch.int64"
    if experts.shape[-1] < 1 or num_experts < 1 or align < 1 or capacity < 0:
        given = f"k={experts.shape[-1]}, num_experts={num_experts}, align={align}, capacity={capacity}"
        return f"{given}: use 1 or more, and a capacity of 0 or more"
    if weights is not None and weights.shape != experts.shape:
        return f"weights {tuple(weights.shape)}: give {tuple(experts.shape)}, as experts"
    return None
