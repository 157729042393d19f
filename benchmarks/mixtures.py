"""Mixtures of experts: grouped linear layers beside torch's grouped product, a block beside transformers'."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import turbo_nn
import turbo_ops
from benchmarks.layers import LEAST_BF16_SNR, least_snr, snr_of
from benchmarks.session import Session, Variant

# experts, tokens' choices, in, out: gate_up of Mixtral-8x7B, Qwen3-30B-A3B and DeepSeek-V3 (an eighth of it)
GROUPED = {
    "bench": {
        "mixtral": (8, 16384, 4096, 28672),
        "qwen3": (128, 65536, 2048, 1536),
        "deepseek_v3": (32, 32768, 7168, 4096),
    },
    "test": {"small": (4, 70, 32, 48)},
}
# Qwen3-30B-A3B: tokens, hidden, intermediate, experts, choices
BLOCK = {"bench": (8192, 2048, 768, 128, 8), "test": (24, 32, 16, 4, 2)}
RECIPES = ("bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise")
ALIGN = 128  # what `moe_experts` gives FP8 products
NOISE = 3.0  # dB that a block of two layers may lose on one


class Groups(NamedTuple):
    """A layout of the same tokens: rows, their gradients, where groups end, and where each token is."""

    x: Tensor
    grad: Tensor
    ends: Tensor
    places: Tensor


def measure_grouped(session: Session) -> None:
    """Step of a linear layer an expert; an eighth of the experts has about a third of the tokens."""
    for name, (experts, tokens, width, out) in GROUPED[session.size].items():
        torch.manual_seed(0)
        weight = torch.randn(experts, out, width, device=session.device).mul_(width**-0.5).bfloat16()
        weight.requires_grad_()
        layouts = {align: _groups(session, experts, tokens, (width, out), align) for align in (1, ALIGN)}
        expected: list[tuple[Tensor, ...]] = []
        flops = 6 * tokens * width * out
        measure = functools.partial(_measure_grouped, session, layouts, weight, flops, expected)
        case = f"{name} E{experts} {tokens}x{width}x{out}"
        session.compare("grouped", case, [_TORCH, *map(_by_recipe, RECIPES)], measure)


def _plain(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.transpose(1, 2), ends.int())


_TORCH = Variant("torch._grouped_mm", lambda: (_plain, 1), LEAST_BF16_SNR)


def _by_recipe(name: str) -> Variant:
    recipe = turbo_nn.RECIPES[name]
    align = ALIGN if recipe.casts else 1

    def run(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        turbo_ops.weights_changed()
        return turbo_ops.grouped_linear(x, weight, ends, None, recipe, align=align)

    return Variant(name, lambda: (run, align), least_snr(recipe))


def _groups(session: Session, experts: int, tokens: int, extents: tuple[int, int], align: int) -> Groups:
    torch.manual_seed(1)
    share = 1 / (torch.arange(experts) + experts / 8)
    sizes = (share / share.sum() * tokens).long()
    sizes[0] += tokens - sizes.sum()
    chosen = torch.repeat_interleave(torch.arange(experts), sizes)[torch.randperm(tokens)]
    x, grad = (torch.randn(tokens, width, device=session.device).bfloat16() for width in extents)
    rows, permutation = turbo_ops.moe_permute(x, chosen[:, None].to(session.device), experts, align=align)
    grads, _ = turbo_ops.moe_permute(grad, chosen[:, None].to(session.device), experts, align=align)
    return Groups(rows.requires_grad_(), grads, permutation.ends, permutation.places[:, 0])


def _measure_grouped(
    session: Session,
    layouts: dict[int, Groups],
    weight: Tensor,
    flops: float,
    expected: list,
    variant: Variant,
) -> dict:
    build: Any = variant.build()
    run, align = build
    x, grad, ends, places = layouts[align]

    def step() -> tuple[Tensor, ...]:
        y = run(x, weight, ends)
        return y, *torch.autograd.grad(y, (x, weight), grad)

    y, grad_x, grad_weight = step()
    ours = y[places], grad_x[places], grad_weight[-1].clone()
    del y, grad_x, grad_weight
    if not expected:
        expected.append(ours)
    found = snr_of(ours, expected[0], variant.least_snr)
    del ours
    ms = session.ms(step)
    of = "bf16" if align == 1 else "fp8"
    found |= session.rate(ms, of, flops=flops) | {"peak_gib": session.peak_gib(step)}
    return {"ms": ms, **found}


def measure_moe(session: Session) -> None:
    """Step of transformers' Qwen3-MoE block with torch's grouped products, and of the same object patched."""
    tokens, hidden, middle, experts, k = BLOCK[session.size]
    made: dict[str, Any] = {}

    def block() -> nn.Module:
        if not made:
            made["block"] = _block(session, hidden, middle, experts, k)
            made["x"] = torch.randn(1, tokens, hidden, device=session.device).bfloat16().requires_grad_()
            made["grad"] = torch.randn(1, tokens, hidden, device=session.device).bfloat16()
        turbo_nn.unpatch(made["block"])
        return made["block"]

    def patched(recipe: str) -> nn.Module:
        turbo_nn.patch(block(), recipe, strict=True, convert_small=True)
        return made["block"]

    variants = [Variant("transformers grouped_mm", block, LEAST_BF16_SNR)]
    for name in RECIPES:
        floor = least_snr(turbo_nn.RECIPES[name]) - NOISE
        variants.append(Variant(name, functools.partial(patched, name), floor))
    flops = 18 * tokens * k * hidden * middle
    measure = functools.partial(_measure_block, session, made, flops)
    session.compare("moe", f"Qwen3 E{experts} top{k} {tokens}x{hidden}x{middle}", variants, measure)


def _block(session: Session, hidden: int, middle: int, experts: int, k: int) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=middle, num_experts=experts, num_experts_per_tok=k,
        norm_topk_prob=True, experts_implementation="grouped_mm",
    )  # fmt: skip
    torch.manual_seed(0)
    with session.device:
        block = Qwen3MoeSparseMoeBlock(config).bfloat16()
    for weight in block.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return block


def _measure_block(session: Session, made: dict, flops: float, variant: Variant) -> dict:
    block = variant.build()
    x, grad, leaves = made["x"], made["grad"], [*block.parameters()]

    def step() -> tuple[Tensor, ...]:
        turbo_ops.weights_changed()
        y = block(x)
        y = y[0] if isinstance(y, tuple) else y
        return y, *torch.autograd.grad(y, (x, *leaves), grad)

    y, grad_x, *grads = step()
    ours = y.detach()[0], grad_x[0], grads[-1][-1].clone()
    del y, grad_x, grads
    found = snr_of(ours, made.setdefault("expected", ours), variant.least_snr)
    ms = session.ms(step)
    found |= session.rate(ms, "bf16", flops=flops) | {"peak_gib": session.peak_gib(step)}
    return {"ms": ms, **found, "device_ms": session.device_ms(step)}
