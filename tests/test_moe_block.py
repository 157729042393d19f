"""The rule for blocks with a list of experts: what it runs as the model did, and what it leaves."""

import copy
import io

import moe_blocks
import pytest
import torch
from models import patch
from moe_blocks import (
    BLOCKS,
    HIDDEN,
    DeepseekV2Block,
    Expert,
    FusedExpert,
    MixtralBlock,
    QwenBlock,
    SigmoidBlock,
)
from numerics import snr_db
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import turbo_nn
import turbo_ops
from turbo_nn.moe_block import MoEBlock
from turbo_ops.dispatch import REGISTRY


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    families = {op.family for op in REGISTRY.values()} if device.type == "cpu" else ()
    with turbo_ops.force(**dict.fromkeys(families, "reference")):
        yield


def model_of(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A model of one block, in training."""
    return nn.Sequential(BLOCKS[name]()).to(device, dtype).train()


def patched(model: nn.Module, recipe="bf16", **options) -> nn.Module:
    assert [v.reason for v in patch(model, recipe, **options) if v.rule == "moe"] == [None]
    return model


def reason(block: nn.Module, recipe="bf16") -> str | None:
    (verdict,) = (v for v in patch(nn.Sequential(block), recipe) if v.rule == "moe")
    return verdict.reason


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The results, and the gradients of x and all parameters; None counts as zeros."""
    x = x.clone().requires_grad_()
    answer = model(x)
    results = answer if isinstance(answer, tuple) else (answer,)
    total = sum(
        (y.float() * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum() for y in results
    )
    leaves = {"x": x} | dict(model.named_parameters())
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(total, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return {str(i): y for i, y in enumerate(results)} | dict(zip(wanted, grads, strict=True))


def agree(ours: dict[str, Tensor], right: dict[str, Tensor], least_snr: float | None = None) -> None:
    assert ours.keys() == right.keys()
    for name, expected in right.items():
        assert (ours[name].shape, ours[name].dtype) == (expected.shape, expected.dtype), name
        if least_snr is None:
            torch.testing.assert_close(
                ours[name], expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert snr_db(ours[name], expected) > least_snr, name


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_computes_what_it_did(name: str, training: bool, device: torch.device) -> None:
    model = model_of(name, device).train(training)
    x = torch.randn(3, 7, HIDDEN, device=device)
    state = {key: (id(value), value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    modules = list(model.named_modules())
    right = outcome(model, x)
    patched(model)
    assert isinstance(model[0], MoEBlock)
    assert isinstance(model[0], type(BLOCKS[name]()))
    ours = outcome(model, x)
    if name == "deepseek v2" and not training:  # its eval knows no gradients
        ours, right = {"0": ours["0"]}, {"0": right["0"]}
    agree(ours, right)
    assert list(model.named_modules()) == modules
    after = model.state_dict(keep_vars=True)
    assert all(id(after[key]) == was and after[key].equal(value) for key, (was, value) in state.items())
    turbo_nn.unpatch(model)
    assert type(model[0]) is type(BLOCKS[name]())
    assert "mixture" not in vars(model[0])


@pytest.mark.parametrize("name", BLOCKS)
def test_bf16(name: str, device: torch.device) -> None:
    model = model_of(name, device, torch.bfloat16)
    x = torch.randn(3, 16, HIDDEN, device=device).bfloat16()
    right = outcome(model, x)
    agree(outcome(patched(model), x), right, least_snr=25)


@pytest.mark.parametrize("name", ["mixtral", "qwen2", "deepseek v2"])
def test_autocast(name: str, device: torch.device) -> None:
    model, x = model_of(name, device), torch.randn(3, 16, HIDDEN, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        right = outcome(model, x)
        agree(outcome(patched(model), x), right, least_snr=30)


@pytest.mark.parametrize("name", ["qwen2", "sigmoid", "deepseek v3"])
def test_one_token_and_none(name: str, device: torch.device) -> None:
    model, x = model_of(name, device), torch.randn(1, 1, HIDDEN, device=device)
    right = outcome(model, x)
    agree(outcome(patched(model), x), right)
    if name == "deepseek v3":
        return  # its router cannot reshape nothing
    nothing = outcome(model, x[:, :0])
    assert nothing["0"].shape == (1, 0, HIDDEN)
    assert not any(value.any() for value in nothing.values())


def test_all_tokens_to_the_same_experts(device: torch.device) -> None:
    """Others get gradients of zero, not none, and no NaN."""
    model, x = model_of("qwen3", device), torch.rand(2, 9, HIDDEN, device=device)
    with torch.no_grad():
        model[0].gate.weight[2:] = -5.0
        model[0].gate.weight[:2] = 1.0
    right = outcome(model, x)
    ours = outcome(patched(model), x)
    agree(ours, right)
    assert not ours["0.experts.4.up_proj.weight"].any()
    assert ours["0.experts.1.up_proj.weight"].any()
    model(x)[0].sum().backward()
    assert all(p.grad is not None for p in model[0].experts.parameters())


@pytest.mark.parametrize("name", ["mixtral", "deepseek v2"])
def test_copies_and_checkpoints(name: str, device: torch.device) -> None:
    model, x = patched(model_of(name, device)), torch.randn(2, 5, HIDDEN, device=device)
    right = outcome(model, x)
    agree(outcome(copy.deepcopy(model), x), right)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor):
            return checkpoint(self[0], x, use_reentrant=False)

    agree(outcome(Checkpointed(model[0]), x), right)


def test_compiles_whole(device: torch.device) -> None:
    model, x = patched(model_of("qwen2", device)), torch.randn(2, 5, HIDDEN, device=device)
    agree(outcome(torch.compile(model, fullgraph=True, backend="aot_eager"), x), prefixed(outcome(model, x)))


def prefixed(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"_orig_mod.{name}" if "." in name else name: value for name, value in found.items()}


@pytest.mark.deterministic
def test_a_block_repeats_itself(device: torch.device) -> None:
    model, x = patched(model_of("qwen2", device)), torch.randn(4, 50, HIDDEN, device=device)
    one, other = outcome(model, x), outcome(model, x)
    assert all(one[name].equal(other[name]) for name in one)


def stacks(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the block runs its experts at once."""
    calls: list[turbo_nn.Recipe] = []
    real = turbo_ops.moe_experts

    def noted(*args, **options):
        calls.append(options["recipe"])
        return real(*args, **options)

    monkeypatch.setattr(turbo_ops, "moe_experts", noted)
    model(x)
    monkeypatch.undo()
    return bool(calls)


def test_hooks_see_what_they_saw(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers records router logits with hooks on the gate or the block."""
    model, x = model_of("qwen2", device), torch.randn(2, 5, HIDDEN, device=device)
    seen: list[Tensor] = []
    for module, index in ((model[0], 1), (model[0].gate, None), (model[0].shared_expert, None)):
        module.register_forward_hook(
            lambda module, inputs, y, index=index: seen.append(y if index is None else y[index])
        )
    model(x)
    before = list(seen)
    patched(model)
    seen.clear()
    assert stacks(model, x, monkeypatch)
    assert [y.shape for y in seen] == [y.shape for y in before]
    for one, other in zip(seen, before, strict=True):
        torch.testing.assert_close(one, other)


def hooked(model: nn.Module) -> None:
    model[0].experts[1].register_forward_hook(lambda module, inputs, y: 2 * y)


def hooked_layer(model: nn.Module) -> None:
    model[0].experts[1].up_proj.register_forward_hook(lambda module, inputs, y: 2 * y)


def overridden(model: nn.Module) -> None:
    expert = model[0].experts[0]
    expert.forward = lambda x, own=expert.forward: -own(x)


def other_activation(model: nn.Module) -> None:
    model[0].experts[3].act_fn = nn.ReLU()


def lora(model: nn.Module) -> None:
    tuners = pytest.importorskip("peft.tuners.lora")
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    assert isinstance(model[0].experts[0].up_proj, tuners.LoraLayer)


@pytest.mark.parametrize("change", [hooked, hooked_layer, overridden, other_activation, lora])
def test_what_came_after_the_patch_counts(change, device, monkeypatch) -> None:
    """The model's own forward runs where an expert is more than its layers."""
    model, x = patched(model_of("qwen3", device)), torch.randn(2, 7, HIDDEN, device=device)
    before = model(x)[0]
    change(model)
    assert not stacks(model, x, monkeypatch)
    ours = outcome(model, x)
    assert not torch.allclose(ours["0"], before)
    if change is overridden:
        return
    turbo_nn.unpatch(model)
    agree(ours, outcome(model, x))


def test_lora_on_the_gate(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    model, x = patched(model_of("qwen3", device)), torch.randn(2, 7, HIDDEN, device=device)
    config = peft.LoraConfig(r=2, target_modules=["gate"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    assert stacks(model, x, monkeypatch)
    ours = outcome(model, x)
    turbo_nn.unpatch(model)
    agree(ours, outcome(model, x))
    assert reason(model[0]) is None, "in either order"


def test_frozen_experts(device: torch.device) -> None:
    model, x = model_of("mixtral", device), torch.randn(2, 7, HIDDEN, device=device)
    model[0].experts[:3].requires_grad_(False)
    right = outcome(model, x)
    agree(outcome(patched(model), x), right)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"])
def test_recipes(recipe: str, device: torch.device) -> None:
    model, x = model_of("qwen3", device), torch.randn(4, 16, HIDDEN, device=device)
    right = outcome(model, x)
    patched(model, recipe)
    assert type(model[0].gate) is nn.Linear
    ours = outcome(model, x)
    assert not torch.allclose(ours["0"], right["0"], rtol=1e-4, atol=1e-4)
    agree(ours, right, least_snr=18)


def test_the_recipe_is_that_of_all_layers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, HIDDEN, device=device)
    for policy, one in (
        ({"*.up_proj": "bf16", "*": "fp8_rowwise"}, False),
        ({"*.experts.*": "bf16", "*": "fp8_rowwise"}, True),
        ({"*.experts.*": "fp8_rowwise", "*": "bf16"}, True),
    ):
        assert stacks(patched(model_of("qwen3", device), policy), x, monkeypatch) == one
    for recipe in ("fp8_delayed", "mxfp8"):
        assert f"experts have no recipe {recipe}" in reason(QwenBlock(), recipe)


class NoisyRouting(MixtralBlock):
    def routed(self, x: Tensor):
        logits, weights, index = super().routed(x)
        return logits, weights**2, index


class TwoInputs(MixtralBlock):
    def forward(self, hidden_states: Tensor, scale: float = 1.0):
        return super().forward(scale * hidden_states)


def with_part(name: str, part) -> nn.Module:
    block = MixtralBlock()
    setattr(block, name, part)
    return block


def with_experts(*experts: nn.Module | None) -> nn.Module:
    block = MixtralBlock()
    block.experts = nn.ModuleList(experts)
    return block


def with_hook() -> nn.Module:
    block = MixtralBlock()
    block.experts[2].register_forward_hook(lambda module, inputs, y: y)
    return block


def with_lora() -> nn.Module:
    peft, block = pytest.importorskip("peft"), QwenBlock()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["down_proj"]), block)
    return block


def without_k() -> nn.Module:
    block = SigmoidBlock()
    del block.num_experts_per_tok
    return block


LEFT = {
    "adds noise in training (jitter_noise=0.1): set it to 0": lambda: MixtralBlock(jitter=0.1),
    "disagrees with NoisyRouting on a probe": NoisyRouting,
    "its forward takes hidden_states, scale": TwoInputs,
    "it has a layer latent besides": lambda: with_part("latent", nn.Linear(2, 2)),
    "parameters or buffers of its own": lambda: with_part("scale", nn.Parameter(torch.ones(1))),
    "its shared_expert is no gated MLP": lambda: with_part("shared_expert", nn.Linear(HIDDEN, HIDDEN)),
    "a part of its experts": lambda: with_experts(*[Expert() for _ in range(3)], None),
    "its experts 0 and 1 differ": lambda: with_experts(Expert(), Expert(16)),
    "its experts 0 and 2 differ": lambda: with_experts(Expert(), Expert(), FusedExpert()),
    "its experts: disagrees": lambda: MixtralBlock(OddExpert),
    "its expert 2 has hooks": with_hook,
    "down_proj of its expert 0 is no plain linear layer (hooks, LoRA, quantised)": with_lora,
    "it has no top_k or num_experts_per_tok": without_k,
}


class OddExpert(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


@pytest.mark.parametrize("says", LEFT)
def test_what_it_cannot_run_is_left(says: str) -> None:
    block = LEFT[says]()
    assert says in reason(block)
    assert not isinstance(block, MoEBlock)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_probe_leaves_no_trace_and_no_memory(name: str) -> None:
    with torch.device("meta"):
        block = BLOCKS[name]()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert reason(block) is None
    assert torch.get_rng_state().equal(state)


def test_large_blocks_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of thousands of products err, and a loss of a thousandth must be seen."""
    for name, value in (("HIDDEN", 4096), ("EXPERTS", 96), ("K", 6)):
        monkeypatch.setattr(moe_blocks, name, value)
    with torch.device("meta"):
        for name in ("qwen3", "deepseek v3"):
            assert reason(BLOCKS[name]()) is None
        for alpha in (1e-3, 0.0):
            block = DeepseekV2Block(alpha)
            assert reason(block) is None
            assert block.mixture.adds_loss == (alpha > 0)


def test_a_loss_without_balance_is_not_invented(device: torch.device) -> None:
    block = DeepseekV2Block(alpha=0.0)
    x = torch.randn(2, 5, HIDDEN)
    right = outcome(block, x)
    assert reason(block) is None
    agree(outcome(block, x), right)
