"""A head and its loss in one module: in training its logits are never whole in memory."""

from typing import Any

import torch
from torch import Tensor

import turbo_ops
from turbo_nn.linear import Linear

OPTIONS = ("reduction", "ignore_index", "label_smoothing", "z_loss", "softcap", "chunk")


class LinearCrossEntropy(Linear):
    """hidden [..., D], labels [...] int64 -> cross-entropy of hidden @ weight.T + bias: scalar, or [...].

    A `turbo_nn.Linear` in its parameters and its recipe; without labels it is one, and gives the logits
    [..., V], capped where softcap says so. Options: those of `turbo_ops.linear_cross_entropy` in `OPTIONS`,
    and its ValueError where one does not fit.
    """

    def __init__(self, in_features: int, out_features: int, *args: Any, **keywords: Any):
        options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
        super().__init__(in_features, out_features, *args, **keywords)
        nothing = torch.zeros(0, 1, device="cpu")  # a loss of no token: what is wrong is said now
        labels = torch.zeros(0, dtype=torch.int64, device="cpu")
        turbo_ops.linear_cross_entropy(nothing, nothing.new_zeros(1, 1), labels, **options)
        self.options = options

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            return turbo_ops.linear_cross_entropy(
                hidden, self.weight, labels, self.bias, self.recipe.by_own_amax, **self.options
            )
        logits, softcap = super().forward(hidden), self.options.get("softcap", 0.0)
        return softcap * (logits / softcap).tanh() if softcap else logits

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *(f"{k}={v!r}" for k, v in self.options.items())])
