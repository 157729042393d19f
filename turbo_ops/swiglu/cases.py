"""Inputs of swiglu_fwd and swiglu_bwd."""

from functools import partial

import torch
from torch import Tensor

SHAPES = {"test": [(1, 1), (0, 8), (5, 0), (7, 33), (5, 576), (3, 5000)], "bench": [(8192, 14336)]}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def swiglu_fwd(size: str, device: torch.device) -> dict:
    return {name: partial(make, 0) for name, make in _cases(size, device).items()}


def swiglu_bwd(size: str, device: torch.device) -> dict:
    return {name: partial(make, 1) for name, make in _cases(size, device).items()}


def _cases(size: str, device: torch.device) -> dict:
    found = {}
    for activation in ("silu", "gelu_tanh"):
        for shape in SHAPES[size]:
            for name, dtype in DTYPES.items() if size == "test" else [("bf16", torch.bfloat16)]:
                key = f"{activation}-{name}-{shape[0]}x{shape[1]}"
                found[key] = partial(_separate, shape, dtype, activation, device)
        if size == "test":
            found[f"{activation}-bf16-halves"] = partial(_halves, activation, device)
    return found


def _separate(
    shape: tuple[int, int], dtype: torch.dtype, activation: str, device: torch.device, grads: int
) -> tuple:
    tensors = [torch.randn(shape, device=device).mul_(2).to(dtype) for _ in range(2 + grads)]
    return (*tensors, activation)


def _halves(activation: str, device: torch.device, grads: int) -> tuple:
    """gate and up as views of one tensor, grad_y transposed."""
    both: Tensor = torch.randn(6, 2 * 70, device=device).bfloat16()
    grad_y = [torch.randn(70, 6, device=device).bfloat16().t()] * grads
    return (*grad_y, *both.chunk(2, -1), activation)
