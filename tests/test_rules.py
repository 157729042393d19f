"""The rules: what is patched, what is left and why, and how a probe finds out."""

import copy
import dataclasses
import pickle
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from models import (
    HIDDEN,
    MIXTURES,
    GatedRMSNorm,
    GemmaRMSNorm,
    LlamaRMSNorm,
    OlmoRMSNorm,
    PartialRMSNorm,
    Toy,
    TwiceRoundedRMSNorm,
    build,
    patch,
    reasons,
    reference_on_cpu,
    snapshot,
)
from numerics import snr_db
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import turbo_nn
import turbo_ops
from turbo_nn import linear, rms_norm
from turbo_nn.rule import Prover

patch_module = sys.modules["turbo_nn.patch"]  # turbo_nn.patch is the function


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


@pytest.mark.parametrize("family", list(MIXTURES))
def test_routers_and_experts(family: str) -> None:
    model = build(family)
    report = patch(model, strict=True)
    found = {v.fqn: v.reason for v in report}
    assert [v.fqn.rpartition(".")[2] for v in report.patched if v.rule == "experts"] == ["experts"] * 2
    with pytest.raises(turbo_nn.LeftError, match="experts"):
        patch(model, "mxfp8", strict=True)
    patch(model, "mxfp8", strict=True, skip="*.experts")
    gates = {fqn: reason for fqn, reason in found.items() if fqn.endswith(".gate")}
    assert len(gates) == 2
    assert all("router" in reason for reason in gates.values())
    assert found["model.layers.0.self_attn.q_proj"] is None


def test_routers_by_structure() -> None:
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8)])
            self.gate, self.gate_proj, self.shared_expert_gate = (nn.Linear(8, n) for n in (4, 8, 1))
            self.router = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    found = reasons(nn.Sequential(Gated(), nn.ModuleDict({"gate": nn.Linear(8, 8)})))
    kept = {fqn for fqn, reason in found.items() if reason}
    assert kept == {"0.gate", "0.shared_expert_gate", "0.router.0", "0.router.1"}
    assert all("router" in found[fqn] for fqn in kept)


def test_a_tied_head_is_left_and_stays_tied() -> None:
    model = Toy(tied=True)
    found = reasons(model)
    assert "tied" in found["head"]
    assert model.head.weight is model.embedding.weight
    assert "high precision" in found["embedding"]


def test_naming_a_layer_overrules_a_default() -> None:
    for pattern in ("head", "he?d", "*"):
        model = Toy(tied=True)
        found = reasons(model, {pattern: "fp8_blockwise"})
        assert (found["head"] is None) == (pattern == "head")
        assert model.head.weight is model.embedding.weight


def lookalikes(device: torch.device) -> dict[str, nn.Module]:
    class OwnForward(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    class RMSNormWithDropout(LlamaRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    hooked, computed, integers = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    hooked.forward = lambda x: x
    nn.utils.parametrizations.weight_norm(computed)
    integers.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)
    conv1d = type("Conv1D", (nn.Module,), {})()
    conv1d.nf, conv1d.weight = 8, nn.Parameter(torch.zeros(8, 8))
    return {
        "forward of its own": OwnForward(8, 8),
        "disagrees": RMSNormWithDropout(8).eval(),
        "float64": nn.RMSNorm(8, dtype=torch.float64),
        "accelerate": hooked,
        "parametrize": computed,
        "int8": integers,
        "[in, out]": conv1d,
        "shape": nn.LazyLinear(8),
        "rule": nn.Conv2d(1, 1, 1),
    }


def test_lookalikes_are_left_with_a_reason(device: torch.device) -> None:
    for says, module in lookalikes(device).items():
        model = nn.Sequential(module, nn.Linear(8, 8))
        before = snapshot(model[0])
        found = reasons(model)
        assert snapshot(model[0]) == before
        assert says in found["0"]
        assert found["1"] is None, "one odd layer does not stop the rest"


def test_multihead_attention_reads_out_proj_itself() -> None:
    found = reasons(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0))
    assert found["self_attn.out_proj"]
    assert "fast path" in found["linear1"]
    named = reasons(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), {"linear1": "fp8_blockwise"})
    assert named["linear1"] is None


def test_bf16_turns_a_casting_layer_back() -> None:
    model = nn.Sequential(turbo_nn.Linear(8, 8, recipe="fp8_blockwise"), nn.Linear(8, 8))
    found = reasons(model, "bf16")
    assert found == {"0": None, "1": "recipe bf16: nothing to cast"}
    assert not model[0].recipe.casts
    turbo_nn.unpatch(model)
    assert model[0].recipe == turbo_nn.RECIPES["fp8_blockwise"]


class Labelled(nn.Linear):
    """A subclass without a forward of its own: it may go on being what it is."""

    def label(self) -> str:
        return "mine"


def test_a_plain_subclass_stays_an_instance_of_itself(device: torch.device) -> None:
    model = nn.Sequential(Labelled(8, 8)).to(device)
    assert reasons(model) == {"0": None}
    x = torch.randn(3, 8, device=device)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin[0], Labelled)
        assert isinstance(twin[0], turbo_nn.Linear)
        assert twin[0].label() == "mine"
        assert torch.equal(twin(x), model(x))
        turbo_nn.unpatch(twin)
        assert type(twin[0]) is Labelled
        patch(twin)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("cls", [LlamaRMSNorm, OlmoRMSNorm, GemmaRMSNorm])
def test_the_variant_of_a_norm_is_found(cls: type, verify: bool, device: torch.device) -> None:
    module = cls(HIDDEN).to(device)
    for of_x, of_weight in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        module.to(of_weight)
        x = torch.randn(64, HIDDEN, device=device).to(of_x)
        expected = module(x)
        for _ in range(2):  # patching again finds the same one
            assert reasons(module, verify=verify) == {"": None}
            actual = module(x)
            assert actual.dtype == expected.dtype
            assert snr_db(actual, expected) > 60
            assert (actual != expected).float().mean() < (0.01 if of_x == torch.bfloat16 else 1)
        turbo_nn.unpatch(module)


class WeightlessRMSNorm(nn.Module):
    """As Llama 4 has it on queries and keys: of any width."""

    variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_weight(dtype: torch.dtype, device: torch.device) -> None:
    module, x = WeightlessRMSNorm(), torch.randn(3, 2, 40, device=device).to(dtype)
    expected = module(x)
    assert reasons(nn.Sequential(module)) == {"0": None}
    assert isinstance(module, turbo_nn.RMSNorm)
    assert "eps=1e-06" in repr(module)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_torch(dtype: torch.dtype, device: torch.device) -> None:
    for options in ({"eps": 1e-6}, {}, {"eps": 1e-6, "elementwise_affine": False}):
        module = nn.RMSNorm(HIDDEN, device=device, dtype=dtype, **options)
        x = torch.randn(8, HIDDEN, device=device).to(dtype)
        expected = module(x)
        assert reasons(nn.Sequential(module)) == {"0": None}
        torch.testing.assert_close(module(x), expected)
    assert "dimension" in reasons(nn.Sequential(nn.RMSNorm((4, 4))))["0"]


@pytest.mark.parametrize(
    ("cls", "says"),
    [(GatedRMSNorm, "takes x, gate"), (PartialRMSNorm, "off by"), (TwiceRoundedRMSNorm, "round differently")],
)
def test_impostors_are_refused(cls: type, says: str) -> None:
    module = cls(HIDDEN)
    assert says in reasons(nn.Sequential(module))["0"]
    assert type(module) is cls


def test_a_probe_leaves_no_trace(device: torch.device) -> None:
    model = build("llama", device)
    torch.manual_seed(3)
    state, expected = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    patch(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.parameters(), expected))
    assert all(p.grad is None for p in model.parameters())


def test_a_probe_does_not_meet_the_users_pins() -> None:
    """A probe is on the CPU, a pin is for the GPU."""
    with turbo_ops.force(rms_norm_fwd="blaslt"):
        assert isinstance(Prover(True).pick(rms_norm.RULE, LlamaRMSNorm(), turbo_nn.Recipe()), turbo_nn.Twin)


def test_a_large_head_costs_a_small_probe() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 131072), nn.Linear(131072, 4096))
    start = time.perf_counter()
    assert reasons(model) == {"0": None, "1": None}
    assert time.perf_counter() - start < 2


def test_size_leaves_layers_out_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    assert [v.reason for v in turbo_nn.patch(model, "mxfp8")] == [None]
    small = dataclasses.replace(linear.RULE, small=lambda module: "too small")
    monkeypatch.setattr(patch_module, "RULES", [small])
    report = turbo_nn.patch(model, "mxfp8")
    assert [v.reason for v in report.refused] == ["too small"]
    assert [v.reason for v in turbo_nn.patch(model, "mxfp8", convert_small=True)] == [None]


def test_the_smallest_layer_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALLEST", {"sm90": 64 * 64})
    with FakeTensorMode():
        for device, width, says in (("cuda", 63, "64x63 is too small"), ("cuda", 64, None), ("cpu", 1, None)):
            layer = SimpleNamespace(weight=torch.empty(64, width, device=device))
            answer = linear.RULE.small(layer)
            assert answer is None if says is None else says in answer and "convert_small=True" in answer
