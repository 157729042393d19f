"""Blocks of experts as older models and remote code have them: a list of gated MLPs and a loop over it."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

HIDDEN, INNER, EXPERTS, K = 32, 24, 6, 2


class Expert(nn.Module):
    def __init__(self, inner: int = INNER, names=("gate_proj", "up_proj", "down_proj"), bias: bool = False):
        super().__init__()
        self.names = names
        for name, width, out in zip(names, (HIDDEN, HIDDEN, inner), (inner, inner, HIDDEN), strict=True):
            self.add_module(name, nn.Linear(width, out, bias=bias))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class FusedExpert(nn.Module):
    """gate and up in one layer, up first where a model says so."""

    def __init__(self, up_first: bool = False):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)
        self.order = -1 if up_first else 1

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)[:: self.order]
        return self.down_proj(F.silu(gate) * up)


def loop(experts: nn.ModuleList, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """The sum over each token's experts, one expert after the other; one without tokens is not called."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = torch.where(index == number)
        if len(token):
            part = expert(x[token]) * weights[token, place, None]
            y.index_add_(0, token, part.to(y.dtype))
    return y


class MixtralBlock(nn.Module):
    normalize = True

    def __init__(self, expert=lambda: Expert(names=("w1", "w3", "w2")), jitter: float = 0.0):
        super().__init__()
        self.num_experts, self.top_k, self.jitter_noise = EXPERTS, K, jitter
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([expert() for _ in range(EXPERTS)])

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x)
        weights, index = F.softmax(logits.float(), -1).topk(self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(x.dtype), index

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden_states.shape
        if self.training and self.jitter_noise:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(0.9, 1.1)
        x = hidden_states.view(-1, width)
        logits, weights, index = self.routed(x)
        y = loop(self.experts, x, weights, index)
        return y.reshape(batch, length, width), logits


class QwenBlock(MixtralBlock):
    """Qwen3-MoE; with a shared expert Qwen2-MoE's; OLMoE's are not normalised."""

    def __init__(self, norm_topk_prob: bool = True, shared: bool = False):
        super().__init__(Expert)
        self.normalize = self.norm_topk_prob = norm_topk_prob
        if shared:
            self.shared_expert = Expert(40)
            self.shared_expert_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        y, logits = super().forward(hidden_states)
        if hasattr(self, "shared_expert"):
            x = hidden_states.view(-1, HIDDEN)
            y = y + (torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)).view_as(y)
        return y, logits


class JambaBlock(nn.Module):
    """A `router` whose softmax is not normalised."""

    def __init__(self):
        super().__init__()
        self.top_k, self.router = K, nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.view(-1, HIDDEN)
        logits = self.router(x)
        weights, index = torch.topk(logits.softmax(-1, dtype=torch.float), self.top_k, -1)
        return loop(self.experts, x, weights.to(x.dtype), index).view_as(hidden_states), logits


class SigmoidBlock(nn.Module):
    """Scores by sigmoid, scaled; the result alone is returned. Experts with biases."""

    def __init__(self):
        super().__init__()
        self.num_experts_per_tok, self.routed_scaling_factor = 3, 1.5
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList([Expert(bias=True) for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        weights, index = self.gate(rows).float().sigmoid().topk(self.num_experts_per_tok)
        weights = weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor
        return loop(self.experts, rows, weights.to(x.dtype), index).view_as(x)


class AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype = loss.dtype
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(1, dtype=ctx.dtype, device=grad.device)


class MoEGate(nn.Module):
    """DeepSeek-V2's: indices, weights, and in training a loss."""

    def __init__(self, alpha: float):
        super().__init__()
        self.top_k, self.alpha, self.gating_dim = K, alpha, HIDDEN
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        _, _, width = hidden_states.shape
        assert width == self.gating_dim
        scores = F.linear(hidden_states.reshape(-1, width).float(), self.weight.float()).softmax(-1)
        weights, index = scores.topk(self.top_k, sorted=False)
        loss = None
        if self.training and self.alpha:
            share = F.one_hot(index.flatten(), EXPERTS).float().mean(0)
            loss = (share * EXPERTS * scores.mean(0)).sum() * self.alpha
        return index, weights, loss


class DeepseekV2Block(nn.Module):
    def __init__(self, alpha: float = 0.1):
        super().__init__()
        self.num_experts_per_tok = K
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.gate = MoEGate(alpha)
        self.shared_experts = Expert(48)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, HIDDEN)
        index, weights, loss = self.gate(hidden_states)
        if self.training:
            repeated = x.repeat_interleave(self.num_experts_per_tok, 0)
            y, flat = torch.empty_like(repeated), index.view(-1)
            for number, expert in enumerate(self.experts):
                y[flat == number] = expert(repeated[flat == number]).to(y.dtype)
            y = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)
            y = y.to(x.dtype).view_as(hidden_states)
            y = y if loss is None else AddAuxiliaryLoss.apply(y, loss)
        else:
            with torch.no_grad():
                y = loop(self.experts, x, weights, index).view_as(hidden_states)
        return y + self.shared_experts(hidden_states)


class TopkRouter(nn.Module):
    """DeepSeek-V3's: groups, a bias that decides, sigmoid, scaled."""

    def __init__(self):
        super().__init__()
        self.top_k, self.n_group, self.topk_group, self.routed_scaling_factor = K, 3, 2, 2.5
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5)
        self.register_buffer("e_score_correction_bias", 0.1 * torch.randn(EXPERTS))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.view(-1, HIDDEN)
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        grouped = choice.view(len(x), self.n_group, -1)
        best = grouped.topk(2, -1).values.sum(-1).topk(self.topk_group, -1).indices
        mask = torch.zeros(len(x), self.n_group).to(x.device).scatter_(1, best, 1.0).bool()
        index = grouped.masked_fill(~mask[:, :, None], 0.0).flatten(1).topk(self.top_k, -1).indices
        weights = scores.gather(1, index)
        return index, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor


class DeepseekV3Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.gate, self.shared_experts = TopkRouter(), Expert(48)

    def forward(self, hidden_states: Tensor) -> Tensor:
        index, weights = self.gate(hidden_states)
        y = loop(self.experts, hidden_states.view(-1, HIDDEN), weights, index).view_as(hidden_states)
        return y + self.shared_experts(hidden_states)


BLOCKS = {
    "mixtral": MixtralBlock,
    "fused": lambda: MixtralBlock(FusedExpert),
    "up first": lambda: MixtralBlock(lambda: FusedExpert(up_first=True)),
    "qwen2": lambda: QwenBlock(False, shared=True),
    "qwen3": QwenBlock,
    "olmoe": lambda: QwenBlock(False),
    "jamba": JambaBlock,
    "sigmoid": SigmoidBlock,
    "deepseek v2": DeepseekV2Block,
    "deepseek v3": DeepseekV3Block,
}
