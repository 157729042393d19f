"""hidden @ weight.T and its cross-entropy, a chunk of tokens at a time: the logits are never whole in memory.

A chunk's logits become their own gradient, and both products of backward are made of them at once, in
forward: a loss that is one number needs only its factor later. With reduction "none" the factors come later
and differ, so backward makes the logits again. As in Liger (arXiv 2410.10989).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbo_ops import casting
from turbo_ops.arch import DTYPES, arch
from turbo_ops.casting import HIGH_PRECISION, Recipe, Scaled
from turbo_ops.cross_entropy import cross_entropy, cross_entropy_, option_problem
from turbo_ops.dispatch import keeps_graph, refuse_second_derivative
from turbo_ops.gemm import gemm_accumulate_, matmul
from turbo_ops.quantize import cast, cast_arguments, cast_both, quantize_both_cross_entropy

REDUCTIONS = ("mean", "sum", "none")
# Logits at a time: 256 MiB in bf16, 1024 tokens of 128256 classes. Twice as many where they are cast: then
# products are faster, and what a chunk adds to the weight's gradient, 1 GB read and written, weighs more.
CHUNK = 1 << 27
# Chunks whose shares of the gradient of weight are summed in bf16: each is a sum of fp32 products, rounded
# once, and 8 of them err by 1.6 roundings. Hundreds lose what they add (Liger-Kernel#512): then it is fp32.
FEW_CHUNKS = 8


class Call(NamedTuple):
    """All but the tensors to differentiate. options: of `cross_entropy_`. divisor: of the sum of losses."""

    labels: Tensor
    recipe: Recipe
    dtype: torch.dtype
    options: tuple[int, float, float, float]
    reduction: str
    divisor: Tensor | float | None
    chunk: int
    recording: bool
    on_the_way: bool  # the logits' gradient is cast as it is made
    total_dtype: torch.dtype  # of the sum of the chunks' shares of the weight's gradient


class LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        needs = [call.recording and need for need in ctx.needs_input_grad[:3]]
        ctx.call, ctx.needs = call, needs
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        if call.reduction == "none":
            losses, _ = _chunks(hidden, weight, bias, call, None, (False, False, False))
            ctx.save_for_backward(hidden, weight, bias)
            return losses
        # of the sum: divided by thousands of tokens, fp16 would lose what a gradient scaler is for
        row_scale = torch.ones(len(hidden), device=hidden.device) if any(needs) else None
        losses, ctx.grads = _chunks(hidden, weight, bias, call, row_scale, needs)
        ctx.divisor = _divisor(call)
        return losses.sum() / ctx.divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy")
        if ctx.call.reduction != "none":
            # where nothing counts, the loss is NaN and its gradients are 0, as torch's
            grads, factor = ctx.grads, torch.where(ctx.divisor == 0, 0.0, grad / ctx.divisor)
            if grads is None:
                raise RuntimeError("linear_cross_entropy: a second backward needs retain_graph in the first")
            kept = not torch.compiler.is_compiling() and keeps_graph()
            ctx.grads = grads if kept else None
            # in place where that may be: the weight's is 1 GB with 128256 classes
            grads = [g if g is None else g * factor if kept else g.mul_(factor) for g in grads]
        else:
            hidden, weight, bias = ctx.saved_tensors
            row_scale = grad.float().contiguous()
            _, grads = _chunks(hidden, weight, bias, ctx.call, row_scale, ctx.needs)
        return *(g if g is None else g.to(d) for g, d in zip(grads, ctx.dtypes, strict=True)), None


def _divisor(call: Call) -> Tensor:
    """What the sum of the losses is divided by, fp32, on the labels' device."""
    if call.divisor is not None:
        return torch.as_tensor(call.divisor, dtype=torch.float32, device=call.labels.device).reshape(())
    if call.reduction == "sum":
        return torch.ones((), device=call.labels.device)
    return (call.labels != call.options[0]).sum().float()  # 0 where all are ignored: NaN, as in torch


class Head(NamedTuple):
    """The weight as the GEMMs of a chunk read it, and what they add to. None: not wanted."""

    rhs: Scaled
    weight_t: Scaled | None
    bias: Tensor | None
    grad_hidden: Tensor | None
    grad_bias: Tensor | None


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, row_scale: Tensor | None, needs: Any
) -> tuple[Tensor, list[Tensor | None]]:
    """losses [T]; with row_scale also the gradients of hidden, weight and bias that are needed."""
    need_hidden, need_weight, need_bias = needs if row_scale is not None else (False, False, False)
    fprop, dgrad, uncast = call.recipe.fprop, call.recipe.dgrad, weight.to(call.dtype)
    rhs, weight_t = (
        cast_both(uncast, fprop.rhs, dgrad.rhs) if need_hidden else (cast(uncast, fprop.rhs), None)
    )
    head = Head(
        rhs,
        weight_t,
        None if bias is None else bias.to(call.dtype),
        torch.empty_like(hidden) if need_hidden else None,
        torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None,
    )
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    grad_weight: Tensor | None = None
    for first in range(0, len(hidden), call.chunk):
        rows = slice(first, first + call.chunk)
        # of a call of its own: a chunk's logits are gone before the next are made
        losses[rows], grad_weight = _chunk(hidden, rows, head, call, row_scale, need_weight, grad_weight)
    if need_weight and grad_weight is None:
        grad_weight = torch.zeros_like(weight)  # no token
    if grad_weight is not None and weight.dtype == torch.bfloat16:  # fp16's range may not hold the sum
        grad_weight = grad_weight.to(weight.dtype)
    return losses, [head.grad_hidden, grad_weight, head.grad_bias]


def _chunk(
    hidden: Tensor,
    rows: slice,
    head: Head,
    call: Call,
    row_scale: Tensor | None,
    need_weight: bool,
    grad_weight: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The losses of the rows, and grad_weight with their share."""
    fprop, dgrad, wgrad = call.recipe.fprop, call.recipe.dgrad, call.recipe.wgrad
    x, scale = hidden[rows].to(call.dtype), row_scale[rows] if row_scale is not None else None
    lhs, x_t = cast_both(x, fprop.lhs, wgrad.rhs) if need_weight else (cast(x, fprop.lhs), None)
    logits = matmul(lhs, head.rhs, call.dtype, bias=head.bias, fast_accum=fprop.fast_accum)
    if scale is not None and call.on_the_way and head.grad_bias is None:
        losses, grad, grad_t = _cast_gradient(logits, call.labels[rows], scale, call)
    else:
        losses = cross_entropy_(logits, call.labels[rows], scale, *call.options)
        if scale is None:
            return losses, None
        if head.grad_bias is not None:
            head.grad_bias.add_(logits.float().sum(0))
        grad, grad_t = cast_both(logits, dgrad.lhs, wgrad.lhs)
    del logits  # cast, they are another copy
    if head.grad_hidden is not None and head.weight_t is not None:
        product = matmul(grad, head.weight_t, hidden.dtype, fast_accum=dgrad.fast_accum)
        head.grad_hidden[rows] = product
    if x_t is not None and grad_weight is not None:
        gemm_accumulate_(grad_weight, grad_t.data, x_t.data, grad_t.scale, x_t.scale, wgrad.fast_accum)
    elif x_t is not None:
        grad_weight = matmul(grad_t, x_t, call.total_dtype, fast_accum=wgrad.fast_accum)
    return losses, grad_weight


def _cast_gradient(
    logits: Tensor, labels: Tensor, row_scale: Tensor, call: Call
) -> tuple[Tensor, Scaled, Scaled]:
    """The losses, and both casts of the logits' gradient, which is nowhere else."""
    losses, lse, peak = cross_entropy(logits, labels, call.options[0])
    how = cast_arguments(logits, call.recipe.dgrad.lhs)  # type: ignore[arg-type]
    data, scale, data_t, scale_t = quantize_both_cross_entropy(
        logits, labels, row_scale, lse, peak, call.options[0], *how
    )
    return losses, Scaled(data, scale), Scaled(data_t, scale_t)


def _problem(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> str | None:
    if hidden.ndim == 0 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[-1] or not len(weight):
        return f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [..., D] and [V, D]"
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        given = f"labels {tuple(labels.shape)} of {labels.dtype}"
        return f"{given} must be {tuple(hidden.shape[:-1])} of torch.int64"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias {tuple(bias.shape)} must be {tuple(weight.shape[:1])}"
    dtypes = {hidden.dtype, weight.dtype, (hidden if bias is None else bias).dtype}
    if not dtypes <= set(DTYPES):
        return f"hidden is {hidden.dtype}, weight {weight.dtype}: give fp32, bf16 or fp16"
    if len(dtypes) > 1 and not torch.is_autocast_enabled(hidden.device.type):
        given = f"hidden {hidden.dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}"
        return f"dtypes differ ({given}): convert, or run under torch.autocast"
    return None


def _option_problem(
    recipe: Recipe, reduction: str, divisor: object, chunk: int | None, accumulate: torch.dtype | None
) -> str | None:
    if not isinstance(recipe, Recipe):
        return f"recipe={recipe!r}: give a Recipe, turbo_nn.RECIPES[name] say"
    if reduction not in REDUCTIONS:
        return f"reduction={reduction!r}: use one of {', '.join(REDUCTIONS)}"
    if divisor is not None and reduction != "mean":
        return f"divisor={divisor} with reduction={reduction!r}: use 'mean'"
    if isinstance(divisor, Tensor):  # its value is the device's: not waited for
        if divisor.numel() != 1 or divisor.requires_grad:
            given = f"{tuple(divisor.shape)}, requires_grad={divisor.requires_grad}"
            return f"divisor {given}: give one number, without a gradient"
    elif divisor is not None and not (isinstance(divisor, int | float) and 0 < divisor < math.inf):
        return f"divisor={divisor!r}: give a positive number, of tokens say"
    if chunk is not None and not (isinstance(chunk, int) and chunk >= 1):
        return f"chunk={chunk!r}: use a whole number of tokens, 1 or more"
    if accumulate not in (None, torch.float32, torch.bfloat16):
        return f"accumulate={accumulate}: use torch.float32 or torch.bfloat16"
    if recipe.history:
        return "the recipe has an amax history, which a head has not: use another"
    return None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    reduction: str = "mean",
    divisor: Tensor | float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    chunk: int | None = None,
    accumulate: torch.dtype | None = None,
) -> Tensor:
    """Cross-entropy of hidden [..., D] @ weight [V, D].T + bias [V] with labels [...]: scalar or [...], fp32.

    Differentiable once in hidden, weight and bias; gradients have their tensors' dtypes. Logits are rounded
    to hidden's dtype, or autocast's; the loss is computed in fp32. recipe: casts of the three GEMMs.
    reduction: "mean" over labels that are not ignore_index, "sum" or "none"; divisor stands in for their
    number under "mean" (tokens of all micro-batches and ranks). label_smoothing, z_loss, softcap: see
    `cross_entropy_`. chunk: tokens at a time (None: some 2^27 logits, 2^28 with casts). accumulate: dtype of
    the sum of the chunks' shares of weight's gradient (None: bf16 weight's own up to 8 chunks, else fp32).
    All labels ignored: NaN under "mean" with gradients of 0, as in torch. ValueError where shapes, dtypes or
    options do not fit.
    """
    recipe, dtype = recipe or HIGH_PRECISION, hidden.dtype
    problem = (
        _problem(hidden, weight, labels, bias)
        or _option_problem(recipe, reduction, divisor, chunk, accumulate)
        or option_problem(ignore_index, label_smoothing, z_loss, softcap)
    )
    if problem:
        raise ValueError(f"linear_cross_entropy: {problem}")
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    most = CHUNK << recipe.casts
    tokens = chunk or max(128, most // max(len(weight), 1) // 128 * 128)
    options = ignore_index, float(label_smoothing), float(z_loss), float(softcap)
    flat = labels.reshape(-1).contiguous()
    few = weight.dtype == torch.bfloat16 and len(flat) <= FEW_CHUNKS * tokens
    total = accumulate or (torch.bfloat16 if few else torch.float32)
    how, plain = recipe.dgrad.lhs, not any(options[1:])
    fits = plain and how is not None and how == recipe.wgrad.lhs and how.block != (1, 0)
    on_the_way = fits and arch(hidden.device) in casting.ON_THE_WAY and not torch.compiler.is_compiling()
    recording = torch.is_grad_enabled()
    call = Call(flat, recipe, dtype, options, reduction, divisor, tokens, recording, on_the_way, total)
    loss = LinearCrossEntropyFunction.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, call)
    return loss.view(labels.shape) if reduction == "none" else loss
