"""A row a program, read twice: an online softmax (arXiv 1805.02867), then the gradient over the logits."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.cross_entropy.op import cross_entropy, cross_entropy_, entropy_problem, option_problem
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device

MAX_BLOCK, HELD = 8192, 512  # classes at a time, of a warp


def refuses(
    logits: Tensor,
    labels: Tensor,
    row_scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> str | None:
    problem = entropy_problem(logits, labels, row_scale)
    problem = problem or option_problem(ignore_index, label_smoothing, z_loss, softcap)
    if problem:
        return problem
    if logits.numel() and logits.stride(1) != 1:
        return f"logits must have contiguous rows, have strides {logits.stride()}"
    for name, given in (("labels", labels), ("row_scale", row_scale)):
        if given is not None and not given.is_contiguous():
            return f"{name} must be contiguous, has strides {given.stride()}"
    return refuses_device(logits)


@triton.jit
def capped(values, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        values = softcap * (2 * tl.sigmoid(2 * values / softcap) - 1)  # tanh
    return values


@triton.jit
def cross_entropy_kernel(
    logits, labels, row_scale, losses, V, stride, ignore_index, label_smoothing, z_loss, softcap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, label = logits + row * stride, tl.load(labels + row)
    is_class = (label >= 0) & (label < V)
    # read before the loop's barriers: behind them, other warps may have written a gradient there
    of_label = capped(tl.load(at + tl.where(is_class, label, 0)).to(tl.float32), softcap, CAPPED)
    highest, total, summed = float("-inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        inside = start + block < V
        z = capped(tl.load(at + start + block, mask=inside, other=0.0).to(tl.float32), softcap, CAPPED)
        summed += tl.sum(tl.where(inside, z, 0.0))
        z = tl.where(inside, z, float("-inf"))
        higher = tl.maximum(highest, tl.max(z))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher))
        highest = higher
    lse = highest + tl.log(total)
    loss = lse - (1 - label_smoothing) * of_label - label_smoothing * (summed / V)
    loss = tl.where(is_class, loss + z_loss * lse * lse, float("nan"))
    tl.store(losses + row, tl.where(label == ignore_index, 0.0, loss))
    if row_scale is not None:
        scale = tl.load(row_scale + row)
        for start in range(0, V, BLOCK):
            cols = start + block
            z = tl.load(at + cols, mask=cols < V, other=0.0).to(tl.float32)
            z = capped(z, softcap, CAPPED)
            grad = tl.exp(z - lse) * (1 + 2 * z_loss * lse) - label_smoothing / V
            grad = tl.where(cols == label, grad - (1 - label_smoothing), grad)
            if CAPPED:
                grad *= 1 - (z / softcap) * (z / softcap)
            grad = tl.where(label == ignore_index, 0.0, grad * scale)
            tl.store(at + cols, grad.to(logits.dtype.element_ty), mask=cols < V)


@triton.jit
def loss_kernel(
    logits, labels, losses, lses, peaks, V, stride, ignore_index, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, label = logits + row * stride, tl.load(labels + row)
    is_class, counts = (label >= 0) & (label < V), label != ignore_index
    of_label = tl.load(at + tl.where(is_class, label, 0)).to(tl.float32)
    highest, total, rest = float("-inf"), 0.0, float("-inf")
    for start in range(0, V, BLOCK):
        cols = start + block
        z = tl.load(at + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(z))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher))
        highest, rest = higher, tl.maximum(rest, tl.max(tl.where(cols == label, float("-inf"), z)))
    lse = highest + tl.log(total)
    peak = tl.maximum(tl.exp(rest - lse), tl.where(is_class, tl.abs(tl.exp(of_label - lse) - 1), 0.0))
    tl.store(losses + row, tl.where(counts, tl.where(is_class, lse - of_label, float("nan")), 0.0))
    tl.store(lses + row, lse)
    tl.store(peaks + row, tl.where(counts, peak, 0.0))


def refuses_loss(logits: Tensor, labels: Tensor, ignore_index: int) -> str | None:
    return refuses(logits, labels, None, ignore_index, 0.0, 0.0, 0.0)


@cross_entropy.backend("triton", refuses=refuses_loss, planned=True)
def _(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Callable:
    rows, classes = logits.shape
    block = min(triton.next_power_of_2(max(classes, 1)), MAX_BLOCK)
    scalars, warps = (classes, logits.stride(0), ignore_index), max(block // HELD, 1)
    launch = Launch(loss_kernel, (rows,), scalars, BLOCK=block, num_warps=warps)

    def run(logits: Tensor, labels: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        losses, lse, peak = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
        if rows:
            launch(logits, labels, losses, lse, peak)
        return losses, lse, peak

    return run


@cross_entropy_.backend("triton", refuses=refuses, planned=True)
def _(
    logits: Tensor,
    labels: Tensor,
    row_scale: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
) -> Callable:
    rows, classes = logits.shape
    block = min(triton.next_power_of_2(max(classes, 1)), MAX_BLOCK)
    launch = Launch(
        cross_entropy_kernel, (rows,),
        (classes, logits.stride(0), ignore_index, label_smoothing, z_loss, softcap),
        CAPPED=bool(softcap), BLOCK=block, num_warps=max(block // HELD, 1),
    )  # fmt: skip

    def run(logits: Tensor, labels: Tensor, row_scale: Tensor | None, *_: object) -> Tensor:
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        if rows:
            launch(logits, labels, row_scale, losses)
        return losses

    return run
