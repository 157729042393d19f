"""A layer binds its ops once a kind of tensors, and never runs what was bound for another kind."""

from itertools import product

import pytest
import torch
from torch import Tensor

import turbo_nn
import turbo_ops
from turbo_ops.dispatch import Op, UnsupportedError

VIEWS = {
    "contiguous": lambda base: base[:6, :32],
    "rows apart": lambda base: base[::2, :32],
    "transposed": lambda base: base[:32, :6].t(),
    "off by one": lambda base: base[:6, 1:33],
    "bf16": lambda base: base[:6, :32].bfloat16(),
    "one row more": lambda base: base[:7, :32],
    "3-D": lambda base: base[:6, :32].view(2, 3, 32),
}
GRADS = {
    "contiguous": torch.ones_like,
    "expanded": lambda y: torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape),
    "transposed": lambda y: torch.ones(y.shape[::-1], dtype=y.dtype, device=y.device).permute(
        *reversed(range(y.ndim))
    ),
}


@pytest.fixture(autouse=True)
def _unforced(device: torch.device, monkeypatch):
    """force() turns binding off, so that what it says counts: the pins come from the environment here."""
    if device.type != "cuda":
        for name in ("QUANTIZE", "GEMM"):
            monkeypatch.setenv(f"TURBO_{name}_BACKEND", "reference")
    turbo_ops.reset()
    yield
    monkeypatch.undo()
    turbo_ops.reset()


def step(x: Tensor, weight: Tensor, grad: str, recipe: str) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.to(x.dtype).requires_grad_()
    y = turbo_ops.linear(x, weight, None, turbo_nn.RECIPES[recipe])
    return [y, *torch.autograd.grad(y, (x, weight), GRADS[grad](y))]


@pytest.mark.parametrize(
    "recipe", ["bf16", "fp8_tensorwise", "fp8_rowwise_hp_wgrad", "fp8_blockwise", "mxfp8"]
)
def test_kinds_do_not_meet(recipe: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    base, weight = (torch.randn(n, 48, generator=generator).to(device) for n in (48, 16))
    weight = weight[:, :32]
    cases = list(product(VIEWS.values(), GRADS))
    alone = []
    for view, grad in cases:
        turbo_ops.reset()
        alone.append(step(view(base), weight, grad, recipe))
    turbo_ops.reset()
    for _ in range(2):  # what is bound in the first round runs in the second
        for (view, grad), expected in zip(cases, alone, strict=True):
            for actual, right in zip(step(view(base), weight, grad, recipe), expected, strict=True):
                assert torch.equal(actual, right)


def test_ops_are_bound_once(device: torch.device, monkeypatch) -> None:
    x, weight, asked = torch.randn(6, 32, device=device), torch.randn(16, 32, device=device), []
    bind = Op.bind
    monkeypatch.setattr(Op, "bind", lambda op, args: asked.append(op.name) or bind(op, args))
    for _ in range(3):
        step(x, weight, "contiguous", "fp8_blockwise")
    assert sorted(asked) == ["gemm"] * 3 + ["quantize_both"] * 3
    turbo_ops.reset()
    step(x, weight, "contiguous", "fp8_blockwise")
    assert len(asked) == 12, "reset() binds anew"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_force_overrules_what_is_bound(where: str, device: torch.device) -> None:
    x = torch.randn(6, 32, device=device, requires_grad=True)
    layer = turbo_nn.Linear(32, 16, device=device, recipe="fp8_blockwise")
    for _ in range(2):
        layer(x).sum().backward()
    y = layer(x)
    with (
        turbo_ops.force(gemm="native"),
        pytest.raises(UnsupportedError, match=r"pinned to native by force\(\)"),
    ):
        layer(x) if where == "forward" else y.sum().backward()
