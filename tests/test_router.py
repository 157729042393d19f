"""The router beside those of transformers, autograd in fp64, and its losses."""

import pytest
import torch
from torch import Tensor

import turbo_ops

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPTIONS = {
    "mixtral": {"k": 2, "normalize": True},
    "qwen3": {"k": 4},
    "deepseek": {"k": 3, "score": "sigmoid", "groups": 4, "group_k": 2, "normalize": True, "scale": 2.5},
}


def plain(logits: Tensor, experts: Tensor, options: dict) -> Tensor:
    """The weights of experts that are chosen already."""
    scores = logits.sigmoid() if options.get("score") == "sigmoid" else logits.softmax(-1)
    weights = scores.gather(-1, experts)
    if options.get("normalize"):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * options.get("scale", 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_and_gradients(name: str, dtype: torch.dtype, device: torch.device) -> None:
    options, logits = OPTIONS[name], torch.randn(3, 5, 16, device=device).to(dtype).requires_grad_()
    weights, experts = turbo_ops.router(logits, **options)
    assert (weights.shape, weights.dtype, experts.dtype) == ((3, 5, options["k"]), torch.float32, torch.int64)
    exact = logits.detach().double().requires_grad_()
    right = plain(exact, experts, options)
    torch.testing.assert_close(weights, right.float(), rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(weights)
    ours = torch.autograd.grad(weights, logits, grad)[0]
    theirs = torch.autograd.grad(right, exact, grad.double())[0]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def test_it_chooses_as_deepseek_does(device: torch.device) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = transformers.DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=3, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    gate, logits = DeepseekV3TopkRouter(config).to(device), torch.randn(20, 16, device=device)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(16))
        gate.e_score_correction_bias.normal_()
        answer = gate(logits)
    if not isinstance(answer, tuple):
        pytest.skip("this transformers' router gives logits alone")
    _, weights, experts = answer
    ours = turbo_ops.router(logits, bias=gate.e_score_correction_bias, **OPTIONS["deepseek"])
    order, their_order = ours.experts.sort(1), experts.sort(1)
    assert order.values.equal(their_order.values)
    chosen = ours.weights.gather(1, order.indices)
    torch.testing.assert_close(chosen, weights.gather(1, their_order.indices), rtol=1e-4, atol=1e-5)


def test_ties_go_to_the_first_and_all_experts_may_be_chosen(device: torch.device) -> None:
    weights, experts = turbo_ops.router(torch.zeros(2, 6, device=device), 6)
    assert experts.tolist() == [list(range(6))] * 2
    torch.testing.assert_close(weights, torch.full((2, 6), 1 / 6, device=device))


def test_bias_decides_and_weighs_nothing(device: torch.device) -> None:
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0], device=device, requires_grad=True)
    logits = torch.tensor([[3.0, 2.0, -3.0, 1.0]], device=device)
    weights, experts = turbo_ops.router(logits, 1, score="sigmoid", bias=bias)
    assert experts.item() == 2
    torch.testing.assert_close(weights, logits[:, 2:3].sigmoid())
    assert not weights.requires_grad


def test_experts_exist_even_where_logits_are_nan(device: torch.device) -> None:
    logits = torch.randn(4, 12, device=device)
    logits[1] = torch.nan
    weights, experts = turbo_ops.router(logits, 3, normalize=True)
    assert experts.min() >= 0
    assert experts.max() < 12
    assert weights[1].isnan().all()
    assert weights[0].isfinite().all()


@pytest.mark.deterministic
def test_it_repeats_itself(device: torch.device) -> None:
    logits = torch.randn(300, 60, device=device, requires_grad=True)
    runs = []
    for _ in range(2):
        weights, experts = turbo_ops.router(logits, 4, normalize=True)
        runs.append((weights, experts, torch.autograd.grad(weights.square().sum(), logits)[0]))
    assert all(map(torch.equal, *runs))


def test_losses(device: torch.device) -> None:
    logits = torch.randn(2, 50, 8, device=device, requires_grad=True)
    _, experts = turbo_ops.router(logits, 2)
    balance, z = turbo_ops.router_losses(logits, experts)
    rows = logits.detach().double().flatten(0, 1)
    share = torch.bincount(experts.flatten(), minlength=8).double() / experts.numel()
    torch.testing.assert_close(balance.double(), 8 * (share * rows.softmax(1).mean(0)).sum())
    torch.testing.assert_close(z.double(), rows.logsumexp(1).square().mean())
    assert torch.autograd.grad(balance + z, logits)[0].abs().sum() > 0
    even = torch.arange(8, device=device).repeat(4)[:, None]
    torch.testing.assert_close(
        turbo_ops.router_losses(torch.zeros(32, 8, device=device), even)[0], torch.ones((), device=device)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k=0: use 1 to 8"),
        ({"k": 5, "groups": 4, "group_k": 2}, "k=5: use 1 to 4, the experts that can be chosen"),
        ({"groups": 3}, "groups=3, group_k=3: 8 experts make equal groups"),
        ({"groups": 2, "group_k": 3}, "groups=2, group_k=3"),
        ({"score": "tanh"}, "score='tanh': use one of softmax, sigmoid"),
        ({"bias": torch.zeros(3)}, r"bias \(3,\): give \(8,\)"),
        ({"logits": torch.zeros(4, 8).double()}, "of torch.float64: give"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:12],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turbo_ops.router(**{"logits": torch.zeros(4, 8), "k": 2} | change)


def test_compiles_whole(device: torch.device) -> None:
    logits = torch.randn(6, 8, device=device, requires_grad=True)

    def route(x: Tensor) -> turbo_ops.Routing:
        return turbo_ops.router(x, 2, normalize=True)

    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(logits), route(logits), strict=True):
        torch.testing.assert_close(one, other)


def test_losses_of_no_token_are_zero(device: torch.device) -> None:
    logits = torch.zeros(0, 4, device=device, requires_grad=True)
    losses = turbo_ops.router_losses(logits, torch.zeros(0, 2, dtype=torch.int64, device=device))
    assert [loss.item() for loss in losses] == [0, 0]
    sum(losses).backward()
