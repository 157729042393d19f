"""Small random models: one per Hugging Face family, and a toy that needs no transformers."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

import turbo_nn
import turbo_ops

VOCABULARY, HIDDEN = 128, 64
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
FAMILIES = {  # the class, and what its configuration is made of
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", DECODER),
    "mistral": ("MistralForCausalLM", DECODER),
    "gemma3": ("Gemma3ForCausalLM", DECODER | {"sliding_window": 8}),
    "phi3": ("Phi3ForCausalLM", DECODER),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "bert": ("BertForMaskedLM", ENCODER),
}
DECODERS = [family for family in FAMILIES if family != "bert"]
MIXTURES = {
    "mixtral": ("MixtralForCausalLM", DECODER | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", DECODER | {"num_experts": 4, "moe_intermediate_size": 32}),
}


def build(family: str, device: torch.device | str = "cpu", **options) -> nn.Module:
    """A model in eval mode whose norms have weights that are not all one."""
    transformers = pytest.importorskip("transformers")
    name, config = (FAMILIES | MIXTURES)[family]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    with torch.device(device):
        model = cls(cls.config_class(**config, **options))
    for weight in model.parameters():
        if weight.ndim == 1 and not weight.is_meta:
            nn.init.normal_(weight, mean=weight.mean().item(), std=0.2)
    return model.eval()


def tokens(device: torch.device | str = "cpu") -> Tensor:
    return torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)


def loss_of(model: nn.Module) -> Tensor:
    ids = tokens(next(model.parameters()).device)
    return model(input_ids=ids, labels=ids).loss


@contextlib.contextmanager
def reference_on_cpu(device: torch.device):
    """Modules do not depend on the backend, and the interpreter is 100 times slower than the reference."""
    pins = {} if device.type == "cuda" else dict.fromkeys(("quantize", "gemm", "rms_norm"), "reference")
    with turbo_ops.force(**pins):
        yield


def patch(model: nn.Module, recipe="fp8_blockwise", **options) -> turbo_nn.Report:
    """Tiny layers are too small to gain on a GPU, and this is not about speed."""
    return turbo_nn.patch(model, recipe, convert_small=True, **options)


def snapshot(model: nn.Module) -> list[tuple]:
    """Everything that must not change: objects, classes, attributes, parameters."""
    return [
        (name, id(m), type(m), list(vars(m)), m.training, {k: id(p) for k, p in m._parameters.items()})
        for name, m in model.named_modules(remove_duplicate=False)
    ]


def reasons(model: nn.Module, recipe="fp8_blockwise", **options) -> dict[str, str | None]:
    return {v.fqn: v.reason for v in patch(model, recipe, **options)}


class LlamaRMSNorm(nn.Module):
    """w * x_hat.to(dtype of x)."""

    def __init__(self, width: int = HIDDEN):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.variance_epsilon = 1e-5

    def x_hat(self, x: Tensor) -> Tensor:
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.x_hat(x).to(x.dtype)


class OlmoRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.x_hat(x)).to(x.dtype)


class TwiceRoundedRMSNorm(LlamaRMSNorm):
    """Rounds as Llama does and returns the dtype that Olmo does: no variant has both."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return ((1 + self.weight.float()) * self.x_hat(x)).to(x.dtype)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * torch.sigmoid(gate)


class PartialRMSNorm(LlamaRMSNorm):
    """Statistics over the first half only."""

    def x_hat(self, x: Tensor) -> Tensor:
        half = x.float()[..., : x.shape[-1] // 2]
        return x.float() * torch.rsqrt(half.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm()
        self.up = nn.Linear(HIDDEN, 96)
        self.down = nn.Linear(96, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Tokens [..., T] -> logits [..., T, VOCABULARY]."""

    def __init__(self, tied: bool = False, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gradients(model: nn.Module, *args) -> list[Tensor]:
    """Of a fixed loss, one per parameter that wants one."""
    y = model(*args)
    wanted = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(y.float().square().mean(), wanted))
