"""Tokens to their experts and back, beside a loop over experts."""

import pytest
import torch
from torch import Tensor

import turbo_ops
from turbo_ops import moe_permute, moe_unpermute

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def routed(tokens: int, k: int, experts: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    chosen = (
        torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)]) if tokens else torch.zeros(0, k)
    )
    return torch.randn(tokens, 12).to(device), chosen.long().to(device), torch.rand(tokens, k).to(device)


def groups(rows: Tensor, ends: Tensor) -> list[Tensor]:
    ends = ends.tolist()
    return [rows[first:last] for first, last in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("align", [1, 16])
def test_each_expert_has_its_tokens_in_order(align: int, device: torch.device) -> None:
    x, experts, _ = routed(50, 3, 8, device)
    rows, permutation = moe_permute(x, experts, 8, align=align)
    assert permutation.ends.remainder(align).eq(0).all()
    assert len(rows) == (50 * 3 + 8 * (align - 1)) // align * align
    for expert, mine in enumerate(groups(rows, permutation.ends)):
        right = x[(experts == expert).any(1)]
        assert mine[: len(right)].equal(right)
        assert not mine[len(right) :].any(), "padding is zero"
    assert not rows[permutation.ends[-1] :].any()
    assert permutation.dropped.item() == 0


def test_there_and_back_with_gradients(device: torch.device) -> None:
    x, experts, weights = routed(40, 2, 6, device)
    scale = torch.linspace(1, 2, 6, device=device)  # what each expert multiplies its tokens with

    def ours(x: Tensor, weights: Tensor) -> Tensor:
        rows, permutation = moe_permute(x, experts, 6)
        which = torch.searchsorted(permutation.ends, torch.arange(len(rows), device=device), right=True)
        return moe_unpermute(rows * scale[which.clamp(max=5)][:, None], permutation, weights)

    def before(x: Tensor, weights: Tensor) -> Tensor:
        rows, permutation = moe_permute(x, experts, 6, weights)
        which = torch.searchsorted(permutation.ends, torch.arange(len(rows), device=device), right=True)
        return moe_unpermute(rows * scale[which.clamp(max=5)][:, None], permutation)

    def plain(x: Tensor, weights: Tensor) -> Tensor:
        return (x[:, None] * (weights * scale.to(x.dtype)[experts])[:, :, None]).sum(1)

    grad = torch.randn_like(x)
    exact = [t.double().requires_grad_() for t in (x, weights)]
    right = plain(*exact)
    expected = [right, *torch.autograd.grad(right, exact, grad.double())]
    for function in (ours, before):
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        y = function(*leaves)
        for one, other in zip([y, *torch.autograd.grad(y, leaves, grad)], expected, strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


def test_what_is_over_the_capacity_is_dropped_and_counted(device: torch.device) -> None:
    x, _, weights = routed(20, 1, 4, device)
    experts = torch.zeros(20, 1, dtype=torch.int64, device=device)
    rows, permutation = moe_permute(x.requires_grad_(), experts, 4, capacity=6)
    assert permutation.ends.tolist() == [6, 6, 6, 6]
    assert permutation.dropped.item() == 14
    y = moe_unpermute(rows, permutation, weights)
    assert not y[6:].any()
    y.sum().backward()
    assert not x.grad[6:].any()
    torch.testing.assert_close(x.grad[:6], weights[:6].expand(-1, 12))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, device: torch.device) -> None:
    x, experts, weights = routed(tokens, 2, 5, device)
    rows, permutation = moe_permute(x.requires_grad_(), experts, 5, align=4)
    y = moe_unpermute(rows, permutation, weights)
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True))
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.deterministic
def test_it_repeats_itself(device: torch.device) -> None:
    x, experts, weights = routed(300, 4, 16, device)
    runs = []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        rows, permutation = moe_permute(leaves[0], experts, 16)
        y = moe_unpermute(rows, permutation, leaves[1])
        runs.append((rows, y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"experts": torch.zeros(3, 2)},
            r"experts \(3, 2\) of torch.float32: give \(3, 'k'\) of torch.int64",
        ),
        ({"experts": torch.zeros(4, 2).long()}, r"experts \(4, 2\)"),
        ({"weights": torch.zeros(3, 1)}, r"weights \(3, 1\): give \(3, 2\), as experts"),
        ({"align": 0}, "align=0.*use 1 or more"),
        ({"capacity": -1}, "capacity=-1"),
        ({"x": torch.zeros(3, 4).double()}, "of torch.float64: give"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:9],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    given = {"x": torch.zeros(3, 4), "experts": torch.zeros(3, 2).long(), "num_experts": 5}
    with pytest.raises(ValueError, match=message):
        moe_permute(**given | change)
    rows, permutation = moe_permute(**given)
    with pytest.raises(ValueError, match=r"moe_unpermute: rows \(5, 4\) of torch.float32: give \[6, D\]"):
        moe_unpermute(rows[:5], permutation)
    with pytest.raises(ValueError, match=r"weights \(3, 1\): give \(3, 2\)"):
        moe_unpermute(rows, permutation, torch.zeros(3, 1))


def test_compiles_whole(device: torch.device) -> None:
    x, experts, weights = routed(9, 2, 4, device)

    def there_and_back(x: Tensor) -> Tensor:
        rows, permutation = turbo_ops.moe_permute(x, experts, 4)
        return turbo_ops.moe_unpermute(rows, permutation, weights)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), there_and_back(x))


def test_experts_of_other_ranks_get_no_row(device: torch.device) -> None:
    """Expert parallelism numbers them from num_experts on."""
    x = torch.randn(4, 6, device=device, requires_grad=True)
    experts = torch.tensor([[0, 9], [2, 1], [2, 2], [-1, 0]], device=device)
    rows, permutation = moe_permute(x, experts, 2)
    assert permutation.ends.tolist() == [2, 3]
    assert permutation.places.tolist() == [[0, -1], [-1, 2], [-1, -1], [-1, 1]]
    assert rows[:3].equal(x[[0, 3, 1]])
    assert not rows[3:].any()
    assert permutation.dropped.item() == 0
    rows.sum().backward()
    assert x.grad[:, 0].tolist() == [1, 1, 0, 1]
