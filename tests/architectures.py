"""Tiny models of the architectures that people fine-tune, and the table of what `patch` does to each.

python tests/architectures.py    # writes docs/architectures.md
"""

import sys
from pathlib import Path

import torch
import transformers
from mixtures import FAMILIES
from torch import Tensor, nn

import turbo_nn

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
RULES = ("linear", "rms_norm", "gated_mlp", "experts", "moe", "rotary", "causal_lm")
DECODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
WITH_HEAD_DIM = DECODER | {"head_dim": 16}
LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 96, "num_experts_per_tok": 1}
WHISPER = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_source_positions": 8,
    "max_target_positions": 32,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
VIT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
ROUTED = DECODER | {"num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "olmoe": "OLMoE",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "GLM-4 MoE",
}
ARCHITECTURES = {
    "Llama": ("LlamaForCausalLM", DECODER),
    "Llama 4": ("Llama4ForCausalLM", WITH_HEAD_DIM | LLAMA4),
    "Mistral": ("MistralForCausalLM", DECODER),
    "Qwen2": ("Qwen2ForCausalLM", DECODER),
    "Qwen3": ("Qwen3ForCausalLM", WITH_HEAD_DIM),
    "Gemma 2": ("Gemma2ForCausalLM", WITH_HEAD_DIM),
    "Gemma 3": ("Gemma3ForCausalLM", WITH_HEAD_DIM),
    "Phi-3, Phi-4": ("Phi3ForCausalLM", DECODER),
    "GLM-4": ("Glm4ForCausalLM", WITH_HEAD_DIM),
    "Cohere 2": ("Cohere2ForCausalLM", WITH_HEAD_DIM),
    "OLMo 2": ("Olmo2ForCausalLM", DECODER),
    "Granite": ("GraniteForCausalLM", DECODER),
    "StarCoder 2": ("Starcoder2ForCausalLM", DECODER),
    "GPT-NeoX": ("GPTNeoXForCausalLM", DECODER),
    "Falcon": ("FalconForCausalLM", DECODER),
    "GPT-2": (
        "GPT2LMHeadModel",
        {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "BERT": ("BertForMaskedLM", DECODER),
    "ViT": ("ViTForImageClassification", VIT),
    "Whisper": ("WhisperForConditionalGeneration", WHISPER),
    "T5": ("T5ForConditionalGeneration", T5 | {"vocab_size": 128}),
    **{MIXTURES[family]: (cls, ROUTED | own) for family, (cls, own) in FAMILIES.items()},
}


def build(name: str, device: torch.device) -> nn.Module:
    """The model with random weights, without dropout."""
    cls = getattr(transformers, ARCHITECTURES[name][0])
    torch.manual_seed(0)
    model = cls(cls.config_class(**ARCHITECTURES[name][1])).to(device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for attribute in ("dropout", "attention_dropout", "activation_dropout", "attention_probs_dropout_prob"):
        for module in model.modules():
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model


def inputs(name: str, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 128, (2, 12), generator=generator)
    found = {"input_ids": ids, "labels": ids}
    if name == "ViT":
        found = {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "labels": torch.tensor([0, 1]),
        }
    elif name == "Whisper":
        found = {"input_features": torch.randn(2, 8, 16, generator=generator), "labels": ids}
    return {key: value.to(device) for key, value in found.items()}


def row(name: str) -> str:
    report = turbo_nn.patch(build(name, torch.device("cpu")), "fp8_blockwise")
    cells = []
    for rule in RULES:
        mine = [verdict for verdict in report if verdict.rule == rule]
        left = sorted({verdict.reason for verdict in mine if verdict.reason})
        patched = sum(verdict.reason is None for verdict in mine)
        cells.append("; ".join([f"{patched} of {len(mine)}", *left]) if mine else "")
    return f"| {name} | `{ARCHITECTURES[name][0]}` | {' | '.join(cells)} |"


def page() -> str:
    head = f"""# Architectures

Made by `python tests/architectures.py` with transformers' classes of these names, 2 layers each. What is not
patched runs as it did, and says why. `tests/test_architectures.py` compares loss, logits and gradients with
the unpatched model's, in eval and in training.

| model | class | {" | ".join(RULES)} |
|---|---|{"---|" * len(RULES)}
"""
    return head + "\n".join(row(name) for name in ARCHITECTURES) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
