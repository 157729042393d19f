"""`GroupedLinear`: a linear layer for each expert, over rows in the experts' order."""

import copy
import pickle

import pytest
import torch
from models import reference_on_cpu
from numerics import SNR_FLOOR, snr_db
from torch import Tensor, nn

import turbo_nn
import turbo_ops

EXPERTS, WIDTH, OUT = 4, 48, 32
FREE = [name for name in turbo_nn.RECIPES if name not in ("fp8_delayed", "mxfp8")]


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    pins = {} if device.type == "cuda" else {"grouped_gemm": "reference", "moe_permute": "reference"}
    with reference_on_cpu(device), turbo_ops.force(**pins):
        yield


def pair(device: torch.device, **options) -> tuple[list[nn.Linear], turbo_nn.GroupedLinear]:
    """The same layers in torch and here."""
    bias = options.get("bias", True)
    plain = [nn.Linear(WIDTH, OUT, bias=bias, device=device) for _ in range(EXPERTS)]
    layer = turbo_nn.GroupedLinear(EXPERTS, WIDTH, OUT, device=device, **options)
    names = ["weight", "bias"] if bias else ["weight"]
    layer.load_state_dict({name: torch.stack([getattr(one, name) for one in plain]) for name in names})
    return plain, layer


def rows_and_ends(device: torch.device, align: int = 1) -> tuple[Tensor, Tensor]:
    """21 rows for three of the experts, and rows of no expert behind them."""
    counts = torch.tensor([5, 0, 13, 3], device=device)
    ends = ((counts + align - 1) // align * align).cumsum(0)
    return torch.randn(int(ends[-1]) + 7, WIDTH, device=device), ends


def looped(layers: list[nn.Linear], x: Tensor, ends: Tensor) -> Tensor:
    parts, first = [], 0
    for layer, end in zip(layers, ends.tolist(), strict=True):
        parts.append(layer(x[first:end]))
        first = end
    return torch.cat([*parts, x.new_zeros(len(x) - first, OUT)])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", FREE)
def test_each_expert_is_a_linear(recipe: str, bias: bool, device: torch.device) -> None:
    plain, layer = pair(device, bias=bias, recipe=recipe)
    align = 1 if recipe == "bf16" else 128
    x, ends = rows_and_ends(device, align)
    x.requires_grad_()
    y, expected = layer(x, ends, align), looped(plain, x, ends)
    grad = torch.randn_like(y)
    actual = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    wanted = torch.autograd.grad(expected, [x, *(p for one in plain for p in one.parameters())], grad)
    names = [name for name, _ in layer.named_parameters()]
    stacked = [torch.stack(wanted[1 + index :: len(names)]) for index in range(len(names))]
    floor = {"bf16": 100.0, "fp8_tensorwise": SNR_FLOOR["e5m2"]}.get(recipe, SNR_FLOOR["e4m3"])
    for value, truth in zip((y, *actual), (expected, wanted[0], *stacked), strict=True):
        assert snr_db(value, truth) > floor
    assert (recipe == "bf16") == (snr_db(y, expected) > 60), "the casts must happen, or must not"
    assert (actual[1][1] == 0).all(), "an expert without rows has a gradient, and it is zero"


def test_experts_start_as_linears_do() -> None:
    layer = turbo_nn.GroupedLinear(64, 100, 50)
    bound = 100**-0.5
    for parameter in layer.parameters():
        assert 0.95 * bound < parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    before = layer.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before)
    assert "num_experts=64, in_features=100, out_features=50, bias=True, recipe=bf16" in repr(layer)


def test_copies(device: torch.device) -> None:
    _, layer = pair(device, recipe="bf16")
    x, ends = rows_and_ends(device)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, ends), layer(x, ends))
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert list(turbo_nn.GroupedLinear(2, 4, 4, bias=False).state_dict()) == ["weight"]


def test_what_it_refuses(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"fp8_delayed: a recipe with a history .* use fp8_tensorwise"):
        turbo_nn.GroupedLinear(2, 4, 4, recipe="fp8_delayed")
    with pytest.raises(ValueError, match="unknown recipe 'fp8'"):
        turbo_nn.GroupedLinear(2, 4, 4, recipe="fp8")
    layer = turbo_nn.GroupedLinear(2, 4, 4, device=device)
    with pytest.raises(ValueError, match="ends"):
        layer(torch.randn(3, 4, device=device), torch.tensor([3], device=device))
    with pytest.raises(ValueError, match=r"\(3, 5\)"):
        layer(torch.randn(3, 5, device=device), torch.tensor([1, 3], device=device))
