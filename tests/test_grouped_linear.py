"""Grouped linear layers beside a loop over experts in fp64."""

import importlib

import pytest
import torch
from numerics import SNR_FLOOR, snr_db
from torch import Tensor

import turbo_nn
import turbo_ops
from turbo_ops import grouped_linear
from turbo_ops.arch import fp8_dtype
from turbo_ops.grouped_linear import recipe_problem
from turbo_ops.quantize import quantize_both_groups

grouped_linear_module = importlib.import_module("turbo_ops.grouped_linear")
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


def draw(
    sizes: list[int],
    behind: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    width: int = IN,
    out: int = OUT,
) -> tuple[list, Tensor]:
    shapes = (sum(sizes) + behind, width), (len(sizes), out, width), (len(sizes), out)
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    return leaves, torch.tensor(sizes, device=device).cumsum(0)


def loop(x: Tensor, weight: Tensor, bias: Tensor, sizes: list[int]) -> Tensor:
    """Every expert on its own; rows behind are zero."""
    parts = x.split([*sizes, len(x) - sum(sizes)])
    made = [part @ w.t() + b for part, w, b in zip(parts, weight, bias, strict=False)]
    return torch.cat([*made, torch.zeros_like(parts[-1][:, :1]).expand(-1, weight.shape[1])])


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
        ({"x": torch.zeros(6, 5)}, r"x \(6, 5\) and weight \(2, 3, 4\) must be \[R, in\] and \[E, out, in\]"),
        ({"ends": torch.tensor([6])}, r"ends \(1,\) of torch.int64 must be \[E\], \(2,\), of torch.int64"),
        ({"ends": torch.tensor([1, 6]).int()}, "of torch.int32 must be"),
        ({"bias": torch.zeros(3)}, r"bias \(3,\) must be \[E, out\], \(2, 3\)"),
        ({"x": torch.zeros(6, 4).half()}, "x torch.float16, weight torch.float32"),
    ],
)
def test_bad_input_is_named(change: dict, says: str) -> None:
    given = {"x": torch.zeros(6, 4), "weight": torch.zeros(2, 3, 4), "ends": torch.tensor([1, 6])}
    with pytest.raises(ValueError, match=says):
        grouped_linear(**given | change)


CASTING = [name for name, recipe in turbo_nn.RECIPES.items() if recipe.casts and not recipe_problem(recipe)]


def floor(name: str) -> float:
    """In dB, by the least precise type among the casts."""
    return SNR_FLOOR["e5m2" if "e5m2" in str(turbo_nn.RECIPES[name]) else "e4m3"]


@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("name", CASTING)
def test_recipes_are_near_a_loop(name: str, align: int, device: torch.device) -> None:
    sizes = [130, 0, 3, 200, 0] if align == 1 else [256, 0, 128, 0]
    leaves, ends = draw(sizes, align, torch.bfloat16, device, width=160, out=144)
    grad = torch.randn(len(leaves[0]), 144, device=device).bfloat16()
    with torch.no_grad():
        leaves[0][sum(sizes) :], grad[sum(sizes) :] = torch.nan, torch.nan
    y = grouped_linear(leaves[0], leaves[1], ends, leaves[2], turbo_nn.RECIPES[name], align=align)
    actual = [y, *torch.autograd.grad(y, leaves, grad)]
    wide = [leaf.detach().double().nan_to_num().requires_grad_() for leaf in leaves]
    right = loop(*wide, sizes)
    expected = [right, *torch.autograd.grad(right, wide, grad.double().nan_to_num())]
    for ours, theirs in zip(actual, expected, strict=True):
        assert snr_db(ours, theirs) > floor(name)
    for expert, size in enumerate(sizes):
        assert bool(actual[2][expert].any()) == bool(size)
    assert not y[sum(sizes) :].any()
    assert not actual[1][sum(sizes) :].any()


@pytest.mark.parametrize("name", CASTING)
def test_unaligned_groups_are_as_aligned_ones(name: str, device: torch.device) -> None:
    leaves, ends = draw([128, 0, 256], 128, torch.bfloat16, device)
    results = []
    for align in (1, 128):
        y = grouped_linear(leaves[0], leaves[1], ends, leaves[2], turbo_nn.RECIPES[name], align=align)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["bf16", *CASTING])
def test_a_weight_stored_the_other_way_round(name: str, device: torch.device) -> None:
    """gpt-oss keeps [E, in, out]: the same numbers, and a gradient that lies as the weight does."""
    leaves, ends = draw([128, 0, 256], 0, torch.bfloat16, device)
    stored = leaves[1].detach().transpose(1, 2).contiguous().requires_grad_()
    results = []
    for weight, leaf in ((leaves[1], leaves[1]), (stored.transpose(1, 2), stored)):
        given = [leaves[0], leaf, leaves[2]]
        y = grouped_linear(leaves[0], weight, ends, leaves[2], turbo_nn.RECIPES[name], align=128)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), given)])
    assert results[1][2].is_contiguous()
    results[1][2] = results[1][2].transpose(1, 2)
    for ours, theirs in zip(*results, strict=True):
        assert snr_db(ours, theirs) > 45


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise"])
def test_main_grad(name: str, flipped: bool, device: torch.device) -> None:
    """Megatron's convention, as of `linear`: fp32 sums, and no gradient of its own."""
    leaves, ends = draw([128, 0, 256], 0, torch.bfloat16, device)
    weight = leaves[1].detach().transpose(1, 2).contiguous().requires_grad_() if flipped else leaves[1]
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    recipe = turbo_nn.RECIPES[name]
    for _ in range(2):
        seen = weight.transpose(1, 2) if flipped else weight
        grouped_linear(leaves[0], seen, ends, None, recipe, align=128).float().sum().backward()
    assert weight.grad is None
    plain = leaves[1].detach().requires_grad_()
    y = grouped_linear(leaves[0], plain, ends, None, recipe, align=128)
    (expected,) = torch.autograd.grad(y.float().sum(), [plain])
    expected = expected.transpose(1, 2) if flipped else expected
    assert snr_db(weight.main_grad, 2 * expected.float()) > 45


@pytest.mark.parametrize("flipped", [False, True])
def test_weights_are_cast_once_a_step(
    flipped: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    leaves, ends = draw([128, 0, 256], 0, torch.bfloat16, device)
    weight = leaves[1].detach().transpose(1, 2).contiguous().requires_grad_() if flipped else leaves[1]
    made = []
    original = grouped_linear_module.cast_experts
    count = lambda *args, **kwargs: made.append(1) or original(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(grouped_linear_module, "cast_experts", count)
    for expected in (1, 2, 2, 2):  # kept from the second use on
        seen = weight.transpose(1, 2) if flipped else weight
        grouped_linear(
            leaves[0], seen, ends, None, turbo_nn.RECIPES["fp8_rowwise"], align=128
        ).sum().backward()
        assert len(made) == expected
    with torch.no_grad():
        weight.mul_(2)
    seen = weight.transpose(1, 2) if flipped else weight
    grouped_linear(leaves[0], seen, ends, None, turbo_nn.RECIPES["fp8_rowwise"], align=128)
    assert len(made) == 3


@pytest.mark.parametrize("name", ["bf16", "fp8_tensorwise", "fp8_blockwise"])
def test_what_is_not_resident_is_cast_again(name: str, device: torch.device) -> None:
    leaves, ends = draw([128, 0, 256], 0, torch.bfloat16, device)
    results = []
    for resident in (True, False):
        y = grouped_linear(
            leaves[0], leaves[1], ends, leaves[2], turbo_nn.RECIPES[name], align=128, resident=resident
        )
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp8"])
def test_recipes_without_grouped_products_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="use fp8_"):
        grouped_linear(
            torch.zeros(6, 4), torch.zeros(2, 3, 4), torch.tensor([1, 6]), None, turbo_nn.RECIPES[name]
        )


def test_autocast(device: torch.device) -> None:
    """The output in autocast's dtype, gradients in the parameters'."""
    leaves, ends = draw([3, 0, 9], 0, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        y = grouped_linear(leaves[0], leaves[1], ends, leaves[2])
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.float().sum(), leaves)
    assert {grad.dtype for grad in grads} == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensors of 5 GB")
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_more_elements_than_int32_counts(backend: str) -> None:
    """2.1e9 elements in the result, in what it is made of, and in the gradient: the last rows are right."""
    tokens, width, out = 2**19 + 200, 128, 4224
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = torch.randn(3, out, width, device="cuda").bfloat16()
    ends = torch.tensor([7, 7, tokens - 100], device="cuda")
    with turbo_ops.force(grouped_gemm=backend):
        y = turbo_ops.grouped_gemm(x, weight, ends)
        assert y.numel() > 2**31
        last = slice(tokens - 300, tokens - 100)
        assert snr_db(y[last], x[last].double() @ weight[2].double().t()) > 45
        assert not y[tokens - 100 :].any()
        back = turbo_ops.grouped_gemm(y, weight.transpose(1, 2), ends)
        assert snr_db(back[last], y[last].double() @ weight[2].double()) > 45
        grad = turbo_ops.grouped_gemm_wgrad(
            y[-2000:].t(), x[-2000:].t(), torch.tensor([0, 5, 1900], device="cuda")
        )
        assert snr_db(grad[2], y[-1995:-100].double().t() @ x[-1995:-100].double()) > 45
    del back, grad
    rows = ends // 128 * 128
    data, _scale, data_t, scale_t = quantize_both_groups(y, rows, fp8_dtype("e4m3", y.device), True)
    end = int(rows[-1])
    part = turbo_ops.quantize(y[end - 128 : end], data.dtype, 1, 0, torch.float32)
    assert torch.equal(data[end - 128 : end].view(torch.uint8), part[0].view(torch.uint8))
    assert snr_db(data_t[:, end - 128 : end].t().float() * scale_t[2, :, 0], y[end - 128 : end]) > 25
