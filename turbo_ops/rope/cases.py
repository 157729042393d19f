"""Inputs of rope_fwd and rope_bwd."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

# batch, query heads, key heads, length, width, rotary width
SHAPES = {
    "test": [(1, 1, 1, 1, 2, 2), (2, 4, 2, 5, 16, 16), (2, 3, 1, 7, 20, 12), (0, 2, 2, 4, 8, 8)],
    "bench": [(2, 32, 8, 4096, 128, 128)],
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def rope_fwd(size: str, device: torch.device) -> dict:
    found: dict[str, Callable[[], tuple]] = {}
    for shape in SHAPES[size]:
        for name, dtype in DTYPES.items() if size == "test" else [("bf16", torch.bfloat16)]:
            for interleaved in (False, True):
                kind = "pairs" if interleaved else "halves"
                key = f"{kind}-{name}-{'x'.join(map(str, shape))}"
                found[key] = partial(_make, shape, dtype, interleaved, True, device)
    if size == "test":
        shape = (2, 4, 2, 5, 16, 16)
        found["halves-bf16-heads-first"] = partial(_make, shape, torch.bfloat16, False, False, device)
        found["halves-bf16-fp32-angles"] = partial(_mixed, shape, device)
    return found


rope_bwd = rope_fwd


def _make(
    shape: tuple, dtype: torch.dtype, interleaved: bool, projected: bool, device: torch.device
) -> tuple:
    """projected: q and k are transposed views of [B, S, H, D], and cos and sin of one batch entry."""
    batch, heads, key_heads, length, width, rotary = shape

    def draw(heads: int) -> Tensor:
        if projected:
            return torch.randn(batch, length, heads, width, device=device).to(dtype).transpose(1, 2)
        return torch.randn(batch, heads, length, width, device=device).to(dtype)

    cos, sin = (torch.randn(1 if projected else batch, length, rotary, device=device).to(dtype) for _ in "cs")
    return draw(heads), draw(key_heads), cos, sin, interleaved


def _mixed(shape: tuple, device: torch.device) -> tuple:
    q, k, cos, sin, interleaved = _make(shape, torch.bfloat16, False, True, device)
    return q, k, cos.float(), sin.float(), interleaved
