"""A mixture of experts: a router, its experts, and the shared expert for all tokens."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from turbo_nn.experts import Experts
from turbo_nn.gated_mlp import GatedMLP
from turbo_nn.recipes import RecipeLike
from turbo_nn.router import Router

SHARED, SHARED_GATE = ("shared_expert", "shared_experts"), "shared_expert_gate"


class MoE(nn.Module):
    """x [..., H] -> [..., H]: for each token k of the experts, by a router, and the shared expert.

    router: a `Router`, given the options that are left. experts: `Experts` of intermediate_size. shared_size:
    of shared_expert, a `GatedMLP` for all tokens; 0: none. shared_gate: times the sigmoid of a linear layer's
    one output (Qwen2-MoE). recipe: of experts and shared expert; the router stays in fp32. With losses=True
    forward gives (y, balance, z) of `turbo_ops.router_losses`, to be added to the loss, each times a factor.
    ValueError for an unknown activation or recipe, and for options that do not fit each other.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        k: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "silu",
        shared_size: int = 0,
        shared_gate: bool = False,
        recipe: RecipeLike = "bf16",
        **routing: Any,
    ):
        super().__init__()
        if shared_gate and not shared_size:
            raise ValueError("MoE: shared_gate=True with shared_size=0: there is no shared expert to gate")
        place: Any = {"device": device, "dtype": dtype}
        self.router = Router(hidden_size, num_experts, k, **place, **routing)
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, activation, **place, recipe=recipe
        )
        if shared_size:
            self.shared_expert = GatedMLP(hidden_size, shared_size, activation, **place, recipe=recipe)
        if shared_gate:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False, **place)

    def forward(self, x: Tensor, *, losses: bool = False) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        rows = rows_of(x)
        routed = self.router(rows, losses=losses)
        routing, *extra = routed if losses else (routed,)
        y = self.experts(rows, routing.experts, routing.weights)
        y = with_shared(self, rows, y).view(x.shape)
        return (y, *extra) if losses else y


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def with_shared(block: nn.Module, rows: Tensor, y: Tensor) -> Tensor:
    """y, and what the shared expert that the block may have adds."""
    name, gate = shared_of(block), block._modules.get(SHARED_GATE)
    if name is None:
        return y
    shared = getattr(block, name)(rows)
    return y + (shared if gate is None else F.sigmoid(gate(rows)) * shared)


def shared_of(block: nn.Module) -> str | None:
    """The name of the block's shared expert."""
    return next((name for name in SHARED if block._modules.get(name) is not None), None)
