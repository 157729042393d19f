"""The router of a mixture of experts: which experts a token goes to, in fp32 whatever the recipe."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import turbo_ops
from turbo_ops import Routing


class Router(nn.Module):
    """x [..., H] -> Routing(weights [..., k] fp32, experts [..., k] int64), by logits x @ weight.T in fp32.

    weight [E, H]. k, score, groups, group_k, normalize, scale: see `turbo_ops.router`. balance_bias: hold
    e_score_correction_bias [E], a buffer that decides and counts in no weight, for balance without a loss
    (arXiv 2408.15664); `update_bias` moves it. It stays fp32 through `.to(dtype)`. No recipe casts a router,
    nor does autocast. ValueError where options do not fit each other.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        k: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        score: str = "softmax",
        groups: int = 1,
        group_k: int | None = None,
        normalize: bool = False,
        scale: float = 1.0,
        balance_bias: bool = False,
    ):
        super().__init__()
        self.k, self.score, self.groups, self.group_k = k, score, groups, group_k
        self.normalize, self.scale = normalize, scale
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.register_buffer("e_score_correction_bias", None)
        with turbo_ops.force(router="reference"):  # options that do not fit are refused now, not at first use
            self.route(torch.empty(0, num_experts, device="meta"))
        if balance_bias:
            self.e_score_correction_bias = torch.zeros(num_experts, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight starts as an nn.Linear's, the bias at 0."""
        bound = self.weight.shape[1] ** -0.5 if self.weight.shape[1] else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def forward(self, x: Tensor, *, losses: bool = False) -> Routing | tuple[Routing, Tensor, Tensor]:
        """Routing; with losses also the balance loss and the z-loss of `turbo_ops.router_losses`."""
        logits = self.logits(x)
        routing = self.route(logits)
        return (routing, *turbo_ops.router_losses(logits, routing.experts)) if losses else routing

    def logits(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., E] fp32."""
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())

    def route(self, logits: Tensor) -> Routing:
        """logits [..., E] -> Routing."""
        return turbo_ops.router(
            logits,
            self.k,
            score=self.score,
            bias=self.e_score_correction_bias,
            groups=self.groups,
            group_k=self.group_k,
            normalize=self.normalize,
            scale=self.scale,
        )

    def count(self, experts: Tensor) -> Tensor:
        """experts [..., k] -> how many choices each expert got, [E] int64."""
        chosen = experts.reshape(-1)
        counts = torch.zeros(len(self.weight), dtype=torch.int64, device=experts.device)
        return counts.index_add_(0, chosen, torch.ones_like(chosen))

    @torch.no_grad()
    def update_bias(self, counts: Tensor, rate: float = 1e-3) -> None:
        """After a step, raise the bias of experts that got fewer choices than the mean, lower the others'.

        By rate * sign(mean - count), Algorithm 1 of arXiv 2408.15664. counts [E]: of the whole batch, `count`
        summed over micro-batches and ranks. ValueError for counts of another shape, and without a bias.
        """
        if self.e_score_correction_bias is None:
            raise ValueError("Router.update_bias: there is no bias: build it with balance_bias=True")
        if counts.shape != self.e_score_correction_bias.shape:
            wanted = tuple(self.e_score_correction_bias.shape)
            raise ValueError(f"Router.update_bias: counts {tuple(counts.shape)}: give {wanted}, see count()")
        counts = counts.to(self.e_score_correction_bias.device)
        self.e_score_correction_bias += rate * (counts.sum() - len(counts) * counts).sign()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != bias.dtype:
            # near 0.5 a step of 1e-3 is less than half of what bf16 can tell apart
            self.e_score_correction_bias = bias.to(moved.device)
        return self

    def extra_repr(self) -> str:
        experts, width = self.weight.shape
        options = {
            name: getattr(self, name) for name in ("k", "score", "groups", "group_k", "normalize", "scale")
        }
        options["balance_bias"] = self.e_score_correction_bias is not None
        return ", ".join([f"{width}, {experts}", *(f"{name}={value}" for name, value in options.items())])
