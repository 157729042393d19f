"""Grouped linear layers beside a loop over experts in fp64."""

import pytest
import torch
from numerics import snr_db
from torch import Tensor

import turbo_ops
from turbo_ops import grouped_linear

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = {
    "skewed": [3, 60, 1, 20],
    "empty-first": [0, 5, 9],
    "empty-middle": [7, 0, 9],
    "empty-last": [7, 9, 0],
    "one-has-all": [0, 30, 0, 0],
    "one": [30],
    "no-token": [0, 0],
    "one-token": [0, 1, 0],
}
IN, OUT = 24, 40


def draw(sizes: list[int], behind: int, dtype: torch.dtype, device: torch.device) -> tuple[list, Tensor]:
    shapes = (sum(sizes) + behind, IN), (len(sizes), OUT, IN), (len(sizes), OUT)
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    return leaves, torch.tensor(sizes, device=device).cumsum(0)


def loop(x: Tensor, weight: Tensor, bias: Tensor, sizes: list[int]) -> Tensor:
    """Every expert on its own; rows behind are zero."""
    parts = x.split([*sizes, len(x) - sum(sizes)])
    made = [part @ w.t() + b for part, w, b in zip(parts, weight, bias, strict=False)]
    return torch.cat([*made, torch.zeros_like(parts[-1][:, :1]).expand(-1, OUT)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("behind", [0, 5])
@pytest.mark.parametrize("name", SIZES)
def test_it_is_a_loop(name: str, behind: int, dtype: torch.dtype, device: torch.device) -> None:
    sizes = SIZES[name]
    leaves, ends = draw(sizes, behind, dtype, device)
    grad = torch.randn(len(leaves[0]), OUT, device=device).to(dtype)
    with torch.no_grad():
        leaves[0][sum(sizes) :], grad[sum(sizes) :] = torch.nan, torch.nan  # of no group: not to be read
    y = grouped_linear(leaves[0], leaves[1], ends, leaves[2])
    actual = [y, *torch.autograd.grad(y, leaves, grad)]
    wide = [leaf.detach().double().nan_to_num().requires_grad_() for leaf in leaves]
    expected_y = loop(*wide, sizes)
    expected = [expected_y, *torch.autograd.grad(expected_y, wide, grad.double().nan_to_num())]
    for ours, right in zip(actual, expected, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == right.shape
        if right.any():
            assert snr_db(ours, right) > (45 if dtype == torch.bfloat16 else 100)
        else:
            assert not ours.any()
    assert not y[sum(sizes) :].any()
    assert not actual[1][sum(sizes) :].any()


def test_only_what_is_needed_gets_a_gradient(device: torch.device) -> None:
    leaves, ends = draw([5, 0, 9], 0, torch.float32, device)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        for leaf, need in zip(leaves, needs, strict=True):
            leaf.requires_grad_(need).grad = None
        grouped_linear(leaves[0], leaves[1], ends, leaves[2]).sum().backward()
        assert tuple(leaf.grad is not None for leaf in leaves) == needs


def test_routed_tokens_go_there_and_back(device: torch.device) -> None:
    """Permute, one linear layer an expert, unpermute by weight: as a loop over tokens' choices."""
    x, weight = torch.randn(13, IN, device=device), torch.randn(4, OUT, IN, device=device)
    weights, experts = turbo_ops.router(torch.randn(13, 4, device=device), 2, normalize=True)
    rows, permutation = turbo_ops.moe_permute(x, experts, 4, align=8)
    y = turbo_ops.moe_unpermute(grouped_linear(rows, weight, permutation.ends), permutation, weights)
    expected = torch.einsum("tk,tkoi,ti->to", weights, weight[experts], x)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.deterministic
def test_it_repeats_itself(device: torch.device) -> None:
    leaves, ends = draw([50, 0, 301, 7], 3, torch.bfloat16, device)
    first, second = (
        torch.autograd.grad(grouped_linear(leaves[0], leaves[1], ends, leaves[2]).float().sum(), leaves)
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_it_compiles_whole(device: torch.device) -> None:
    leaves, ends = draw([5, 0, 9], 2, torch.float32, device)
    y = torch.compile(grouped_linear, fullgraph=True)(leaves[0], leaves[1], ends, leaves[2])
    actual = torch.autograd.grad(y.sum(), leaves)
    expected = torch.autograd.grad(grouped_linear(leaves[0], leaves[1], ends, leaves[2]).sum(), leaves)
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.zeros(6, 5)}, r"a \(6, 5\) and b \(2, 3, 4\) must be \[R, K\] and \[E, N, K\]"),
        ({"ends": torch.tensor([6])}, r"ends \(1,\) of torch.int64 must be \(2,\) of torch.int64"),
        ({"ends": torch.tensor([1, 6]).int()}, "of torch.int32 must be"),
        ({"bias": torch.zeros(3)}, r"bias \(3,\) must be \(2, 3\)"),
        ({"x": torch.zeros(6, 4).half()}, "a is torch.float16, b torch.float32"),
    ],
)
def test_bad_input_is_named(change: dict, says: str) -> None:
    given = {"x": torch.zeros(6, 4), "weight": torch.zeros(2, 3, 4), "ends": torch.tensor([1, 6])}
    with pytest.raises(ValueError, match=says):
        grouped_linear(**given | change)
