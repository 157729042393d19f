"""Inputs of swiglu_fwd and swiglu_bwd_."""

from functools import partial

import torch
from torch import Tensor

from turbo_ops.swiglu.op import ACTIVATIONS

SHAPES = {"test": [(1, 1), (0, 8), (5, 0), (7, 33), (5, 576), (3, 5000)], "bench": [(8192, 14336)]}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def swiglu_fwd(size: str, device: torch.device) -> dict:
    return {name: partial(make, False) for name, make in _cases(size, device).items()}


def swiglu_bwd_(size: str, device: torch.device) -> dict:
    return {name: partial(make, True) for name, make in _cases(size, device).items()}


def _cases(size: str, device: torch.device) -> dict:
    found = {}
    for activation in ACTIVATIONS:
        for shape in SHAPES[size]:
            for name, dtype in DTYPES.items() if size == "test" else [("bf16", torch.bfloat16)]:
                key = f"{activation}-{name}-{shape[0]}x{shape[1]}"
                found[key] = partial(_separate, shape, dtype, activation, device)
        if size == "test":
            found[f"{activation}-bf16-halves"] = partial(_halves, activation, False, device)
            found[f"{activation}-bf16-interleaved"] = partial(_halves, activation, True, device)
            for shape in ((7, 33), (3, 5000), (5, 0)):
                key = f"{activation}-bf16-probs-{shape[0]}x{shape[1]}"
                found[key] = partial(_weighted, shape, activation, device)
    return found


def _separate(
    shape: tuple[int, int], dtype: torch.dtype, activation: str, device: torch.device, backward: bool
) -> tuple:
    grad_y, gate, up = (torch.randn(shape, device=device).mul_(4).to(dtype) for _ in range(3))
    return _arguments(grad_y, gate, up, activation, backward)


def _halves(activation: str, interleaved: bool, device: torch.device, backward: bool) -> tuple:
    """gate and up as views of one tensor, grad_y transposed."""
    both: Tensor = torch.randn(6, 2 * 70, device=device).mul_(4).bfloat16()
    grad_y = torch.randn(70, 6, device=device).bfloat16().t()
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
    return _arguments(grad_y, gate, up, activation, backward)


def _weighted(shape: tuple[int, int], activation: str, device: torch.device, backward: bool) -> tuple:
    *arguments, _ = _separate(shape, torch.bfloat16, activation, device, backward)
    return *arguments, torch.rand(shape[0], device=device)


def _arguments(grad_y: Tensor, gate: Tensor, up: Tensor, activation: str, backward: bool) -> tuple:
    if not backward:
        return gate, up, activation, None
    return grad_y, gate, up, torch.zeros_like(gate), torch.zeros_like(up), activation, None
