"""Casts of what a kernel makes on the way are those of two kernels, wherever a model uses them."""

import importlib

import pytest
import torch
from models import build, loss_of, patch, tokens
from torch import Tensor, nn

import turbo_nn
import turbo_ops
from turbo_ops import casting
from turbo_ops.arch import arch
from turbo_ops.dispatch import REGISTRY


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    families = {op.family for op in REGISTRY.values()} if device.type == "cpu" else ()
    with turbo_ops.force(**dict.fromkeys(families, "reference")):
        yield


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[str]:
    """The ops that made casts on the way; they are in use here."""
    monkeypatch.setattr(casting, "ON_THE_WAY", (arch(device),))
    found: list[str] = []
    for place, name in (
        ("gated_linear", "quantize_both_swiglu"),
        ("gated_linear", "quantize_both_swiglu_delayed"),
        ("linear_cross_entropy", "quantize_both_cross_entropy"),
    ):

        def noted(*args, contract=REGISTRY[name]):
            found.append(contract.name)
            return contract(*args)

        monkeypatch.setattr(importlib.import_module(f"turbo_ops.{place}"), name, noted)
    return found


def gradients(model: nn.Module) -> list[Tensor]:
    loss = loss_of(model)
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def close(ours: list[Tensor], right: list[Tensor], device: torch.device) -> None:
    for one, other in zip(ours, right, strict=True):
        if device.type == "cpu":
            assert one.equal(other), "by the reference both are the same"
        else:
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_blockwise(family: str, used: list[str], device: torch.device, monkeypatch) -> None:
    model = build(family, device).train()
    patch(model, "fp8_blockwise")
    ours = gradients(model)
    assert used.count("quantize_both_swiglu") == model.config.num_hidden_layers
    assert "quantize_both_cross_entropy" in used
    monkeypatch.setattr(casting, "ON_THE_WAY", ())
    close(ours, gradients(model), device)


def test_delayed(used: list[str], device: torch.device, monkeypatch) -> None:
    model = build("llama", device).train()
    patch(model, "fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model).backward()
    assert "quantize_both_swiglu_delayed" not in used, "nothing is known of amax yet"
    optimizer.step()
    turbo_nn.weights_changed(model)
    ours = gradients(model)
    assert used.count("quantize_both_swiglu_delayed") == model.config.num_hidden_layers
    histories = {fqn: h[0, 0] for fqn, h in turbo_nn.recipe_state(model).items() if "down" in fqn}
    assert all(amax > 0 for amax in histories.values()), "its own amax is noted"
    monkeypatch.setattr(casting, "ON_THE_WAY", ())
    close(ours, gradients(model), device)


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_tensorwise", "bf16"])
def test_what_needs_a_pass_for_amax_is_made_first(recipe: str, used: list[str], device: torch.device) -> None:
    model = build("llama", device).train()
    patch(model, recipe)
    assert torch.stack([g.isfinite().all() for g in gradients(model)]).all()
    assert "quantize_both_swiglu" not in used
    assert ("quantize_both_cross_entropy" in used) == (recipe == "fp8_tensorwise")


def test_who_looks_sees_the_values(used: list[str], device: torch.device) -> None:
    model, seen = build("llama", device).train(), []
    patch(model, "fp8_blockwise")
    down = model.model.layers[0].mlp.down_proj
    handle = down.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    ours = gradients(model)
    assert seen[0].isfinite().all()
    assert used.count("quantize_both_swiglu") == model.config.num_hidden_layers - 1
    handle.remove()
    close(gradients(model), ours, device)


@pytest.mark.parametrize("how", ["eval", "no_grad", "frozen", "checkpointing", "autocast", "compiled"])
def test_in_every_mode(how: str, used: list[str], device: torch.device, monkeypatch) -> None:
    model = build("llama", device).train()
    patch(model, "fp8_blockwise")
    if how == "frozen":
        model.requires_grad_(False).model.embed_tokens.requires_grad_(True)
    if how == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if how == "compiled" else model

    def run() -> list[Tensor]:
        ids = tokens(device)
        if how in ("eval", "no_grad"):
            with torch.set_grad_enabled(how == "eval"):
                return [model.train(how != "eval")(input_ids=ids).logits]
        with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
            loss = call(input_ids=ids, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]

    torch._dynamo.reset()
    ours = run()
    assert all(x.isfinite().all() for x in ours)
    monkeypatch.setattr(casting, "ON_THE_WAY", ())
    torch._dynamo.reset()
    close(ours, run(), device)
