"""The loss of a patched causal language model: the model's own, without its logits."""

import copy
import inspect
import pickle

import pytest
import torch
from models import DECODERS, build, loss_of, patch, reference_on_cpu, tokens
from torch import Tensor, nn

import turbo_nn

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


def outcome(model: nn.Module, **inputs) -> list[Tensor]:
    """Loss and gradients in training."""
    ids = tokens(next(model.parameters()).device)
    labels = ids.clone()
    labels[0, :3] = -100
    output = model.train()(input_ids=ids, labels=labels, **inputs)
    return [
        output.loss,
        *torch.autograd.grad(output.loss, [p for p in model.parameters() if p.requires_grad]),
    ]


@pytest.mark.parametrize("inputs", [{}, {"num_items_in_batch": 7}], ids=["mean", "by items"])
@pytest.mark.parametrize("family", DECODERS)
def test_loss_and_gradients_are_the_models_own(family: str, inputs: dict, device: torch.device) -> None:
    model = build(family, device)
    expected = outcome(model, **inputs)
    report = patch(model, "bf16", only="")  # the model itself and nothing in it
    assert [v.rule for v in report.patched] == ["causal_lm"]
    assert model(input_ids=tokens(device), labels=tokens(device)).logits is None
    for ours, right in zip(outcome(model, **inputs), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-6)


def test_the_logits_are_there_when_asked(device: torch.device) -> None:
    model, ids = build("llama", device).train(), tokens(device)
    patch(model, "bf16")

    def fused(**inputs) -> bool:
        output = model(input_ids=ids, **{"labels": ids} | inputs)
        return not isinstance(output, tuple) and output.logits is None

    assert fused()
    assert not fused(labels=None)
    assert not fused(logits_to_keep=4, labels=None)
    assert not fused(return_dict=False)
    with torch.no_grad():
        assert fused(), "in training without gradients, too"
    model.keeps_logits = True
    assert not fused()
    model.keeps_logits = False
    assert not model.eval().training
    assert not fused()
    model.train()
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert not fused()
    handle.remove()
    assert fused()
    model.loss_function = lambda logits, labels, **_: logits.sum()
    assert not fused()


def test_capped_logits_are_capped_in_the_loss(device: torch.device) -> None:
    model = build("gemma3", device)
    uncapped = outcome(model)[0]
    model.config.final_logit_softcapping = 0.02
    expected = outcome(model)
    assert (expected[0] - uncapped).abs() > 1e-3, "or the cap does not show"
    assert next(v for v in patch(model, "bf16", only="") if v.rule == "causal_lm").reason is None
    for ours, right in zip(outcome(model), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-6)
    assert model(input_ids=tokens(device), labels=tokens(device)).logits is None
    assert model.config.final_logit_softcapping == 0.02
    assert "final_logit_softcapping" in model.config.to_dict()


def test_what_cannot_be_fused_is_left(device: torch.device) -> None:
    own = build("llama", device)
    own.loss_function = lambda logits, labels, **_: logits.sum()
    wide = build("llama", device)
    wide.lm_head = nn.Linear(64, 999, bias=False, device=device)
    says = {"its loss function is": own, "999 rows": wide}
    for reason, model in says.items():
        verdict = next(v for v in patch(model, "bf16") if v.rule == "causal_lm")
        assert reason in (verdict.reason or ""), verdict
        assert type(model.train()).__module__.startswith("transformers")


def test_scaled_logits_are_scaled_hidden_states(device: torch.device) -> None:
    config = transformers.GraniteConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=4.0,
    )  # fmt: skip
    model = transformers.GraniteForCausalLM(config).to(device)
    expected = outcome(model)
    patch(model, "bf16")
    for ours, right in zip(outcome(model), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_delayed"])
def test_the_heads_recipe_casts(recipe: str, device: torch.device) -> None:
    model = build("llama", device).train()
    expected = loss_of(model)
    patch(model, {"lm_head": recipe, "*": "bf16"})
    actual = loss_of(model)
    assert actual != expected
    assert actual.item() == pytest.approx(expected.item(), rel=0.02)


def test_it_stays_the_model_that_it_was(device: torch.device) -> None:
    model = build("llama", device)
    before = type(model)
    signature, head = inspect.signature(model.forward), model.lm_head
    patch(model, "bf16")
    assert isinstance(model, before)
    assert type(model).__name__ == before.__name__
    assert inspect.signature(model.forward) == signature
    assert model.lm_head is head is model.get_output_embeddings()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert loss_of(twin.train()) == loss_of(model.train())
        turbo_nn.unpatch(twin)
        assert type(twin) is before
    turbo_nn.unpatch(model)
    assert type(model) is before
    assert "fusing" not in vars(model)


def test_lora_and_checkpointing(device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    model = build("llama", device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    expected = outcome(adapted)
    report = patch(adapted, "bf16")
    assert any(v.rule == "causal_lm" for v in report.patched)
    for ours, right in zip(outcome(adapted), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-6)


def test_trainer_trains_the_same(device: torch.device, tmp_path) -> None:
    state = pytest.importorskip("accelerate").state.AcceleratorState
    losses = []
    rows = [{"input_ids": row, "labels": row} for row in tokens(device).cpu().repeat(4, 1)]
    for recipe in (None, "bf16"):
        model = build("llama", device)
        if recipe:
            patch(model, recipe)
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
            logging_steps=1, save_strategy="no", use_cpu=device.type == "cpu", learning_rate=1e-2, seed=0,
            label_names=["labels"], disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        state._reset_state(reset_partial_state=True)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


def test_it_compiles_in_one_graph(device: torch.device) -> None:
    model, ids = build("llama", device, attn_implementation="sdpa").train(), tokens(device)
    patch(model, "bf16")
    expected = loss_of(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(input_ids=ids, labels=ids).loss, expected)


def test_hidden_states_do_not_pass_for_logits(device: torch.device) -> None:
    model, ids = build("llama", device).train(), tokens(device)
    patch(model, "bf16", only="")
    output = model(input_ids=ids, labels=ids)
    assert "logits" not in output
    assert output.logits is None
    assert [x.shape for x in output.to_tuple() if isinstance(x, Tensor)] == [()]


def test_a_head_whose_logits_become_fp32(device: torch.device) -> None:
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, state_size=4)
    torch.manual_seed(0)
    model, ids = transformers.MambaForCausalLM(config).to(device).bfloat16().train(), tokens(device)
    expected = model(input_ids=ids, labels=ids).loss
    patch(model, "bf16", only="")
    assert isinstance(model, turbo_nn.CausalLM)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected, rtol=1e-2, atol=1e-2)
