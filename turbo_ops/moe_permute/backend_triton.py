"""Choices are ranked a block at a time: what a block has of each expert, and what those before it had."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.moe_permute.op import (
    moe_permute_combine,
    moe_permute_dot,
    moe_permute_gather,
    moe_permute_sort,
    rows_of,
)

HELD, MAX_EXPERTS = 8192, 1024  # choices times experts of a block, and the most experts


def refuses_sort(experts: Tensor, num_experts: int, align: int, capacity: int) -> str | None:
    if experts.ndim != 2 or experts.dtype != torch.int64 or not experts.is_contiguous():
        return f"experts must be [T, k] int64, contiguous, are {tuple(experts.shape)} of {experts.dtype}"
    if num_experts > MAX_EXPERTS:
        return f"num_experts={num_experts} is over {MAX_EXPERTS}, what a program holds"
    return refuses_device(experts)


def _refuses(x: Tensor, *others: Tensor | None) -> str | None:
    if x.ndim != 2 or x.dtype not in DTYPES or not x.is_contiguous():
        return f"tensors must be [N, D] of fp32, bf16 or fp16, contiguous, are {tuple(x.shape)} of {x.dtype}"
    if not all(other.is_contiguous() for other in others if other is not None):
        return "all tensors must be contiguous"
    return refuses_device(x)


def refuses_gather(x: Tensor, sources: Tensor, weights: Tensor | None, k: int) -> str | None:
    return _refuses(x, sources, weights)


def refuses_combine(rows: Tensor, places: Tensor, weights: Tensor | None) -> str | None:
    return _refuses(rows, places, weights)


def refuses_dot(rows: Tensor, x: Tensor, places: Tensor) -> str | None:
    return _refuses(rows, x, places)


@triton.jit
def experts_of_block(experts, N, CHOICES: tl.constexpr, EXPERTS: tl.constexpr):
    """A block's choices, their experts, and a table of which choice is whose."""
    choices, names = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES), tl.arange(0, EXPERTS)
    expert = tl.load(experts + choices, mask=choices < N, other=-1)
    return choices, expert, (expert[:, None] == names[None, :]).to(tl.int32)


@triton.jit
def count_kernel(experts, counts, N, E, CHOICES: tl.constexpr, EXPERTS: tl.constexpr):
    _choices, _expert, table = experts_of_block(experts, N, CHOICES, EXPERTS)
    names = tl.arange(0, EXPERTS)
    tl.store(counts + tl.program_id(0) * E + names, tl.sum(table, 0), mask=names < E)


@triton.jit
def place_kernel(
    experts, before, starts, places, sources, N, E, capacity, CHOICES: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    choices, expert, table = experts_of_block(experts, N, CHOICES, EXPERTS)
    names = tl.arange(0, EXPERTS)
    earlier = tl.load(before + tl.program_id(0) * E + names, mask=names < E, other=0).to(tl.int32)
    ranks = tl.cumsum(table, 0) - 1 + earlier[None, :]
    rank = tl.sum(table * ranks, 1).to(tl.int64)
    here = (expert >= 0) & (expert < E)
    first = tl.load(starts + tl.where(here, expert, 0))
    kept = here & ((capacity == 0) | (rank < capacity))
    place = tl.where(kept, first + rank, -1)
    tl.store(places + choices, place, mask=choices < N)
    tl.store(sources + tl.maximum(place, 0), choices.to(tl.int64), mask=kept)


@triton.jit
def gather_kernel(x, sources, weights, rows, D, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(sources + row)
    factor = 1.0
    if weights is not None:
        factor = tl.load(weights + choice, mask=choice >= 0, other=0.0)
    for start in range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        there = (cols < D) & (choice >= 0)
        values = tl.load(x + tl.maximum(choice, 0) // k * D + cols, mask=there, other=0.0).to(tl.float32)
        values = tl.where(there, values * factor, 0.0)
        tl.store(rows + row * D + cols, values.to(rows.dtype.element_ty), mask=cols < D)


@triton.jit
def combine_kernel(rows, places, weights, out, D, K: tl.constexpr, BLOCK: tl.constexpr):
    token, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j)
        there = (cols < D) & (place >= 0)
        values = tl.load(rows + tl.maximum(place, 0) * D + cols, mask=there, other=0.0).to(tl.float32)
        if weights is not None:
            values = tl.where(there, values * tl.load(weights + token * K + j), 0.0)
        total += values
    tl.store(out + token * D + cols, total.to(out.dtype.element_ty), mask=cols < D)


@triton.jit
def dot_kernel(rows, x, places, out, D, k, BLOCK: tl.constexpr):
    choice = tl.program_id(0).to(tl.int64)
    place = tl.load(places + choice)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        there = (cols < D) & (place >= 0)
        values = tl.load(rows + tl.maximum(place, 0) * D + cols, mask=there, other=0.0).to(tl.float32)
        total += values * tl.load(x + choice // k * D + cols, mask=there, other=0.0).to(tl.float32)
    tl.store(out + choice, tl.sum(total))


@moe_permute_sort.backend("triton", refuses=refuses_sort, planned=True)
def _(experts: Tensor, num_experts: int, align: int, capacity: int) -> Callable:
    shape, number, device = experts.shape, experts.numel(), experts.device
    padded = triton.next_power_of_2(num_experts)
    held = {"CHOICES": max(HELD // padded, 16), "EXPERTS": padded, "num_warps": 8}
    blocks = triton.cdiv(number, held["CHOICES"])
    count = Launch(count_kernel, (blocks,), (number, num_experts), **held)
    put = Launch(place_kernel, (blocks,), (number, num_experts, capacity), **held)

    def run(experts: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        counts = torch.empty((blocks, num_experts), dtype=torch.int32, device=device)
        if number:
            count(experts, counts)
        ranks = counts.cumsum(0)
        total = counts.sum(0)
        kept = total.clamp(max=capacity) if capacity else total
        ends = ((kept + (align - 1)) // align * align).cumsum(0)
        places = torch.empty(shape, dtype=torch.int64, device=device)
        rows = rows_of(number, num_experts, align)
        sources = torch.full((rows,), -1, dtype=torch.int64, device=device)
        if number:
            put(experts, ranks - counts, torch.cat((ends.new_zeros(1), ends[:-1])), places, sources)
        return places, sources, ends, (total - kept).sum().view(1)

    return run


@moe_permute_gather.backend("triton", refuses=refuses_gather, planned=True)
def _(x: Tensor, sources: Tensor, weights: Tensor | None, k: int) -> Callable:
    number, width = len(sources), x.shape[1]
    block = min(triton.next_power_of_2(max(width, 1)), 2048)
    launch = Launch(gather_kernel, (number,), (width, k), BLOCK=block, num_warps=max(block // 512, 1))

    def run(x: Tensor, sources: Tensor, weights: Tensor | None, *_: object) -> Tensor:
        rows = torch.empty((number, width), dtype=x.dtype, device=x.device)
        if rows.numel():
            launch(x, sources, weights, rows)
        return rows

    return run


@moe_permute_combine.backend("triton", refuses=refuses_combine, planned=True)
def _(rows: Tensor, places: Tensor, weights: Tensor | None) -> Callable:
    (tokens, k), width = places.shape, rows.shape[1]
    block = min(triton.next_power_of_2(max(width, 1)), 2048)
    grid, warps = (tokens, triton.cdiv(width, block)), max(block // 512, 1)
    launch = Launch(combine_kernel, grid, (width,), K=k, BLOCK=block, num_warps=warps)

    def run(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
        out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
        if out.numel():
            launch(rows, places, weights, out)
        return out

    return run


@moe_permute_dot.backend("triton", refuses=refuses_dot, planned=True)
def _(rows: Tensor, x: Tensor, places: Tensor) -> Callable:
    (tokens, k), width = places.shape, rows.shape[1]
    block = min(triton.next_power_of_2(max(width, 1)), 2048)
    launch = Launch(dot_kernel, (tokens * k,), (width, k), BLOCK=block, num_warps=max(block // 512, 1))

    def run(rows: Tensor, x: Tensor, places: Tensor) -> Tensor:
        out = torch.empty((tokens, k), dtype=torch.float32, device=rows.device)
        if out.numel():
            launch(rows, x, places, out)
        return out

    return run
