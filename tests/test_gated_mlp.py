"""The rule for gated MLPs: what it must leave, and what it must not hide."""

import pytest
import torch
from models import patch, reference_on_cpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import turbo_nn
import turbo_ops


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


class MLP(nn.Module):
    def __init__(self, activation: nn.Module, dropout: float | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = activation
        self.drop = nn.Identity() if dropout is None else nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.drop(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def reasons(model: nn.Module) -> list[str | None]:
    return [v.reason for v in patch(model, "bf16") if v.rule == "gated_mlp"]


def test_activations_of_one_class_are_not_one() -> None:
    model = nn.Sequential(MLP(nn.GELU(approximate="tanh")), MLP(nn.GELU()))
    x = torch.randn(2, 8)
    expected = model(x)
    first, second = reasons(model)
    assert first is None
    assert "disagrees" in second
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_is_left(p: float) -> None:
    assert reasons(nn.Sequential(MLP(nn.SiLU(), p))) == ["it drops out in drop"]


def test_hooks_of_the_activation_are_called() -> None:
    seen: list[torch.Size] = []
    model, x = nn.Sequential(MLP(nn.SiLU()), MLP(nn.SiLU())), torch.randn(2, 8)
    hook = lambda module, inputs, y: seen.append(y.shape)  # noqa: E731
    model[0].act_fn.register_forward_hook(hook)
    assert reasons(model) == ["its act_fn has hooks", None]
    assert isinstance(model[1], turbo_nn.GatedMLP)
    assert not seen, "no probe runs a user's hook"
    model[1].act_fn.register_forward_hook(hook)
    model(x)
    assert seen == [(2, 16)] * 2


def test_an_activation_of_another_kind_is_the_models_own() -> None:
    model, x = nn.Sequential(MLP(nn.SiLU())), torch.randn(2, 8)
    assert reasons(model) == [None]
    model[0].act_fn = nn.ReLU()
    y = model(x)
    turbo_nn.unpatch(model)
    torch.testing.assert_close(y, model(x))


def test_shapes_alone_go_through() -> None:
    """On the meta device and under fake tensors, where no tensor has memory."""
    with turbo_ops.force(gemm="reference", swiglu="reference"):  # the interpreter copies its inputs
        x = torch.empty(2, 8, device="meta", requires_grad=True)
        assert turbo_nn.GatedMLP(8, 16, device="meta")(x).shape == (2, 8)
        with FakeTensorMode():
            assert turbo_nn.GatedMLP(8, 16)(torch.empty(2, 8, requires_grad=True)).shape == (2, 8)
