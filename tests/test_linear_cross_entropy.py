"""`linear_cross_entropy` against torch in fp64: values, gradients, what is never in memory."""

import sys

import pytest
import torch
from numerics import SNR_FLOOR, snr_db
from torch import Tensor
from torch.nn import functional

import turbo_nn
import turbo_ops
from turbo_ops import linear_cross_entropy

T, D, V = 37, 24, 50


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    pins = {} if device.type == "cuda" else dict.fromkeys(("quantize", "gemm", "cross_entropy"), "reference")
    with turbo_ops.force(**pins):
        yield


def draw(device: torch.device, dtype=torch.float32, needs=(True, True, True)) -> tuple[list[Tensor], Tensor]:
    """hidden, weight, bias, and labels of which some are ignored."""
    sizes = (T, D), (V, D), (V,)
    leaves = [torch.randn(s).to(device, dtype).requires_grad_(n) for s, n in zip(sizes, needs, strict=True)]
    labels = torch.randint(V, (T,), device=device)
    labels[::5] = -100
    return leaves, labels


def outcome(function, leaves: list[Tensor], factor: float = 1.0) -> list[Tensor]:
    loss = function(*leaves)
    total = (
        loss * torch.linspace(0.5, 1.5, loss.numel(), device=loss.device).view(loss.shape)
    ).sum() * factor
    return [loss, *torch.autograd.grad(total, [leaf for leaf in leaves if leaf.requires_grad])]


def truth(leaves: list[Tensor], labels: Tensor, *, softcap=0.0, z_loss=0.0, divisor=None, **options):
    def function(hidden, weight, bias):
        z = hidden @ weight.t() + bias
        z = softcap * torch.tanh(z / softcap) if softcap else z
        extra = z_loss * z.logsumexp(1).square() * (labels != -100)
        reduction = options.get("reduction", "mean")
        loss = functional.cross_entropy(z, labels, **options)
        if divisor is not None:
            loss = functional.cross_entropy(z, labels, **options | {"reduction": "sum"}) / divisor
        kept = divisor or (labels != -100).sum()
        return loss + {"none": extra, "sum": extra.sum(), "mean": extra.sum() / kept}[reduction]

    doubles = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    return outcome(function, doubles)


OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "divisor": {"divisor": 12.0},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "capped": {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "none"},
}


@pytest.mark.parametrize("chunk", [None, 8, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_torch(name: str, chunk: int | None, device: torch.device) -> None:
    leaves, labels = draw(device)
    actual = outcome(
        lambda h, w, b: linear_cross_entropy(h, w, labels, b, chunk=chunk, **OPTIONS[name]), leaves
    )
    for ours, right in zip(actual, truth(leaves, labels, **OPTIONS[name]), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_parts_get_no_gradient(needs: tuple, reduction: str, device: torch.device) -> None:
    leaves, labels = draw(device, needs=needs)
    actual = outcome(lambda h, w, b: linear_cross_entropy(h, w, labels, b, reduction=reduction), leaves)
    expected = truth(leaves, labels, reduction=reduction)
    assert len(actual) == len(expected) == 2
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", [name for name in turbo_nn.RECIPES if name != "fp8_delayed"])
def test_recipes(recipe: str, device: torch.device) -> None:
    leaves, labels = draw(device, torch.bfloat16)
    casts = turbo_nn.RECIPES[recipe]
    actual = outcome(lambda h, w, b: linear_cross_entropy(h, w, labels, b, casts, chunk=16), leaves)
    floor = SNR_FLOOR["e5m2"] - 3 if casts.casts else 30.0
    for ours, right in zip(actual, truth(leaves, labels), strict=True):
        assert snr_db(ours, right) >= floor


def test_autocast_keeps_fp32_weights(device: torch.device) -> None:
    leaves, labels = draw(device)
    with torch.autocast(device.type, torch.bfloat16):
        actual = outcome(lambda h, w, b: linear_cross_entropy(h, w, labels, b), leaves)
    for ours, right in zip(actual, truth(leaves, labels), strict=True):
        assert ours.dtype == torch.float32
        assert snr_db(ours, right) > 30


def test_the_ends(device: torch.device) -> None:
    """All ignored is NaN as in torch, no token too; under "sum" both are 0, and so are their gradients."""
    (hidden, weight, _), labels = draw(device)
    for rows in (T, 0):
        ignored = torch.full_like(labels[:rows], -100)
        assert linear_cross_entropy(hidden[:rows], weight, ignored).isnan()
        loss = linear_cross_entropy(hidden[:rows], weight, ignored, reduction="sum")
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, weight)[0].any()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


def test_logits_are_never_whole(device: torch.device, monkeypatch) -> None:
    module = sys.modules["turbo_ops.linear_cross_entropy"]
    seen, matmul = [], module.matmul
    monkeypatch.setattr(
        module, "matmul", lambda *args, **options: seen.append(r := matmul(*args, **options)) or r
    )
    leaves, labels = draw(device)
    linear_cross_entropy(leaves[0], leaves[1], labels, chunk=8).backward()
    assert max(made.shape[0] for made in seen if made.shape[1] == V) == 8


def test_a_second_backward_needs_a_kept_graph(device: torch.device) -> None:
    leaves, labels = draw(device)
    loss = linear_cross_entropy(leaves[0], leaves[1], labels)
    first = torch.autograd.grad(loss, leaves[:2], retain_graph=True)
    second = torch.autograd.grad(2 * loss, leaves[:2])
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(other, 2 * one)
    with pytest.raises(RuntimeError, match="a second backward needs retain_graph in the first"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": torch.zeros(T)}, r"labels \(37,\) of torch.float32 must be \(37,\) of torch.int64"),
        ({"weight": torch.zeros(V, D + 1)}, r"must be \[..., D\] and \[V, D\]"),
        ({"weight": torch.zeros(V, D).half()}, "dtypes differ"),
        ({"bias": torch.zeros(3)}, r"bias \(3,\) must be \(50,\)"),
        ({"reduction": "max"}, "reduction='max': use one of mean, sum, none"),
        ({"reduction": "sum", "divisor": 3.0}, "divisor=3.0 with reduction='sum'"),
        ({"divisor": -1}, "divisor=-1: give a positive number"),
        ({"divisor": [6]}, r"divisor=\[6\]: give a positive number"),
        ({"divisor": torch.ones(2)}, r"divisor \(2,\), requires_grad=False: give one number"),
        ({"softcap": float("nan")}, "softcap=nan: use a finite number"),
        ({"softcap": None}, "softcap=None: use a finite number"),
        ({"z_loss": -1.0}, "z_loss=-1.0: use a finite number"),
        ({"chunk": 2.5}, "chunk=2.5: use a whole number"),
        ({"ignore_index": None}, "ignore_index=None: use a whole number"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"chunk": 0}, "chunk=0"),
        ({"recipe": "fp8_blockwise"}, "recipe='fp8_blockwise': give a Recipe"),
        ({"weight": torch.zeros(0, D)}, r"weight \(0, "),
        ({"accumulate": torch.float64}, "accumulate=torch.float64: use torch.float32 or"),
        ({"recipe": turbo_nn.RECIPES["fp8_delayed"]}, "amax history"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_bad_input_is_named(change: dict, says: str) -> None:
    given = {"hidden": torch.zeros(T, D), "weight": torch.zeros(V, D), "labels": torch.zeros(T).long()}
    with pytest.raises(ValueError, match=says):
        linear_cross_entropy(**given | change)


def test_bad_options_of_the_module_are_named_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing=1.5: use a number from 0 to below 1"):
        turbo_nn.LinearCrossEntropy(D, V, label_smoothing=1.5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logits": torch.zeros(3)}, r"logits must be \[T, V\]"),
        ({"labels": torch.zeros(2).long()}, r"labels must be \(3,\) of torch.int64, are \(2,\)"),
        ({"row_scale": torch.ones(3).double()}, r"row_scale must be \(3,\) of fp32"),
        ({"softcap": -1.0}, "softcap=-1.0: use a finite number"),
    ],
)
def test_bad_input_of_the_rows_is_named(change: dict, says: str) -> None:
    given = {"logits": torch.zeros(3, 5), "labels": torch.zeros(3).long()}
    with pytest.raises(ValueError, match=says):
        turbo_ops.cross_entropy_(**given | change)


def test_a_label_that_is_no_class_is_nan(device: torch.device) -> None:
    (hidden, weight, _), labels = draw(device)
    labels[1] = V
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert losses[1].isnan()
    assert losses.isnan().sum() == 1


def test_compiles_whole(device: torch.device) -> None:
    leaves, labels = draw(device)
    function = lambda h, w, b: linear_cross_entropy(h, w, labels, b, chunk=16)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for ours, right in zip(outcome(compiled, leaves), outcome(function, leaves), strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rowwise", "fp8_delayed"])
def test_the_module_is_a_head_with_its_loss(recipe: str, device: torch.device) -> None:
    (hidden, weight, bias), labels = draw(device)
    options = {"softcap": 2.0, "z_loss": 1e-3, "label_smoothing": 0.1, "chunk": 16}
    layer = turbo_nn.LinearCrossEntropy(D, V, device=device, recipe=recipe, **options)
    layer.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
    ours = layer(hidden, labels)
    how = turbo_nn.RECIPES[recipe].by_own_amax
    assert ours.equal(linear_cross_entropy(hidden, layer.weight, labels, layer.bias, how, **options))
    ours.backward()
    assert layer.weight.grad.abs().sum() > 0
    logits = layer(hidden)
    assert logits.shape == (*hidden.shape[:-1], V)
    assert logits.abs().max() <= 2.0
    assert "softcap=2.0" in repr(layer)
    assert list(layer.state_dict()) == list(torch.nn.Linear(D, V).state_dict())


def test_many_chunks_lose_nothing(device: torch.device) -> None:
    """Hundreds of bf16 sums of one sign: each adds less than half of what bf16 can tell apart."""
    tokens, width, classes = 1024, 16, 8
    hidden = (1 + torch.rand(tokens, width, device=device)).bfloat16().requires_grad_()
    weight = torch.zeros(classes, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)

    def wgrad(**options) -> Tensor:
        loss = linear_cross_entropy(hidden, weight, labels, reduction="sum", **options)
        return torch.autograd.grad(loss, weight)[0]

    exact = wgrad(chunk=tokens)
    assert snr_db(wgrad(chunk=1), exact) > 50
    assert snr_db(wgrad(chunk=tokens // 8), exact) > 45
    assert snr_db(wgrad(chunk=1, accumulate=torch.bfloat16), exact) < 30, "or the test shows nothing"


def test_sums_beyond_fp16_are_divided_first(device: torch.device) -> None:
    hidden = torch.full((4096, 8), 60.0, device=device, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(4, 8, device=device, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64, device=device)
    linear_cross_entropy(hidden, weight, labels, chunk=512).backward()
    torch.testing.assert_close(weight.grad[0], torch.full((8,), -45.0, device=device).half())


def test_where_nothing_counts_gradients_are_zero(device: torch.device) -> None:
    """As torch's: the loss is NaN, and an optimizer that steps all the same breaks nothing."""
    (hidden, weight, bias), labels = draw(device)
    labels.fill_(-100)
    loss = linear_cross_entropy(hidden, weight, labels, bias)
    assert loss.isnan()
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (hidden, weight, bias)))
