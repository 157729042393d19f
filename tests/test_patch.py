"""`patch`, `unpatch` and the report, over model families."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from models import (
    DECODERS,
    FAMILIES,
    LlamaRMSNorm,
    Toy,
    build,
    loss_of,
    patch,
    reasons,
    reference_on_cpu,
    snapshot,
    tokens,
)
from numerics import snr_db
from torch import nn

import turbo_nn

families = pytest.mark.parametrize("family", list(FAMILIES))
RULES = ("linear", "rms_norm", "gated_mlp", "rotary", "causal_lm")
PATCHED = {  # by rule; the heads of Gemma3, GPT-2 and BERT are tied, and Conv1D is left
    "llama": (15, 5, 2, 2, 1),
    "qwen3": (15, 9, 2, 2, 1),
    "mistral": (15, 5, 2, 2, 1),
    "gemma3": (14, 13, 2, 2, 1),
    "phi3": (9, 5, 2, 2, 1),
    "gpt2": (0, 0, 0, 0, 1),
    "bert": (13, 0, 0, 0, 0),
}
TWINS = turbo_nn.Linear | turbo_nn.RMSNorm | turbo_nn.GatedMLP | turbo_nn.RotaryAttention | turbo_nn.CausalLM


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


@families
def test_every_layer_is_patched_or_says_why(family: str, device: torch.device) -> None:
    model = build(family, device)
    report = patch(model)
    verdicts = {v.fqn: v for v in report}
    assert len(verdicts) == len(report)
    for name, module in model.named_modules():
        is_patched = isinstance(module, TWINS)
        weighty = any(p.ndim == 2 for p in module.parameters(recurse=False))
        if is_patched or weighty or isinstance(module, nn.Linear) or "RMSNorm" in type(module).__name__:
            assert (verdicts[name].reason is None) == is_patched, name
            assert is_patched == bool(verdicts[name].backend)
    kinds = [sum(v.rule == rule for v in report.patched) for rule in RULES]
    assert tuple(kinds) == PATCHED[family]
    assert all(len(v.reason) > 5 for v in report.left)
    assert {v.recipe for v in report.patched if v.rule == "linear"} <= {"fp8_blockwise"}


@families
def test_without_casts_the_twin_is_equal(family: str, device: torch.device) -> None:
    """bf16 leaves the linear layers and patches the rest."""
    model = build(family, device)
    ids = tokens(device)
    with torch.no_grad():
        expected = model(ids).logits
        report = patch(model, "bf16")
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert len(report.patched) == sum(PATCHED[family][1:])
    assert not any(isinstance(m, turbo_nn.Linear) for m in model.modules())


@families
def test_norms_round_as_they_did(family: str, device: torch.device) -> None:
    model = build(family, device).to(torch.bfloat16)
    patch(model, "bf16")
    twins = {name: m for name, m in model.named_modules() if isinstance(m, turbo_nn.RMSNorm)}
    assert len(twins) == PATCHED[family][1]
    x = {name: torch.randn(64, *m.weight.shape, device=device).bfloat16() for name, m in twins.items()}
    actual = {name: m(x[name]) for name, m in twins.items()}
    turbo_nn.unpatch(model)
    for name, m in twins.items():
        same = (actual[name] == m(x[name])).float().mean()
        assert same > 0.99, f"{name}: {1 - same:.1%} of the results round differently"


@families
def test_fp8_trains_close_to_the_original(family: str, device: torch.device) -> None:
    model = build(family, device)
    expected = loss_of(model)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    report = patch(model)
    actual = loss_of(model)
    assert actual.item() == pytest.approx(expected.item(), rel=0.02)
    grads = torch.autograd.grad(actual, list(model.parameters()))
    noise = snr_db(torch.cat([g.flatten() for g in grads]), torch.cat([g.flatten() for g in wanted]))
    assert noise > 15
    assert (noise > 100) == (not any(v.recipe for v in report.patched))


@pytest.mark.parametrize("family", DECODERS)
def test_generate(family: str, device: torch.device) -> None:
    model = build(family, device)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens(device), **options)
    patch(model, "bf16")
    assert torch.equal(model.generate(tokens(device), **options), expected)
    before = snapshot(model)
    patch(model)
    assert model.generate(tokens(device), **options).shape == expected.shape
    turbo_nn.unpatch(model)
    patch(model, "bf16")
    assert snapshot(model) == before


@families
def test_unpatch_gives_the_same_objects_back(family: str, device: torch.device) -> None:
    model = build(family, device)
    before, state = snapshot(model), {k: v.data_ptr() for k, v in model.state_dict().items()}
    report = patch(model)
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == state
    assert [s[:2] + s[5:] for s in snapshot(model)] == [s[:2] + s[5:] for s in before]
    assert (snapshot(model) != before) == bool(report.patched)
    turbo_nn.unpatch(model)
    assert snapshot(model) == before
    turbo_nn.unpatch(model)
    assert snapshot(model) == before


def test_only_and_skip() -> None:
    model = Toy()
    patched = [v.fqn for v in patch(model, only="layers.*", skip=["*.up", "*.norm"]).patched]
    assert patched == ["layers.0.down", "layers.1.down"]
    assert isinstance(model.layers[0].down, turbo_nn.Linear)
    assert type(model.head) is nn.Linear


def test_a_module_under_two_parents_is_one() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    assert reasons(model) == {"a.0": None}
    turbo_nn.unpatch(model)
    assert reasons(model, skip="b.*")["a.0"], "skipped by its other name"
    assert type(shared) is nn.Linear


def test_the_last_patch_decides(device: torch.device) -> None:
    model = Toy().to(device)
    before = snapshot(model)
    patch(model, "fp8_rowwise")
    report = patch(model, {"head": "bf16", "layers.1.*": "mxfp8"})
    assert type(model.head) is nn.Linear
    assert type(model.layers[0].up) is nn.Linear
    assert type(model.layers[0].norm) is LlamaRMSNorm
    assert model.layers[1].up.recipe == turbo_nn.RECIPES["mxfp8"]
    assert {v.fqn for v in report.patched} == {"layers.1.up", "layers.1.down", "layers.1.norm"}
    turbo_nn.unpatch(model)
    assert snapshot(model) == before


def test_a_layer_made_by_hand() -> None:
    model = nn.Sequential(turbo_nn.Linear(8, 8, recipe="mxfp8"), turbo_nn.RMSNorm(8, offset=1.0))
    before = snapshot(model)
    patch(model, "fp8_rowwise")
    assert model[0].recipe == turbo_nn.RECIPES["fp8_rowwise"]
    assert model[1].offset == 1.0
    turbo_nn.unpatch(model)
    assert model[0].recipe == turbo_nn.RECIPES["mxfp8"]
    assert snapshot(model) == before


def test_strict_raises_and_changes_nothing() -> None:
    model = nn.ModuleDict({"good": nn.Linear(8, 8), "odd": nn.Linear(8, 8), "rest": nn.Linear(8, 8)})
    model["odd"].forward = lambda x: x
    before = snapshot(model)
    with pytest.raises(turbo_nn.LeftError, match="odd") as error:
        patch(model, strict=True)
    assert isinstance(error.value, ValueError)
    assert "good" not in str(error.value)
    assert [v.fqn for v in error.value.report.refused] == ["odd"]
    assert snapshot(model) == before
    patch(model, "mxfp8")
    patched = snapshot(model)
    with pytest.raises(turbo_nn.LeftError):
        patch(model, "fp8_rowwise", strict=True)
    assert snapshot(model) == patched
    assert model["good"].recipe == turbo_nn.RECIPES["mxfp8"]
    patch(model, skip="odd", strict=True)
    for policy in ({"odd": "bf16", "*": "mxfp8"}, {"[gr]*": "mxfp8"}):
        patch(model, policy, strict=True)
    patch(Toy(tied=True), strict=True)  # what is protected by default is not asked for


def test_an_empty_only_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"only=\[\] leaves everything"):
        patch(Toy(), only=[])


def test_unpatch_refuses_where_something_came_on_top() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    patch(model)
    run = model[1].forward
    model[1].forward = lambda x: run(x)
    before = snapshot(model)
    for undo in (turbo_nn.unpatch, patch):
        with pytest.raises(RuntimeError, match="forward"):
            undo(model)
        assert snapshot(model) == before
    del model[1].forward
    turbo_nn.unpatch(model)
    assert type(model[0]) is type(model[1]) is nn.Linear


def test_unpatch_after_accelerate_took_its_hooks_away() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    patch(model)
    add_hook_to_module(model[0], ModelHook())
    with pytest.raises(RuntimeError, match="remove_hook_from_module"):
        turbo_nn.unpatch(model)
    remove_hook_from_module(model[0])  # leaves the twin's own forward on the instance
    assert turbo_nn.unpatch(model) == 1
    assert "forward" not in vars(model[0])
    assert type(model[0]) is nn.Linear


def test_the_report(device: torch.device) -> None:
    model = Toy(layers=12, tied=True).to(device)
    report = patch(model, {"layers.3.*": "bf16", "*": "fp8_blockwise"}, skip="layers.5.up")
    text = str(report)
    assert len(text.splitlines()) < 14, text
    for line in ("layers.[0-2,4,6-11].up ", "layers.[0-2,4-11].down ", "layers.5.up ", "layers.3.up "):
        assert line in text
    assert len({line.index("Linear ") for line in text.splitlines() if " Linear " in line}) == 1, "aligned"
    rows = json.loads(report.to_json())
    assert [SimpleNamespace(**row).fqn for row in rows] == [v.fqn for v in report]
    assert set(rows[0]) == {"fqn", "module", "rule", "recipe", "backend", "reason"}
    assert len(report.patched) + len(report.left) == len(report) == len(rows)
    on_cpu = "gemm:reference quantize:reference"
    backend = next(v.backend for v in report.patched if v.rule == "linear")
    assert backend == on_cpu if device.type == "cpu" else "reference" not in backend


def lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def test_lora_in_either_order(device: torch.device) -> None:
    first, second = build("llama", device), build("llama", device)
    patch(first)
    first = lora(first)
    second = lora(second)
    report = patch(second)
    layer = second.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer, turbo_nn.Linear)
    assert type(layer.lora_A["default"]) is type(layer.lora_B["default"]) is nn.Linear
    left = [v for v in report.left if "lora_" in v.fqn]
    assert len(left) == 8
    assert all("LoRA" in v.reason and v.recipe is None for v in left)
    assert [type(m) for m in first.modules()] == [type(m) for m in second.modules()]
    losses = [loss_of(model.train()) for model in (first, second)]
    assert torch.equal(*losses)
    losses[0].backward()
    grads = {name for name, p in first.named_parameters() if p.grad is not None}
    assert len(grads) == 8
    assert all("lora_" in name for name in grads)
    expected = loss_of(first.eval())
    for model in (first, second):
        merged = model.merge_and_unload()
        assert isinstance(merged.model.layers[0].self_attn.q_proj, turbo_nn.Linear)
        assert loss_of(merged).item() == pytest.approx(expected.item(), rel=1e-2)
        turbo_nn.unpatch(merged)
        assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_transformers(reentrant: bool, device: torch.device) -> None:
    model = build("llama", device).train()
    patch(model)
    grads = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        loss_of(model).backward()
        grads.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *grads))


def test_accelerate_prepares_a_patched_model(device: torch.device) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build("llama", device)
    patch(model)
    accelerator = accelerate.Accelerator(cpu=device.type == "cpu", mixed_precision="bf16")
    prepared, optimizer = accelerator.prepare(model.train(), torch.optim.SGD(model.parameters(), 0.1))
    first = loss_of(prepared)
    accelerator.backward(first)
    optimizer.step()
    assert loss_of(prepared) < first
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    turbo_nn.unpatch(plain)
    assert not any(isinstance(m, turbo_nn.Linear | turbo_nn.RMSNorm) for m in plain.modules())


def test_a_patched_decoder_compiles_in_one_graph(device: torch.device) -> None:
    model = build("llama", device, attn_implementation="sdpa")
    model.config.use_cache = False
    patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        actual, expected = compiled(tokens(device)).logits, model(tokens(device)).logits
    assert snr_db(actual, expected) > 25


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (3, {}, "model is a int: give an nn.Module"),
        (None, {}, "model is a NoneType: give an nn.Module"),
        (nn.Linear(4, 4), {"skip": 3}, "only and skip are globs, strings, not 3"),
        (nn.Linear(4, 4), {"only": [None]}, "only and skip are globs, strings, not None"),
    ],
    ids=["number", "nothing", "skip", "only"],
)
def test_what_cannot_be_patched_is_said(model: object, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turbo_nn.patch(model, "fp8_blockwise", **options)
