"""Experts among what others bring: PEFT's LoRA on their parameters, and transformers' registry."""

import pytest
import torch
from mixtures import assert_alike, build, experts_of, families, inputs, on_reference, reasons, results
from models import loss_of, patch, tokens
from numerics import snr_db
from torch import nn

import turbo_nn

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with on_reference(device):
        yield


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_lora_in_either_order(family: str, device: torch.device) -> None:
    peft = pytest.importorskip("peft")

    def lora(model: nn.Module) -> nn.Module:
        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    models = plain, first, second = [build(family, device) for _ in range(3)]
    patch(first, "bf16")
    plain, first, second = map(lora, models)
    patch(second, "bf16")
    losses = [loss_of(model) for model in (plain, first, second)]
    wanted = [[p for p in model.parameters() if p.requires_grad] for model in (plain, first, second)]
    grads = [torch.autograd.grad(*pair) for pair in zip(losses, wanted, strict=True)]
    for ours in (1, 2):
        assert losses[ours].item() == pytest.approx(losses[0].item(), rel=1e-5)
        assert len(wanted[ours]) == len(wanted[0]) == 8
        assert all(snr_db(*one) > 60 for one in zip(grads[ours], grads[0], strict=True))
    merged = second.merge_and_unload()
    assert isinstance(experts_of(merged), turbo_nn.Experts)
    assert loss_of(merged).item() == pytest.approx(losses[0].item(), rel=1e-4)


@families
def test_the_registry_of_transformers(family: str, device: torch.device) -> None:
    names = turbo_nn.register_experts()
    assert "turbo" in names
    assert "turbo_fp8_rowwise" in names
    assert not any("delayed" in name for name in names)
    model, ids = build(family, device), tokens(device)
    expected = model(ids).logits
    model.set_experts_implementation("turbo")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert not isinstance(experts_of(model), turbo_nn.Experts)
    model.set_experts_implementation("turbo_fp8_rowwise")
    assert 10 < snr_db(model(ids).logits, expected) < 60
    assert reasons(experts_of(model)) == [None], "and patch finds the model's own forward"
    module, given = experts_of(build(family, device, experts_implementation="turbo")), inputs(device)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_alike(results(compiled, given), results(module, given), 80)


def test_the_registry_refuses_what_it_cannot_run(device: torch.device) -> None:
    turbo_nn.register_experts()
    module = experts_of(build("mixtral", device, experts_implementation="turbo"))
    module.act_fn = nn.ReLU()
    with pytest.raises(ValueError, match="agrees with none of silu, gelu_tanh, swigluoai: use 'grouped_mm'"):
        module(*inputs(device))
