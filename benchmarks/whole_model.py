"""Model level: models of transformers with random weights, as they are and patched by recipe."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from numerics import snr_db
from torch import Tensor, nn

import turbo_nn
import turbo_ops
from benchmarks.session import Session, Variant, WrongError
from benchmarks.tables import SNR_CAP

LOSS_GAP = 0.02  # of the unpatched loss: the bound that fine-tuning is held to as well


class Model(NamedTuple):
    """A configuration of transformers by size, and the recipes to patch it with."""

    config: str
    shapes: dict[str, dict[str, int | bool]]
    recipes: dict[str, str | dict[str, str]]
    baseline: str = "HF eager"
    experts: str | None = None  # transformers' implementation of the baseline


MODELS = {
    "llama": Model(  # Llama-3-8B with 4 of its 32 layers
        "LlamaConfig",
        {
            "bench": {
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "num_hidden_layers": 4,
                "vocab_size": 128256,
                "max_position_embeddings": 8192,
            },
            "test": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_hidden_layers": 1,
                "vocab_size": 256,
            },
        },
        {
            "fp8_tensorwise": "fp8_tensorwise",
            "fp8_delayed": "fp8_delayed",
            "fp8_blockwise": "fp8_blockwise",
            "fp8_delayed, bf16 head": {"lm_head": "bf16", "*": "fp8_delayed"},
        },
    ),
    "qwen3_moe": Model(  # Qwen3-30B-A3B with 4 of its 48 layers
        "Qwen3MoeConfig",
        {
            "bench": {
                "hidden_size": 2048,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_hidden_layers": 4,
                "vocab_size": 151936,
            },
            "test": {
                "hidden_size": 64,
                "moe_intermediate_size": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "num_hidden_layers": 1,
                "vocab_size": 256,
            },
        },
        {name: name for name in ("bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise")},
        "HF grouped_mm",
        "grouped_mm",
    ),
}
TOKENS = {"bench": (2, 4096), "test": (2, 16)}
LOGIT_TOKENS = 128  # of the first sequence: enough for an SNR, and all of them are 2 GB


def measure_model(session: Session, name: str) -> None:
    """Step and peak memory of Hugging Face's model, then of the same object patched."""
    batch, length = TOKENS[session.size]
    model, shape = MODELS[name], MODELS[name].shapes[session.size]
    kind = model.config.removesuffix("Config")
    case = f"{kind} {shape['hidden_size']}, {shape['num_hidden_layers']} layers, {batch}x{length}"
    made = Made(session, model)
    variants = [
        Variant(model.baseline, lambda: made.model, 0.0),
        *(Variant(name, functools.partial(made.patched, how), 0.0) for name, how in model.recipes.items()),
    ]
    session.compare("model", case, variants, functools.partial(_measure_model, session, made))


class Made:
    """The model, its tokens and what it computes unpatched: made on first use, so that a failure is a row."""

    def __init__(self, session: Session, model: Model):
        self._session, self._model = session, model
        self.report: Any = None

    @functools.cached_property
    def model(self) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config_class = getattr(transformers, self._model.config)
        config = config_class(**self._model.shapes[self._session.size], tie_word_embeddings=False)
        how = {"experts_implementation": self._model.experts} if self._model.experts else {}
        with self._session.device:
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **how)

    @functools.cached_property
    def ids(self) -> Tensor:
        vocabulary = self._model.shapes[self._session.size]["vocab_size"]
        return torch.randint(vocabulary, TOKENS[self._session.size], device=self._session.device)

    @functools.cached_property
    def unpatched(self) -> tuple[float, Tensor]:
        return self.compute(self.model)

    def compute(self, model: nn.Module) -> tuple[float, Tensor]:
        """Loss, and logits of the first tokens: in eval, since a patched model makes none in training."""
        with torch.no_grad():
            output = model.eval()(input_ids=self.ids, labels=self.ids)
            model.train()
            return output.loss.item(), output.logits[0, :LOGIT_TOKENS].clone()

    def patched(self, recipe: str | dict[str, str]) -> nn.Module:
        self.report = turbo_nn.patch(self.model, recipe)
        return self.model


def _measure_model(session: Session, made: Made, variant: Variant) -> dict:
    loss, logits = made.unpatched
    model = variant.build()
    try:
        ours, our_logits = made.compute(model)
        if not abs(ours / loss - 1) <= LOSS_GAP:
            raise WrongError(f"loss {ours:.4f}, unpatched {loss:.4f}")
        found = {
            "loss": ours,
            "loss_gap": ours / loss - 1,
            "snr_y_db": min(snr_db(our_logits, logits), SNR_CAP),
        }
        if made.report:
            found |= {"patched": len(made.report.patched), "left": len(made.report.left)}
        leaves = list(model.parameters())
        step = _step(model, made.ids)
        ms = session.ms(step, drop=leaves)

        def dropped() -> None:
            model.zero_grad(set_to_none=True)
            step()

        peak = session.peak_gib(dropped)
    finally:
        model.zero_grad(set_to_none=True)
        turbo_nn.unpatch(model)
    return {"ms": ms, **found, "tokens_per_s": made.ids.numel() / ms * 1e3, "peak_gib": peak}


def _step(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        turbo_ops.weights_changed()  # as after an optimizer's step
        turbo_ops.delayed.step()
        model(input_ids=ids, labels=ids).loss.backward()

    return step
