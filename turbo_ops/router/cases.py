"""Inputs of router_fwd and router_bwd."""

from functools import partial

import torch

SHAPES = {"test": [(1, 1), (0, 8), (7, 8), (33, 60), (64, 128)], "bench": [(8192, 128), (32768, 256)]}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Options = tuple[int, str, int, int, bool, float, bool]  # k, score, groups, group_k, normalize, scale, a bias
OPTIONS: dict[str, Options] = {
    "mixtral": (2, "softmax", 1, 1, True, 1.0, False),
    "qwen3": (8, "softmax", 1, 1, False, 1.0, False),
    "deepseek": (8, "sigmoid", 8, 4, True, 2.5, True),
}


def router_fwd(size: str, device: torch.device) -> dict:
    return {name: partial(make, False) for name, make in _cases(size, device).items()}


def router_bwd(size: str, device: torch.device) -> dict:
    return {name: partial(make, True) for name, make in _cases(size, device).items()}


def _cases(size: str, device: torch.device) -> dict:
    found = {}
    for tokens, experts in SHAPES[size]:
        for name, (k, score, groups, *rest) in OPTIONS.items():
            if experts % groups:
                continue
            k = min(k, experts // groups * 4 if groups > 1 else experts)
            for dtype in DTYPES if size == "test" else ("fp32",):
                how = k, score, groups, *rest
                key = f"{name}-{dtype}-{tokens}x{experts}"
                found[key] = partial(_make, (tokens, experts), DTYPES[dtype], how, device)
    return found


def _make(
    shape: tuple[int, int], dtype: torch.dtype, options: tuple, device: torch.device, backward: bool
) -> tuple:
    from turbo_ops.router.op import router_fwd as contract

    k, score, groups, group_k, normalize, scale, biased = options
    # apart by more than rounding: which of two equal scores is taken is another case's matter
    logits = (torch.rand(shape, device=device).argsort(1) * (6.0 / shape[1]) - 3).to(dtype)
    bias = torch.rand(shape[1], device=device) * 0.01 if biased else None
    given = logits, bias, k, score, groups, group_k, normalize, scale
    if not backward:
        return given
    weights, experts = contract.reference(*given)
    return torch.randn_like(weights), logits, experts, score, normalize, scale
