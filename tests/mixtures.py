"""Small mixtures of experts as transformers defines them, and what comes of one's experts."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models import DECODER, patch, reference_on_cpu
from numerics import snr_db
from torch import Tensor, nn

import turbo_ops

ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MULTI_HEAD = {"head_dim": 8, "num_key_value_heads": 4, "n_group": 2, "topk_group": 2}
FAMILIES = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 32}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", ROUTED | LATENT | MULTI_HEAD),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 4, "rope_parameters": {"rope_type": "default"}}),
    "glm4_moe": ("Glm4MoeForCausalLM", ROUTED),
}
families = pytest.mark.parametrize("family", list(FAMILIES))


@contextmanager
def on_reference(device: torch.device) -> Iterator[None]:
    ops = ("grouped_gemm", "moe_permute", "swiglu")
    pins = {} if device.type == "cuda" else dict.fromkeys(ops, "reference")
    with reference_on_cpu(device), turbo_ops.force(**pins):
        yield


def build(family: str, device: torch.device | str = "cpu", **options) -> nn.Module:
    """A model in eval mode whose experts are as loud as the rest."""
    name, config = FAMILIES[family]
    cls = getattr(pytest.importorskip("transformers"), name)
    torch.manual_seed(0)
    with torch.device(device):
        model = cls(cls.config_class(**DECODER | {"num_experts_per_tok": 2} | config, **options))
    for name, weight in model.named_parameters():
        if "experts." in name and weight.ndim > 1 and not weight.is_meta:
            nn.init.normal_(weight, std=0.2)
    return model.eval()


def experts_of(model: nn.Module) -> nn.Module:
    return model.model.layers[-1].mlp.experts


def inputs(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """11 tokens, two choices of each, none of them of the last of four experts, and their weights."""
    x = torch.randn(11, DECODER["hidden_size"], device=device, dtype=dtype, requires_grad=True)
    index = torch.rand(11, 3, device=device).topk(2).indices
    return x, index, torch.rand(11, 2, device=device, requires_grad=True)


def results(module: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The output, and the gradients of x, the routing weights and all parameters that want one."""
    y = module(*given)
    wanted = [given[0], given[2], *(p for p in module.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y.float().square().sum(), wanted)]


def assert_alike(actual: list[Tensor], expected: list[Tensor], least_db: float) -> None:
    for number, (ours, right) in enumerate(zip(actual, expected, strict=True)):
        assert (ours.shape, ours.dtype) == (right.shape, right.dtype)
        assert snr_db(ours, right) > least_db, f"result {number}: {snr_db(ours, right):.1f} dB"


def reasons(module: nn.Module, recipe: str = "bf16") -> list[str | None]:
    report = patch(nn.ModuleDict({"experts": module}), recipe)
    return [verdict.reason for verdict in report if verdict.rule == "experts"]
