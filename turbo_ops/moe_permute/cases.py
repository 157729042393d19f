"""Inputs of the ops of moe_permute."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

# tokens, choices, experts, width, align, capacity
SHAPES = {
    "test": [
        (1, 1, 1, 1, 1, 0),
        (0, 2, 4, 8, 1, 0),
        (33, 2, 8, 20, 1, 0),
        (70, 4, 60, 130, 16, 0),
        (300, 2, 3, 16, 1, 40),
        (40, 3, 5, 3000, 8, 7),
    ],
    "bench": [(8192, 8, 128, 2048, 1, 0), (16384, 2, 8, 4096, 1, 0)],
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def moe_permute_sort(size: str, device: torch.device) -> dict:
    return {name: partial(_sort, shape, device) for name, shape in _shapes(size).items()}


def moe_permute_gather(size: str, device: torch.device) -> dict:
    return _moving(size, device, _gather)


def moe_permute_combine(size: str, device: torch.device) -> dict:
    return _moving(size, device, _combine)


def moe_permute_dot(size: str, device: torch.device) -> dict:
    return {name: make for name, make in _moving(size, device, _dot).items() if name.endswith("plain")}


def _shapes(size: str) -> dict:
    return {"x".join(map(str, shape)): shape for shape in SHAPES[size]}


def _moving(size: str, device: torch.device, make: Callable) -> dict:
    return {
        f"{dtype}-{name}-{weighted}": partial(make, shape, DTYPES[dtype], weighted == "weighted", device)
        for name, shape in _shapes(size).items()
        for dtype in (DTYPES if size == "test" else ("bf16",))
        for weighted in ("plain", "weighted")
    }


def _sort(shape: tuple, device: torch.device) -> tuple:
    """Skewed: the first experts have most."""
    tokens, k, experts, _, align, capacity = shape
    drawn = torch.rand(tokens, k, device=device).square().mul(experts).long().clamp(max=experts - 1)
    return drawn, experts, align, capacity


def _sorted(shape: tuple, device: torch.device) -> tuple[Tensor, Tensor]:
    from turbo_ops.moe_permute.op import moe_permute_sort as contract

    places, sources, _, _ = contract.reference(*_sort(shape, device))
    return places, sources


def _gather(shape: tuple, dtype: torch.dtype, weighted: bool, device: torch.device) -> tuple:
    (tokens, k, _, width, *_), (_, sources) = shape, _sorted(shape, device)
    x = torch.randn(tokens, width, device=device).to(dtype)
    return x, sources, torch.rand(tokens, k, device=device) if weighted else None, k


def _combine(shape: tuple, dtype: torch.dtype, weighted: bool, device: torch.device) -> tuple:
    (tokens, k, _, width, *_), (places, sources) = shape, _sorted(shape, device)
    rows = torch.randn(len(sources), width, device=device).to(dtype)
    return rows, places, torch.rand(tokens, k, device=device) if weighted else None


def _dot(shape: tuple, dtype: torch.dtype, weighted: bool, device: torch.device) -> tuple:
    rows, places, _ = _combine(shape, dtype, weighted, device)
    return rows, torch.randn(shape[0], shape[3], device=device).to(dtype), places
