"""Inputs of rms_norm_fwd and rms_norm_bwd."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

SHAPES = {
    "test": [(1, 1), (0, 64), (7, 33), (5, 576), (64, 1000), (3, 9000)],
    "bench": [(8192, 4096), (8192, 8192), (32768, 576)],
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VARIANTS = {"torch": (0.0, False), "gemma": (1.0, False), "llama": (0.0, True)}


def rms_norm_fwd(size: str, device: torch.device) -> dict:
    return _cases(size, device, _forward)


def rms_norm_bwd(size: str, device: torch.device) -> dict:
    return _cases(size, device, _backward)


def rms_norm_add_fwd(size: str, device: torch.device) -> dict:
    return _cases(size, device, _add_forward)


def rms_norm_add_bwd(size: str, device: torch.device) -> dict:
    return _cases(size, device, _add_backward)


def _cases(size: str, device: torch.device, make: Callable[..., tuple]) -> dict:
    found = {}
    for rows, width in SHAPES[size]:
        for dtype in DTYPES if size == "test" else ("bf16",):
            for variant in VARIANTS if (rows, width) == (5, 576) else ("llama",):
                args = rows, width, DTYPES[dtype], DTYPES[dtype], VARIANTS[variant], device
                found[f"{variant}-{dtype}-{rows}x{width}"] = partial(make, *args)
    if size == "test":
        for variant, options in VARIANTS.items():
            args = 5, 576, torch.bfloat16, torch.float32, options, device
            found[f"{variant}-bf16-fp32-weight"] = partial(make, *args)
    return found


def _forward(
    rows: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, variant: tuple, device: torch.device
) -> tuple:
    x, weight = (
        torch.randn(rows, width, device=device).to(dtype),
        torch.randn(width, device=device).to(weight_dtype),
    )
    return x, weight, 1e-6, *variant


def _backward(*args: Any) -> tuple:
    x, weight, eps, offset, round_first = _forward(*args)
    y_dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    return torch.randn_like(x, dtype=y_dtype), x, weight, rstd, offset, round_first


def _add_forward(*args: Any) -> tuple:
    x, *rest = _forward(*args)
    return x, torch.randn_like(x), *rest


def _add_backward(*args: Any) -> tuple:
    grad_y, x, *rest = _backward(*args)
    return grad_y, torch.randn_like(x), x, *rest
