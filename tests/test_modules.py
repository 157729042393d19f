"""`Linear` and `RMSNorm`, by hand and patched in: everything that PyTorch does with a module still works."""

import copy
import io
import pickle
import shutil

import pytest
import torch
from models import HIDDEN, LlamaRMSNorm, Toy, gradients, patch, reference_on_cpu, tokens
from numerics import SNR_FLOOR, snr_db
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import turbo_nn
import turbo_ops

CASTING = [name for name, recipe in turbo_nn.RECIPES.items() if recipe.casts]
every_recipe = pytest.mark.parametrize("recipe", list(turbo_nn.RECIPES))


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


def pair(recipe, device, **options) -> tuple[nn.Linear, turbo_nn.Linear]:
    """The same layer in torch and here."""
    plain = nn.Linear(96, 48, device=device, **options)
    layer = turbo_nn.Linear(96, 48, device=device, recipe=recipe, **options)
    layer.load_state_dict(plain.state_dict())
    return plain, layer


@every_recipe
def test_linear_is_a_linear(recipe: str, device: torch.device) -> None:
    plain, layer = pair(recipe, device)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    plain.load_state_dict(layer.state_dict())
    assert f"recipe={recipe}" in repr(layer)
    x = torch.randn(33, 96, device=device, requires_grad=True)
    y, expected = layer(x), plain(x)
    history = layer.amax_history
    assert torch.equal(y, turbo_ops.linear(x, layer.weight, layer.bias, turbo_nn.RECIPES[recipe], history))
    floors = {"bf16": 100.0, **dict.fromkeys(("fp8_tensorwise", "fp8_delayed"), SNR_FLOOR["e5m2"])}
    grad = torch.randn_like(y)
    actual = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    wanted = torch.autograd.grad(expected, [x, *plain.parameters()], grad)
    for value, truth in zip((y, *actual), (expected, *wanted), strict=True):
        assert snr_db(value, truth) > floors.get(recipe, SNR_FLOOR["e4m3"])
    assert (recipe == "bf16") == (snr_db(y, expected) > 60), (
        "the casts of the recipe must happen, or must not"
    )


def test_every_form_of_a_recipe(tmp_path) -> None:
    blockwise = turbo_nn.RECIPES["fp8_blockwise"]
    file = tmp_path / "policy.yaml"
    file.write_text('head: bf16\n"*": fp8_blockwise\n')
    rules = {"head": "bf16", "*": blockwise}
    forms = ("fp8_blockwise", blockwise, rules, str(file), file, turbo_nn.load_policy(file))
    for form in forms:
        assert turbo_nn.Linear(4, 4, recipe=form).recipe == blockwise
    assert turbo_nn.Linear(4, 4).recipe == turbo_nn.RECIPES["bf16"]


@pytest.mark.parametrize("recipe", ["fp8", "fp8_blockwis", {"*": "fp8"}, 8, None])
def test_an_unknown_recipe_lists_the_known(recipe) -> None:
    with pytest.raises(ValueError, match="bf16, fp8_tensorwise, fp8_delayed, fp8_rowwise"):
        turbo_nn.Linear(4, 4, recipe=recipe)
    with pytest.raises(ValueError, match="fp8_blockwise, mxfp8"):
        turbo_nn.patch(nn.Linear(4, 4), recipe)


def test_a_policy_without_a_rule_for_a_lone_layer() -> None:
    with pytest.raises(ValueError, match=r"\*"):
        turbo_nn.Linear(4, 4, recipe={"lm_head": "bf16"})


@pytest.mark.parametrize("shape", [(), (0,), (1,), (17,), (2, 3), (2, 0, 3), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise"])
def test_any_leading_shape(recipe: str, shape: tuple, device: torch.device) -> None:
    plain, layer = pair(recipe, device)
    x = torch.randn(*shape, 96, device=device, requires_grad=True)
    y = layer(x)
    assert y.shape == plain(x).shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.shape == layer.weight.shape
    strided = torch.randn(96, 5, device=device).t()
    torch.testing.assert_close(layer(strided), layer(strided.contiguous()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", CASTING)
def test_nan_shows_and_zeros_are_no_trouble(recipe: str, device: torch.device) -> None:
    layer = turbo_nn.Linear(256, 32, bias=False, device=device, recipe=recipe)
    x = torch.randn(4, 256, device=device)
    for poison in (float("nan"), float("inf")):
        bad = x.clone()
        bad[1, 3] = poison
        assert not layer(bad)[1].isfinite().any()
    x[2] = 0
    x.requires_grad_()
    y = layer(x)
    assert (y[2] == 0).all()
    grads = torch.autograd.grad(y, [x, layer.weight], torch.zeros_like(y))
    assert all((grad == 0).all() for grad in grads)


@every_recipe
def test_autocast(recipe: str, device: torch.device) -> None:
    plain, layer = pair(recipe, device)
    x = torch.randn(5, 96, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y, expected = layer(x), plain(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("recipe", CASTING)
def test_a_frozen_weight_costs_no_wgrad(recipe: str, device: torch.device) -> None:
    layer = turbo_nn.Linear(256, 32, device=device, recipe=recipe).requires_grad_(False)
    x = torch.randn(64, 256, device=device, requires_grad=True)
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        y = layer(x)
    assert (256, 64) not in saved
    assert x.shape not in saved
    y.sum().backward()
    assert layer.weight.grad is None
    assert x.grad.abs().sum() > 0


def test_rms_norm_is_an_rms_norm(device: torch.device) -> None:
    plain = nn.RMSNorm(HIDDEN, eps=1e-6, device=device)
    layer = turbo_nn.RMSNorm(HIDDEN, eps=1e-6, device=device)
    nn.init.normal_(plain.weight)
    layer.load_state_dict(plain.state_dict())
    assert isinstance(layer, nn.RMSNorm)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, HIDDEN, device=device, dtype=dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(layer.to(dtype)(x), plain.to(dtype)(x), rtol=tolerance, atol=tolerance)
    assert list(turbo_nn.RMSNorm(4, elementwise_affine=False).parameters()) == []
    with pytest.raises(ValueError, match="dimension"):
        turbo_nn.RMSNorm((4, 4))


def test_a_fresh_gemma_norm_only_normalises() -> None:
    x = torch.randn(3, HIDDEN)
    layer = turbo_nn.RMSNorm(HIDDEN, eps=1e-6, offset=1.0)
    torch.testing.assert_close(layer(x), turbo_ops.rms_norm(x, None, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_default_eps_is_torchs(dtype: torch.dtype, device: torch.device) -> None:
    x = (1e-3 * torch.randn(4, HIDDEN, device=device)).to(dtype)
    plain, layer = (cls(HIDDEN, device=device, dtype=dtype) for cls in (nn.RMSNorm, turbo_nn.RMSNorm))
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-2, atol=1e-5)


# What follows holds for a patched model.


@pytest.fixture(params=["fp8_tensorwise", "fp8_blockwise", "fp8_rowwise_hp_wgrad"])
def recipe(request) -> str:
    return request.param


@pytest.fixture
def toy(device: torch.device) -> Toy:
    return Toy().to(device)


def outputs(model: nn.Module, device: torch.device) -> Tensor:
    with torch.no_grad():
        return model(tokens(device))


def test_state_dict_goes_both_ways(toy: Toy, recipe: str, device: torch.device) -> None:
    before = toy.state_dict()
    patch(toy, recipe)
    after = toy.state_dict()
    assert list(before) == list(after)
    assert all(before[key].data_ptr() == after[key].data_ptr() for key in before)
    assert before._metadata == after._metadata
    fresh = Toy().to(device)
    fresh.load_state_dict(after)
    patch(fresh, recipe)
    assert torch.equal(outputs(fresh, device), outputs(toy, device))
    toy.load_state_dict(Toy().state_dict())


def revived(model: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_patched_and_can_be_unpatched(toy: Toy, how: str, recipe: str, device) -> None:
    plain = outputs(toy, device)
    patch(toy, recipe)
    twin = revived(toy, how)
    assert torch.equal(outputs(twin, device), outputs(toy, device))
    assert not torch.equal(outputs(twin, device), plain)
    turbo_nn.unpatch(twin)
    assert torch.equal(outputs(twin, device), plain)
    assert type(twin.head) is nn.Linear
    assert type(twin.layers[0].norm) is LlamaRMSNorm
    assert isinstance(toy.head, turbo_nn.Linear), "the original stays patched"


def test_hooks_training_and_attributes_stay(toy: Toy, device: torch.device) -> None:
    calls = []
    toy.head.register_forward_hook(lambda *_: calls.append("forward"))
    toy.head.register_full_backward_hook(lambda *_: calls.append("backward"))
    toy.layers[0].norm.register_forward_pre_hook(lambda *_: calls.append("norm"))
    toy.head.eval().note = "mine"
    patch(toy)
    assert calls == [], "a probe does not run hooks"
    assert toy.training
    assert not toy.head.training
    assert toy.head.note == "mine"
    toy(tokens(device)).sum().backward()
    assert calls == ["norm", "forward", "backward"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(toy: Toy, reentrant: bool, recipe: str, device: torch.device) -> None:
    patch(toy, recipe)
    ids = tokens(device)
    expected = gradients(toy, ids)
    for layer in toy.layers:
        run = layer.forward
        layer.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=reentrant)
    loss = toy(ids).float().square().mean()
    loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(toy.parameters(), expected, strict=True))


def test_meta_device(device: torch.device) -> None:
    with torch.device("meta"):
        model = Toy()
    report = patch(model)
    assert len(report.patched) == 8
    assert model(tokens("meta")).shape == (2, 12, 128)
    assert all(p.is_meta for p in model.parameters())
    model.load_state_dict(Toy().to(device).state_dict(), assign=True)
    assert outputs(model, device).isfinite().all()
    turbo_nn.unpatch(model)
    assert type(model.head) is nn.Linear


BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no g++")),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_in_one_graph(toy: Toy, backend: str, device: torch.device) -> None:
    patch(toy)
    ids = tokens(device)
    torch._dynamo.reset()
    compiled = torch.compile(toy, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(ids), toy(ids), rtol=1e-3, atol=1e-3)
    expected = gradients(toy, ids)
    for actual, wanted in zip(gradients(compiled, ids), expected, strict=True):
        assert snr_db(actual, wanted) > 25, "a rounding that flips in FP8 is 1/16 of a value"


def test_inference_changes_nothing(toy: Toy, recipe: str, device: torch.device) -> None:
    patch(toy, recipe)
    state = {key: value.clone() for key, value in toy.state_dict().items()}
    keys = [set(vars(module)) for module in toy.modules()]
    ids = tokens(device)
    expected = outputs(toy, device)
    toy.eval()
    with torch.inference_mode():
        assert torch.equal(toy(ids), expected)
        assert toy(ids[:1, :1]).shape == (1, 1, 128)
    assert all(torch.equal(value, state[key]) for key, value in toy.state_dict().items())
    assert [set(vars(module)) for module in toy.modules()] == keys
    gradients(toy.train(), ids)


def test_training_goes_down_with_fp8(toy: Toy, recipe: str, device: torch.device) -> None:
    patch(toy, recipe)
    ids = tokens(device)
    optimizer = torch.optim.AdamW(toy.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(toy(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
