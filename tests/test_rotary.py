"""Rotary position embedding: the op beside transformers' functions, and the rule for attention."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from models import build, loss_of, patch, reference_on_cpu, tokens
from numerics import assert_close
from torch import Tensor, nn

import turbo_nn
import turbo_ops
from turbo_nn import rotary
from turbo_nn.patch import RULES

pytest.importorskip("transformers")

from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3

ROTATIONS = {  # transformers' function, ours, rotated features of 16
    "halves": (llama, rotary.rotate_halves, 16),
    "half of the features": (phi3, rotary.rotate_halves, 8),
    "pairs": (cohere, rotary.rotate_pairs, 16),
    "pairs by halves": (glm, rotary.rotate_pairs_by_halves, 8),
}


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


def drawn(device: torch.device, rotated: int = 16) -> list[Tensor]:
    """q and k as a projection leaves them, and angles whose halves differ."""
    q, k = (torch.randn(2, 7, heads, 16, device=device).transpose(1, 2) for heads in (4, 2))
    return [q.requires_grad_(), k.requires_grad_(), *torch.randn(2, 2, 7, rotated, device=device)]


def outcome(function, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k)]
    rotated = function(*leaves, cos.to(dtype), sin.to(dtype))
    return [
        *rotated,
        *torch.autograd.grad(rotated, leaves, [x.detach().flip(0).contiguous() for x in rotated]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_it_is_transformers_function(rotation: str, dtype: torch.dtype, device: torch.device) -> None:
    theirs, ours, rotated = ROTATIONS[rotation]
    inputs = [x.detach().to(dtype).double() for x in drawn(device, rotated)]
    if theirs is cohere:  # in fp32 whatever it is given
        inputs = [x.float() for x in inputs]
    exact = outcome(theirs, *inputs, inputs[0].dtype)
    call = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for function in (ours, call):
        for one, right in zip(outcome(function, *inputs, dtype), exact, strict=True):
            assert one.dtype == dtype
            within = 1e-5 if dtype == torch.float32 else 2e-2
            assert_close(one.float().contiguous(), right.float().contiguous(), within, rotation)


def test_heads_after_positions(device: torch.device) -> None:
    q, k, cos, sin = drawn(device)
    expected = rotary.rotate_halves(q, k, cos, sin)
    flipped = rotary.rotate_halves(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for one, other in zip(flipped, expected, strict=True):
        assert one.equal(other.transpose(1, 2))


@pytest.mark.deterministic
def test_inputs_stay_as_they_are(device: torch.device) -> None:
    q, k, cos, sin = drawn(device)
    before = [x.detach().clone() for x in (q, k, cos, sin)]
    rotated = turbo_ops.rope(q, k, cos, sin)
    grads = [torch.randn_like(x) for x in rotated]
    kept = [g.clone() for g in grads]
    first, second = (torch.autograd.grad(rotated, (q, k), grads, retain_graph=True) for _ in "12")
    assert all(a.equal(b) for a, b in zip((q, k, cos, sin, *grads), (*before, *kept), strict=True))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(2, 2, 6, 16)}, r"k \(2, 2, 6, 16\).*give \[B, H, S, D\] twice"),
        ({"cos": torch.ones(2, 7, 16, 1)}, r"cos \(2, 7, 16, 1\)"),
        ({"cos": torch.ones(2, 7, 18), "sin": torch.ones(2, 7, 18)}, "R even and at most D"),
        ({"cos": torch.ones(2, 7, 15), "sin": torch.ones(2, 7, 15)}, "R even and at most D"),
        ({"cos": torch.ones(3, 7, 16), "sin": torch.ones(3, 7, 16)}, r"\[B or 1, S, R\]"),
        ({"k": torch.ones(2, 2, 7, 16).half()}, "k torch.float16.*give fp32, bf16 or fp16"),
        ({"cos": torch.ones(2, 7, 16).double()}, "cos torch.float64.*give fp32, bf16 or fp16"),
        ({"cos": torch.ones(2, 7, 16, requires_grad=True)}, "cos and sin get no gradient here: detach"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Tensor], message: str, device: torch.device) -> None:
    inputs = dict(zip(("q", "k", "cos", "sin"), drawn(device), strict=True))
    changed = {name: x.detach().to(device).requires_grad_(x.requires_grad) for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        turbo_ops.rope(**inputs | changed)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    found: list[bool] = []
    plain = turbo_ops.rope

    def rope(*args, **kwargs):
        found.append(kwargs["interleaved"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(turbo_ops, "rope", rope)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "phi3"])
def test_every_attention_runs_it(family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family, device)
    expected = loss_of(model)
    report = patch(model, "bf16", only="*attn")
    assert {v.rule for v in report.patched} == {"rotary"}
    calls = counted(monkeypatch)
    torch.testing.assert_close(loss_of(model), expected)
    assert calls == [False] * model.config.num_hidden_layers
    turbo_nn.unpatch(model)
    torch.testing.assert_close(loss_of(model), expected)
    assert len(calls) == model.config.num_hidden_layers


def test_twins_are_copied_pickled_and_still_their_own_class(device: torch.device) -> None:
    model = build("llama", device).eval()
    patch(model, "bf16")
    expected = model(tokens(device)).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention = twin.model.layers[0].self_attn
        assert isinstance(attention, turbo_nn.RotaryAttention)
        assert isinstance(attention, LlamaAttention)
        assert twin(tokens(device)).logits.equal(expected)


def test_the_models_own_file_keeps_its_function(device: torch.device) -> None:
    patch(build("llama", device), "bf16")
    forward = inspect.unwrap(LlamaAttention.forward)
    assert forward.__globals__["apply_rotary_pos_emb"] is llama
    assert "apply_rotary_pos_emb" in forward.__code__.co_names


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(x, x, *torch.ones(2, 1, x.shape[2], x.shape[3]))


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turned the other way."""
    return llama(q, k, cos, -sin)


def hidden_call(function):
    calls = [function]

    @functools.wraps(function)
    def decorated(*args):
        return calls[0](*args)

    return decorated


def verdict_of(cls: type[nn.Module]) -> turbo_nn.Verdict:
    return next(v for v in turbo_nn.patch(nn.Sequential(cls()), "bf16") if v.fqn == "0")


def test_another_rotation_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "disagrees with Attention on a probe" in verdict_of(Attention).reason
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", lambda q, k, positions: (q, k))
    assert verdict_of(Attention).reason == "its apply_rotary_pos_emb takes q, k, positions"


def test_a_decorator_that_hides_the_forward_is_left() -> None:
    class Hidden(Attention):
        forward = hidden_call(Attention.forward)

    assert verdict_of(Hidden).reason == "its forward's decorator does not show what it calls"


def test_the_kind_is_found_by_probe() -> None:
    rule = next(rule for rule in RULES if rule.name == "rotary")
    twin = turbo_nn.rule.Prover(True).pick(rule, _bare(CohereAttention), turbo_nn.RECIPES["bf16"])
    assert issubclass(twin.cls, rotary.PairedRotaryAttention)
    assert issubclass(twin.cls, CohereAttention)


def _bare(cls: type[nn.Module]) -> nn.Module:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def test_other_angles_are_the_models_own_matter(device: torch.device) -> None:
    q, k, cos, sin = drawn(device)
    rotate = rotary.where_it_fits(rotary.rotate_halves, llama)
    flat = [angles[0] for angles in (cos, sin)]
    for one, other in zip(rotate(q, k, *flat, unsqueeze_dim=0), llama(q, k, *flat, 0), strict=True):
        torch.testing.assert_close(one, other)
    learned = cos.clone().requires_grad_()
    rotate(q, k, learned, sin)[0].sum().backward()
    assert learned.grad is not None


def test_an_older_signature_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return llama(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", older)
    assert "takes q, k, cos, sin, position_ids" in verdict_of(Attention).reason
