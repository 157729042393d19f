"""Fused experts, by hand and patched in: the models' own numbers, and all that PyTorch does with a module."""

import collections
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mixtures import assert_alike, build, experts_of, families, inputs, on_reference, reasons, results
from models import loss_of, patch, snapshot, tokens
from numerics import SNR_FLOOR, snr_db
from torch import Tensor, nn

import turbo_nn
import turbo_ops

transformers = pytest.importorskip("transformers")

CASTING = ("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_hp_wgrad", "fp8_blockwise")


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with on_reference(device):
        yield


@families
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_the_patched_model_is_equal(family: str, implementation: str, device: torch.device) -> None:
    model = build(family, device, experts_implementation=implementation)
    ids, parameters = tokens(device), list(model.parameters())
    before, state = snapshot(model), model.state_dict()
    logits, grads = model(ids).logits, torch.autograd.grad(loss_of(model), parameters)
    report = patch(model, "bf16", only="*.experts")
    verdicts = [v for v in report if v.rule == "experts"]
    assert [v.reason for v in verdicts] == [None] * len(verdicts)
    assert {v.recipe for v in verdicts} == {"bf16"}
    assert all("grouped_gemm:" in v.backend for v in verdicts)
    assert isinstance(experts_of(model), turbo_nn.Experts)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(loss_of(model), parameters)
    assert all(snr_db(*one) > 80 for one in zip(ours, grads, strict=True))
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(after[key].data_ptr() == state[key].data_ptr() for key in state)
    turbo_nn.unpatch(model)
    assert snapshot(model) == before


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_is_equal(family: str, dtype: torch.dtype, device: torch.device) -> None:
    module, given = experts_of(build(family, device)).to(dtype), inputs(device, dtype)
    if family != "mixtral":  # whose routing weights stay in fp32
        given = *given[:2], given[2].detach().to(dtype).requires_grad_()
    expected = results(module, given)
    patch(module, "bf16")
    assert_alike(results(module, given), expected, 100 if dtype == torch.float32 else 38)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(*given), expected[0], rtol=1e-2, atol=1e-1)


@families
@pytest.mark.parametrize("recipe", CASTING)
def test_recipes(family: str, recipe: str, device: torch.device) -> None:
    module, given = experts_of(build(family, device)), inputs(device)
    expected = results(module, given)
    (verdict,) = patch(module, recipe)
    assert (verdict.reason, verdict.recipe) == (None, recipe)
    actual = results(module, given)
    # two casts in a row, and a product of two of their results between
    assert_alike(actual, expected, SNR_FLOOR["e5m2" if recipe == "fp8_tensorwise" else "e4m3"] - 6)
    assert snr_db(actual[0], expected[0]) < 60, "the casts of the recipe must happen"


@families
def test_copies_are_patched_and_can_be_unpatched(family: str, device: torch.device) -> None:
    module, given = experts_of(build(family, device)), inputs(device)
    original = type(module)
    patch(module, "bf16")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(twin, original)
        assert torch.equal(twin(*given), module(*given))
        turbo_nn.unpatch(twin)
        assert type(twin) is original
        torch.testing.assert_close(twin(*given), module(*given), rtol=1e-5, atol=1e-4)


@families
def test_generate(family: str, device: torch.device) -> None:
    model = build(family, device)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens(device), **options)
    patch(model, "bf16", only="*.experts")
    assert torch.equal(model.generate(tokens(device), **options), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_rowwise"])
def test_compiles_in_one_graph(family: str, recipe: str, device: torch.device) -> None:
    module, given = experts_of(build(family, device)), inputs(device)
    patch(module, recipe)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_alike(results(compiled, given), results(module, given), 80 if recipe == "bf16" else 25)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant: bool, device: torch.device) -> None:
    model = build("qwen3_moe", device).train()
    patch(model, "bf16")
    grads = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss_of(model).backward()
        grads.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *grads))


@families
def test_meta_device(family: str, device: torch.device) -> None:
    real, given = experts_of(build(family, device)), inputs(device)
    expected = real(*given)
    module = experts_of(build(family, "meta"))
    (verdict,) = patch(module, "bf16")
    assert verdict.reason is None
    module.load_state_dict(real.state_dict(), assign=True)
    torch.testing.assert_close(module(*given), expected, rtol=1e-5, atol=1e-4)


def test_autocast(device: torch.device) -> None:
    module, given = experts_of(build("qwen3_moe", device)), inputs(device)
    with torch.autocast(device.type, torch.bfloat16):
        expected = results(module, given)
        patch(module, "bf16")
        assert_alike(results(module, given), expected, 35)


def test_frozen_experts_pay_nothing(device: torch.device) -> None:
    module, given = experts_of(build("mixtral", device)).requires_grad_(False), inputs(device)
    patch(module, "bf16")
    rows = given[1].numel()
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        y = module(*given)
    middle = module.down_proj.shape[2]
    assert (rows, given[0].shape[1]) not in kept[:-1], "the input of gate and up is for wgrad alone"
    assert (rows, middle) not in kept, "and so is that of down"
    y.sum().backward()
    assert all(p.grad is None for p in module.parameters())
    assert given[0].grad.abs().sum() > 0


@families
def test_an_expert_without_tokens_has_gradients_of_zero(family: str, device: torch.device) -> None:
    module, given = experts_of(build(family, device)), inputs(device)
    patch(module, "bf16")
    module(*given).sum().backward()
    for weight in module.parameters():
        assert (weight.grad[-1] == 0).all()
        assert weight.grad[:-1].abs().sum() > 0
    none = given[0][:0], given[1][:0], given[2][:0]
    module.zero_grad()
    y = module(*none)
    assert y.shape == none[0].shape
    y.sum().backward()
    assert all((weight.grad == 0).all() for weight in module.parameters())


@families
def test_choices_of_other_ranks_count_nothing(family: str, device: torch.device) -> None:
    module, (x, index, weights) = experts_of(build(family, device)), inputs(device)
    away = index == 1
    expected = module(x, index, weights.masked_fill(away, 0.0))
    patch(module, "bf16")
    actual = module(x, index.masked_fill(away, 4), weights)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    grads = torch.autograd.grad(actual.sum(), [weights, module.down_proj])
    assert (grads[0][away] == 0).all()
    assert (grads[1][1] == 0).all()


@pytest.mark.parametrize("cls", [turbo_nn.Experts, turbo_nn.GroupedLinear])
def test_what_fsdp_gathers_is_not_kept(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = cls(4, 64, 32), []
    for name in ("moe_experts", "grouped_linear"):
        monkeypatch.setattr(turbo_ops, name, lambda x, *_, **how: seen.append(how["resident"]) or x)
    for _ in range(2):
        layer(torch.ones(3, 64), torch.ones(3, 1), torch.ones(3, 1))
        layer._is_fsdp_managed_module = True
    assert seen == [True, False]


def test_a_module_of_its_own(device: torch.device) -> None:
    module = turbo_nn.Experts(4, 64, 32, "gelu_tanh", bias=True, device=device)
    assert [*module.state_dict()] == ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    assert module.gate_up_proj.abs().max() <= 64**-0.5
    assert module.down_proj_bias.abs().max() <= 32**-0.5
    x, index, weights = inputs(device)
    gate_up, down = module.gate_up_proj, module.down_proj
    expected = x.detach() * 0
    for token, choice in ((t, c) for t in range(len(x)) for c in range(2)):
        e = index[token, choice]
        gate, up = (gate_up[e] @ x[token] + module.gate_up_proj_bias[e]).chunk(2)
        y = down[e] @ (nn.functional.gelu(gate, approximate="tanh") * up) + module.down_proj_bias[e]
        expected = expected.index_add(
            0, torch.tensor([token], device=device), (weights[token, choice] * y)[None]
        )
    torch.testing.assert_close(module(x, index, weights), expected, rtol=1e-4, atol=1e-5)
    folded = (part.unflatten(0, (1, 11)) for part in (x, index, weights))
    torch.testing.assert_close(module(*folded)[0], expected, rtol=1e-4, atol=1e-5)
    assert "activation=gelu_tanh, recipe=bf16" in repr(module)
    assert reasons(module, "fp8_blockwise") == [None]
    assert module.activation == "gelu_tanh"
    assert "recipe=fp8_blockwise" in repr(module)


def test_what_the_module_refuses(device: torch.device) -> None:
    for options, says in (
        (
            {"recipe": "fp8_delayed"},
            "fp8_delayed: a recipe with a history would need one",
        ),
        ({"recipe": "fp8"}, "unknown recipe 'fp8': use one of bf16"),
        ({"activation": "relu"}, "activation='relu': use one of silu, gelu_tanh, swigluoai"),
    ):
        with pytest.raises(ValueError, match=says):
            turbo_nn.Experts(4, 64, 32, **options)
    module, (x, index, weights) = turbo_nn.Experts(4, 64, 32, device=device), inputs(device)
    for given in (
        (x[:, :-1], index, weights),
        (x, index.int(), weights),
        (x, index[:-1], weights),
        (x, index, weights[:, :1]),
        (x.bfloat16(), index, weights),
    ):
        with pytest.raises(ValueError, match=r"moe_experts: (x|gate_up|experts|weights) \(|dtypes differ"):
            module(*given)


def variants() -> dict[str, nn.Module]:
    """Experts that are left, by what the reason says."""
    cls = type(experts_of(build("mixtral")))
    config = build("mixtral").config

    class Clamped(cls):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            moe = transformers.integrations.moe
            return moe.batched_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)

    made: dict[str, Any] = collections.defaultdict(lambda: cls(config))
    made["no gate"].up_proj = made["no gate"].gate_up_proj
    del made["no gate"].gate_up_proj
    made["normalises"].has_post_expert_norm = True
    made["int8"].down_proj = nn.Parameter(made["int8"].down_proj.data.to(torch.int8), requires_grad=False)
    made["float64"].double()
    made["bfloat16, torch"].down_proj = nn.Parameter(made["bfloat16, torch"].down_proj.data.bfloat16())
    made["scale besides"].scale = nn.Parameter(torch.ones(4))
    made["norm besides"].norm = nn.LayerNorm(4)
    made["counts 5 experts"].num_experts = 5
    made["hooks"].act_fn.register_forward_hook(lambda *_: None)
    weight = made["Quantized: patch before"].down_proj.data
    made["Quantized: patch before"].down_proj = type("Quantized", (nn.Parameter,), {})(weight)
    made["nor transposed"].down_proj = nn.Parameter(weight[:, :, :-1].clone())
    made["disagrees"].act_fn = nn.GELU()
    made["off by"] = Clamped(config)
    made["forward takes hidden_states"] = transformers.models.llama4.modeling_llama4.Llama4TextExperts(
        SimpleNamespace(num_local_experts=4, intermediate_size=8, hidden_size=8, hidden_act="silu")
    )
    return made


def test_what_the_rule_leaves() -> None:
    for says, module in variants().items():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                nn.init.normal_(parameter)
        kind = type(module)
        (reason,) = reasons(module)
        assert reason is not None, says
        assert says in reason
        assert type(module) is kind


def test_strict_and_the_report(device: torch.device) -> None:
    model = build("qwen3_moe", device)
    report = patch(model, "fp8_blockwise", strict=True)
    assert [v.recipe for v in report if v.rule == "experts"] == ["fp8_blockwise"] * 2
    with pytest.raises(turbo_nn.LeftError, match=r"experts have no recipe mxfp8: .* use fp8_blockwise"):
        patch(model, "mxfp8", strict=True)
    with pytest.raises(turbo_nn.LeftError, match="would need one for each expert"):
        patch(model, "fp8_delayed", strict=True)
    report = patch(model, {"*.experts": "bf16", "*": "fp8_delayed"}, strict=True)
    assert [v.recipe for v in report.patched if v.rule == "experts"] == ["bf16"] * 2
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
    with pytest.raises(turbo_nn.LeftError, match="experts: left: it normalises"):
        patch(model, "fp8_blockwise", strict=True)
    report = patch(model, "bf16", strict=True)  # which asks for nothing
    assert [v.recipe for v in report if v.rule == "experts"] == [None] * 2
    assert not patch(model, "fp8_blockwise", strict=True, skip="*.experts").refused


def test_an_activation_put_in_later_is_the_models_own(device: torch.device) -> None:
    module, given = experts_of(build("mixtral", device)), inputs(device)
    patch(module, "bf16")
    module.act_fn = nn.ReLU()
    y = module(*given)
    turbo_nn.unpatch(module)
    assert torch.equal(module(*given), y)
