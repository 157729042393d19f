"""Which experts a token goes to, and how much each counts: top-k of its scores, in fp32 and deterministic."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import op, refuse_second_derivative

SCORES = ("softmax", "sigmoid")
LEAST_SUM = 1e-20  # under the sum of weights that are normalised, as in DeepSeek-V3


@op("triton")
def router_fwd(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int,
    group_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """logits [T, E], bias [E] fp32 -> weights [T, k] fp32, experts [T, k] int64, the best first.

    Experts are the k of the highest score + bias, ties to the lowest number; weights are their scores without
    bias, over their sum where normalize, times scale. groups: experts in so many equal groups of which the
    group_k count whose two best experts are the best together (arXiv 2412.19437).
    """
    scores = _scores(logits, score)
    choice = scores if bias is None else scores + bias
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        best = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, group_k), True)
        choice = torch.where(kept[:, :, None], grouped, -torch.inf).flatten(1)
    experts = _best(choice, k)
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST_SUM)
    return weights * scale, experts


@op("triton")
def router_bwd(
    grad_weights: Tensor, logits: Tensor, experts: Tensor, score: str, normalize: bool, scale: float
) -> Tensor:
    """grad_weights, experts [T, k], logits [T, E] -> grad_logits [T, E] of logits' dtype."""
    scores, grad = _scores(logits, score), grad_weights * scale
    if normalize:
        chosen = scores.gather(1, experts)
        total = chosen.sum(1, keepdim=True) + LEAST_SUM
        grad = (grad - (grad * chosen).sum(1, keepdim=True) / total) / total
    grad_scores = torch.zeros_like(scores).scatter_(1, experts, grad)
    if score == "softmax":
        grad_logits = scores * (grad_scores - (grad_scores * scores).sum(1, keepdim=True))
    else:
        grad_logits = grad_scores * scores * (1 - scores)
    return grad_logits.to(logits.dtype)


def _scores(logits: Tensor, score: str) -> Tensor:
    return logits.float().softmax(1) if score == "softmax" else logits.float().sigmoid()


def _best(x: Tensor, k: int) -> Tensor:
    return x.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()


class RouterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
        weights, experts = router_fwd(logits, bias, *options)
        _, ctx.score, _, _, ctx.normalize, ctx.scale = options
        ctx.save_for_backward(logits, experts)
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("router")
        logits, experts = ctx.saved_tensors
        grad = router_bwd(grad_weights.contiguous(), logits, experts, ctx.score, ctx.normalize, ctx.scale)
        return grad, *[None] * 7


class Routing(NamedTuple):
    """weights [..., k] fp32 and experts [..., k] int64 of each token, the best first."""

    weights: Tensor
    experts: Tensor


def router(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    group_k: int | None = None,
    normalize: bool = False,
    scale: float = 1.0,
) -> Routing:
    """The k experts of each token by logits [..., E], and their weights, differentiable once in logits.

    Mixtral: normalize. Qwen3, OLMoE: as configured. gpt-oss: normalize (a softmax of the chosen logits is
    that of all, normalised). DeepSeek-V3, GLM-4: score="sigmoid", bias for balance without a loss (arXiv
    2408.15664; it decides, and counts in no weight), groups, group_k, normalize, scale. See `router_fwd`.
    ValueError where numbers do not fit each other.
    """
    group_k = groups if group_k is None else group_k
    problem = _problem(logits, k, score, bias, groups, group_k)
    if problem:
        raise ValueError(f"router: {problem}")
    rows = logits.reshape(logits.shape[:-1].numel(), logits.shape[-1]).contiguous()
    bias = None if bias is None else bias.detach().float().contiguous()
    found = RouterFunction.apply(rows, bias, k, score, groups, group_k, normalize, float(scale))
    return Routing(*(part.view(*logits.shape[:-1], k) for part in found))


def _problem(
    logits: Tensor, k: int, score: str, bias: Tensor | None, groups: int, group_k: int
) -> str | None:
    if logits.ndim == 0 or logits.dtype not in DTYPES:
        return f"logits {tuple(logits.shape)} of {logits.dtype}: give [..., E] of fp32, bf16 or fp16"
    experts = logits.shape[-1]
    if score not in SCORES:
        return f"score={score!r}: use one of {', '.join(SCORES)}"
    if bias is not None and bias.shape != (experts,):
        return f"bias {tuple(bias.shape)}: give ({experts},), one for each expert"
    if groups < 1 or experts % groups or not 1 <= group_k <= groups:
        return f"groups={groups}, group_k={group_k}: {experts} experts make equal groups, of which some count"
    if not 1 <= k <= experts // groups * group_k:
        return f"k={k}: use 1 to {experts // groups * group_k}, the experts that can be chosen"
    return None


def router_losses(logits: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """logits [..., E], experts [..., k] -> the balance loss and the z-loss, fp32 scalars.

    Balance: E times the sum over experts of the share of choices times the mean probability (Switch
    Transformers, arXiv 2101.03961): 1 where all are equally likely. z: the mean of log-sum-exp squared
    (ST-MoE, arXiv 2202.08906). Both 0 without a token. Differentiable in logits.
    """
    rows = logits.reshape(-1, logits.shape[-1]).float()
    chosen = torch.zeros(rows.shape[1], device=rows.device)
    chosen.index_add_(0, experts.reshape(-1), torch.ones(experts.numel(), device=rows.device))
    tokens, choices = max(len(rows), 1), max(experts.numel(), 1)
    balance = rows.shape[1] * (chosen / choices * rows.softmax(1).sum(0) / tokens).sum()
    return balance, rows.logsumexp(1).square().sum() / tokens
