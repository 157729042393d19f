"""Some tokens a program, all experts of each in registers; the best is taken k times."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.router.op import LEAST_SUM, SCORES, router_bwd, router_fwd

MAX_EXPERTS, HELD = 1024, 2048  # what a program holds: experts of a token, scores in all
TINY = tl.constexpr(LEAST_SUM)


def refuses(logits: Tensor, score: str) -> str | None:
    if logits.ndim != 2 or logits.dtype not in DTYPES or not logits.is_contiguous():
        return f"logits must be [T, E] of fp32, bf16 or fp16, contiguous, are {logits.dtype}"
    if score not in SCORES:
        return f"no kernel for {score}"
    if not 0 < logits.shape[1] <= MAX_EXPERTS:
        return f"E={logits.shape[1]} is not 1 to {MAX_EXPERTS}, what a program holds"
    return refuses_device(logits)


def refuses_fwd(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int,
    group_k: int,
    normalize: bool,
    scale: float,
) -> str | None:
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return f"bias must be contiguous fp32, is {bias.dtype}"
    experts = logits.shape[-1]
    if groups > 1 and (experts & (experts - 1) or groups & (groups - 1)):
        return f"{experts} experts in {groups} groups: a kernel has powers of two alone"
    return refuses(logits, score)


def refuses_bwd(
    grad_weights: Tensor, logits: Tensor, experts: Tensor, score: str, normalize: bool, scale: float
) -> str | None:
    if grad_weights.dtype != torch.float32 or not (grad_weights.is_contiguous() and experts.is_contiguous()):
        return f"grad_weights must be contiguous fp32 and experts contiguous, is {grad_weights.dtype}"
    return refuses(logits, score)


@triton.jit
def scores_of(logits, rows, cols, T, E, SOFTMAX: tl.constexpr):
    """Scores [ROWS, BLOCK] in fp32, 0 where there is no expert, and where there is one."""
    inside = (rows[:, None] < T) & (cols[None, :] < E)
    at = logits + rows[:, None].to(tl.int64) * E + cols[None, :]
    values = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        values = tl.where(rows[:, None] < T, values, 0.0)
        exps = tl.exp(values - tl.max(values, 1)[:, None])
        scores = exps / tl.sum(exps, 1)[:, None]
    else:
        scores = tl.sigmoid(values)
    return tl.where(inside, scores, 0.0), inside


@triton.jit
def first_best(values, cols, BLOCK: tl.constexpr):
    """Where each row's largest is, the first of equals; a row with NaN names some column, too."""
    best = tl.max(values, 1)
    return tl.minimum(tl.min(tl.where(values == best[:, None], cols[None, :], BLOCK), 1), BLOCK - 1), best


@triton.jit
def of_kept_groups(
    choice, GROUP_K: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """choice, -inf outside of the groups whose two best are the best together."""
    SIZE: tl.constexpr = BLOCK // GROUPS
    grouped, places = tl.reshape(choice, (ROWS, GROUPS, SIZE)), tl.arange(0, SIZE)[None, None, :]
    best = tl.max(grouped, 2)
    if SIZE > 1:
        first = tl.min(tl.where(grouped == best[:, :, None], places, SIZE), 2)
        best += tl.max(tl.where(places == first[:, :, None], float("-inf"), grouped), 2)
    names = tl.arange(0, GROUPS)
    kept = tl.zeros((ROWS, GROUPS), tl.int32)
    for _ in tl.static_range(GROUP_K):
        taken, _best = first_best(tl.where(kept > 0, float("-inf"), best), names, GROUPS)
        kept += (names[None, :] == taken[:, None]).to(tl.int32)
    grouped = tl.where(kept[:, :, None] > 0, grouped, float("-inf"))
    return tl.reshape(grouped, (ROWS, BLOCK))


@triton.jit
def router_fwd_kernel(
    logits, bias, weights, experts, T, E, scale, K: tl.constexpr, SOFTMAX: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    rows, cols, slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    scores, inside = scores_of(logits, rows, cols, T, E, SOFTMAX)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + cols, mask=cols < E, other=0.0)[None, :]
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = of_kept_groups(choice, GROUP_K, GROUPS, ROWS, BLOCK)
    found_weights, found_experts = tl.zeros((ROWS, SLOTS), tl.float32), tl.zeros((ROWS, SLOTS), tl.int32)
    taken_before = tl.zeros((ROWS, BLOCK), tl.int32)
    for slot in tl.static_range(K):
        left = tl.where(taken_before > 0, float("-inf"), choice)
        expert, _best = first_best(left, cols, BLOCK)
        expert = tl.minimum(expert, E - 1)
        is_expert = cols[None, :] == expert[:, None]
        taken_before += is_expert.to(tl.int32)
        weight = tl.sum(tl.where(is_expert, scores, 0.0), 1)
        here = slots[None, :] == slot
        found_weights = tl.where(here, weight[:, None], found_weights)
        found_experts = tl.where(here, expert[:, None], found_experts)
    if NORMALIZE:
        found_weights = found_weights / (tl.sum(found_weights, 1) + TINY)[:, None]
    at = rows[:, None].to(tl.int64) * K + slots[None, :]
    stored = (rows[:, None] < T) & (slots[None, :] < K)
    tl.store(weights + at, found_weights * scale, mask=stored)
    tl.store(experts + at, found_experts.to(tl.int64), mask=stored)


@triton.jit
def router_bwd_kernel(
    grad_weights, logits, experts, grad_logits, T, E, scale, K: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    scores, inside = scores_of(logits, rows, cols, T, E, SOFTMAX)
    grad = tl.zeros((ROWS, BLOCK), tl.float32)
    chosen = tl.zeros((ROWS, BLOCK), tl.float32)
    for slot in tl.static_range(K):
        at = rows.to(tl.int64) * K + slot
        expert = tl.load(experts + at, mask=rows < T, other=0)
        is_expert = cols[None, :] == expert[:, None]
        of_slot = tl.load(grad_weights + at, mask=rows < T, other=0.0) * scale
        grad += tl.where(is_expert, of_slot[:, None], 0.0)
        chosen += tl.where(is_expert, scores, 0.0)
    if NORMALIZE:
        total = (tl.sum(chosen, 1) + TINY)[:, None]
        shared = tl.sum(grad * chosen, 1)[:, None] / total
        grad = tl.where(chosen != 0.0, (grad - shared) / total, 0.0)
    of_score = tl.sum(grad * scores, 1)[:, None] if SOFTMAX else grad * scores
    grad = scores * (grad - of_score)
    out = grad_logits + rows[:, None].to(tl.int64) * E + cols[None, :]
    tl.store(out, grad.to(grad_logits.dtype.element_ty), mask=inside)


def _facts(logits: Tensor) -> tuple[tuple[int], dict]:
    block = triton.next_power_of_2(logits.shape[1])
    rows = max(HELD // block, 1)
    return (triton.cdiv(len(logits), rows),), {"ROWS": rows, "BLOCK": block, "num_warps": 4}


@router_fwd.backend("triton", refuses=refuses_fwd, planned=True)
def _(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int,
    group_k: int,
    normalize: bool,
    scale: float,
) -> Callable:
    (tokens, experts), device, (grid, facts) = logits.shape, logits.device, _facts(logits)
    launch = Launch(
        router_fwd_kernel, grid, (tokens, experts, scale),
        K=k, SOFTMAX=score == "softmax", GROUPS=groups, GROUP_K=group_k, NORMALIZE=normalize,
        SLOTS=triton.next_power_of_2(k), **facts,
    )  # fmt: skip

    def run(logits: Tensor, bias: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
        weights = torch.empty((tokens, k), dtype=torch.float32, device=device)
        chosen = torch.empty((tokens, k), dtype=torch.int64, device=device)
        if tokens:
            launch(logits, bias, weights, chosen)
        return weights, chosen

    return run


@router_bwd.backend("triton", refuses=refuses_bwd, planned=True)
def _(
    grad_weights: Tensor, logits: Tensor, experts: Tensor, score: str, normalize: bool, scale: float
) -> Callable:
    grid, facts = _facts(logits)
    launch = Launch(
        router_bwd_kernel, grid, (*logits.shape, scale),
        K=experts.shape[1], SOFTMAX=score == "softmax", NORMALIZE=normalize, **facts,
    )  # fmt: skip

    def run(grad_weights: Tensor, logits: Tensor, experts: Tensor, *_: object) -> Tensor:
        grad_logits = torch.empty_like(logits)
        if len(logits):
            launch(grad_weights, logits, experts, grad_logits)
        return grad_logits

    return run
