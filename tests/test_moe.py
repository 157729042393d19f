"""Router and MoE: beside plain formulas, in high precision where a router must be, balanced."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from models import patch
from numerics import snr_db
from torch import Tensor, nn

import turbo_nn
import turbo_ops
from turbo_ops.dispatch import REGISTRY

HIDDEN, INNER, EXPERTS, K = 32, 24, 6, 2
DEEPSEEK = {
    "score": "sigmoid",
    "groups": 3,
    "group_k": 2,
    "normalize": True,
    "scale": 2.5,
    "balance_bias": True,
}


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    families = {op.family for op in REGISTRY.values()} if device.type == "cpu" else ()
    with turbo_ops.force(**dict.fromkeys(families, "reference")):
        yield


def moe(device: torch.device, **options) -> turbo_nn.MoE:
    return turbo_nn.MoE(HIDDEN, INNER, EXPERTS, K, device, **options)


def plain(layer: turbo_nn.MoE, x: Tensor) -> Tensor:
    """Every expert for every token, in the dtype of x."""
    scores = F.linear(x, layer.router.weight.to(x.dtype))
    scores = scores.sigmoid() if layer.router.score == "sigmoid" else scores.softmax(-1)
    index = layer.router(x).experts
    weights = scores.gather(-1, index)
    if layer.router.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    share = torch.zeros_like(scores).scatter(-1, index, weights * layer.router.scale)
    gate, up = torch.einsum("...h,eih->...ei", x, layer.experts.gate_up_proj.to(x.dtype)).chunk(2, -1)
    y = torch.einsum("...ei,ehi->...eh", F.silu(gate) * up, layer.experts.down_proj.to(x.dtype))
    y = (y * share[..., None]).sum(-2)
    if hasattr(layer, "shared_expert"):
        mlp = layer.shared_expert
        shared = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        gated = hasattr(layer, "shared_expert_gate")
        y = y + (layer.shared_expert_gate(x).sigmoid() * shared if gated else shared)
    return y


def gradients(layer: nn.Module, x: Tensor, run) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = run(x)
    factor = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    return [
        y,
        *torch.autograd.grad((y.float() * factor).sum(), [x, *layer.parameters()], materialize_grads=True),
    ]


OPTIONS = {
    "qwen3": {"normalize": True},
    "qwen2": {"shared_size": 16, "shared_gate": True},
    "deepseek": DEEPSEEK | {"shared_size": 16},
}


@pytest.mark.parametrize("shape", [(3, 7), (5,), (1,)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_moe(options: dict, shape: tuple[int, ...], device: torch.device) -> None:
    layer, x = moe(device, **options), torch.randn(*shape, HIDDEN, device=device)
    if options.get("balance_bias"):
        layer.router.e_score_correction_bias.normal_()
    ours = gradients(layer, x, layer)
    right = gradients(layer, x, lambda x: plain(layer, x))
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_moe_of_no_token(device: torch.device) -> None:
    layer = moe(device, shared_size=16)
    found = gradients(layer, torch.zeros(2, 0, HIDDEN, device=device), layer)
    assert found[0].shape == (2, 0, HIDDEN)
    assert not any(part.any() for part in found)


def test_moe_in_bf16(device: torch.device) -> None:
    layer = moe(device, normalize=True, dtype=torch.bfloat16)
    x = torch.randn(4, 9, HIDDEN, device=device).bfloat16()
    wide = copy.deepcopy(layer).float()
    right = gradients(wide, x.float(), lambda x: plain(wide, x))
    for one, other in zip(gradients(layer, x, layer), right, strict=True):
        assert one.dtype == torch.bfloat16
        assert snr_db(one, other) > 30


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_blockwise"])
def test_moe_in_fp8(recipe: str, device: torch.device) -> None:
    layer, x = moe(device, shared_size=16, recipe=recipe), torch.randn(4, 16, HIDDEN, device=device)
    assert layer.experts.recipe == layer.shared_expert.up_proj.recipe == turbo_nn.RECIPES[recipe]
    y, right = layer(x), plain(layer, x)
    assert not torch.allclose(y, right, rtol=1e-4, atol=1e-4)
    assert snr_db(y, right) > 20


def test_moe_compiles_whole(device: torch.device) -> None:
    layer, x = moe(device, shared_size=16, **DEEPSEEK), torch.randn(5, HIDDEN, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for one, other in zip(gradients(layer, x, compiled), gradients(layer, x, layer), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.deterministic
def test_moe_repeats_itself(device: torch.device) -> None:
    layer, x = moe(device), torch.randn(200, HIDDEN, device=device)
    assert all(map(torch.equal, gradients(layer, x, layer), gradients(layer, x, layer)))


def test_losses(device: torch.device) -> None:
    layer, x = moe(device), torch.randn(4, 9, HIDDEN, device=device)
    y, balance, z = layer(x, losses=True)
    assert y.equal(layer(x))
    logits = F.linear(x, layer.router.weight).flatten(0, 1)
    share = torch.stack([(layer.router(x).experts == e).float().mean() for e in range(EXPERTS)])
    right = EXPERTS * (share * logits.softmax(-1).mean(0)).sum(), logits.exp().sum(-1).log().square().mean()
    for one, other in zip((balance, z), right, strict=True):
        torch.testing.assert_close(one, other)
        of_one, of_other = (
            torch.autograd.grad(loss, layer.router.weight, retain_graph=True)[0] for loss in (one, other)
        )
        torch.testing.assert_close(of_one, of_other, rtol=1e-4, atol=1e-6)
        assert of_one.any()


def test_a_hook_sees_the_routing(device: torch.device) -> None:
    layer, counts = moe(device), []
    layer.router.register_forward_hook(
        lambda router, x, routing: counts.append(router.count(routing.experts))
    )
    layer(torch.randn(3, 5, HIDDEN, device=device))
    assert counts[0].shape == (EXPERTS,)
    assert counts[0].sum() == 3 * 5 * K


def test_the_bias_balances(device: torch.device) -> None:
    """Algorithm 1 of arXiv 2408.15664, from a router that prefers two experts."""
    router = turbo_nn.Router(HIDDEN, EXPERTS, K, device, **DEEPSEEK | {"groups": 1, "group_k": 1})
    x = torch.rand(300, HIDDEN, device=device)
    with torch.no_grad():
        router.weight[:2] += 0.3
    before = router.count(router(x).experts)
    router.update_bias(before, rate=0.25)
    mean = 300 * K / EXPERTS
    expected = [0.25 * ((mean > n) - (mean < n)) for n in before.tolist()]
    assert router.e_score_correction_bias.tolist() == expected
    weights, experts = router(x)
    chosen = router.logits(x).sigmoid().gather(1, experts)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True) * 2.5)
    for _ in range(200):
        router.update_bias(router.count(router(x).experts), rate=0.01)
    after = router.count(router(x).experts)
    assert after.max() < before.max() / 1.5
    assert after.min() > before.min()
    assert not router.e_score_correction_bias.requires_grad


def test_a_router_stays_in_fp32(device: torch.device) -> None:
    router = turbo_nn.Router(HIDDEN, EXPERTS, K, device, balance_bias=True)
    x = torch.randn(9, HIDDEN, device=device)
    right = router(x)
    with torch.autocast(device.type, torch.bfloat16):
        assert all(map(torch.equal, router(x), right))
        assert router.logits(x).dtype == torch.float32
    router.update_bias(torch.arange(EXPERTS, device=device))
    bias = router.e_score_correction_bias.clone()
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.equal(bias)
    exact = F.linear(x.bfloat16().double(), router.weight.double())
    torch.testing.assert_close(router.logits(x.bfloat16()).double(), exact, rtol=1e-5, atol=1e-5)
    assert router(x.bfloat16()).weights.dtype == torch.float32


@pytest.mark.parametrize("recipe", turbo_nn.RECIPES)
def test_no_recipe_takes_a_router(recipe: str, device: torch.device) -> None:
    model, x = (
        nn.Sequential(moe(device, shared_size=16, shared_gate=True)),
        torch.randn(5, HIDDEN, device=device),
    )
    right = model[0].router(x)
    found = {v.fqn: v.reason for v in patch(model, recipe)}
    assert found["0.router"] == "routers stay in high precision"
    assert type(model[0].router) is turbo_nn.Router
    assert type(model[0].shared_expert_gate) is nn.Linear
    assert all(map(torch.equal, model[0].router(x), right))


def test_state(device: torch.device) -> None:
    layer = moe(device, shared_size=16, balance_bias=True)
    layer.router.e_score_correction_bias.normal_()
    state = layer.state_dict()
    assert {key.partition(".")[0] for key in state} == {"router", "experts", "shared_expert"}
    assert "router.e_score_correction_bias" in state
    other = moe(device, shared_size=16, balance_bias=True)
    other.load_state_dict(state)
    x = torch.randn(5, HIDDEN, device=device)
    assert other(x).equal(layer(x))
    assert copy.deepcopy(layer)(x).equal(layer(x))
    assert moe(torch.device("meta"), balance_bias=True).router.e_score_correction_bias.is_meta
    assert "k=2, score=softmax" in repr(layer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: turbo_nn.Router(8, 4, 5), "k=5: use 1 to 4"),
        (lambda: turbo_nn.Router(8, 4, 2, score="tanh"), "score='tanh': use one of softmax, sigmoid"),
        (lambda: turbo_nn.Router(8, 4, 2, groups=3), "groups=3, group_k=3: 4 experts make equal groups"),
        (lambda: turbo_nn.Router(8, 4, 2).update_bias(torch.zeros(4)), "build it with balance_bias=True"),
        (
            lambda: turbo_nn.Router(8, 4, 2, balance_bias=True).update_bias(torch.zeros(2, 2)),
            r"counts \(2, 2\): give \(4,\)",
        ),
        (lambda: turbo_nn.MoE(8, 8, 4, 2, shared_gate=True), "shared_gate=True with shared_size=0"),
        (lambda: turbo_nn.MoE(8, 8, 4, 2, activation="tanh"), "activation='tanh': use one of silu"),
        (lambda: turbo_nn.MoE(8, 8, 4, 2, recipe="fp7"), "unknown recipe 'fp7': use one of bf16"),
        (lambda: turbo_nn.MoE(8, 8, 4, 2, recipe="mxfp8"), "experts have no recipe mxfp8"),
        (lambda: turbo_nn.MoE(8, 8, 4, 9), "k=9: use 1 to 4"),
    ],
)
def test_bad_input_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
