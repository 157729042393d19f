"""One pass: each element is read once and written once, forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.device.gated import parts
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.swiglu.op import ACTIVATIONS, swiglu_bwd_, swiglu_fwd


def refuses(gate: Tensor, up: Tensor, activation: str, probs: Tensor | None = None) -> str | None:
    if gate.ndim != 2 or gate.shape != up.shape or gate.dtype != up.dtype or gate.dtype not in DTYPES:
        return f"gate and up must be [T, D] of one dtype, fp32, bf16 or fp16, are {gate.dtype} and {up.dtype}"
    if activation not in ACTIVATIONS:
        return f"no kernel for {activation}"
    if probs is not None and (probs.dtype != torch.float32 or not probs.is_contiguous()):
        return f"probs must be fp32 and contiguous, is {probs.dtype} of strides {probs.stride()}"
    return refuses_device(gate)


def refuses_bwd(
    grad_y: Tensor,
    gate: Tensor,
    up: Tensor,
    grad_gate: Tensor,
    grad_up: Tensor,
    activation: str,
    probs: Tensor | None = None,
) -> str | None:
    if {grad_gate.dtype, grad_up.dtype} != {gate.dtype}:
        return f"grad_gate and grad_up must be {gate.dtype}, are {grad_gate.dtype} and {grad_up.dtype}"
    return refuses(gate, up, activation, probs)


@triton.jit
def place(D, BLOCK: tl.constexpr):
    """The row of this program, its columns as int64, which of them are there."""
    tiles = tl.cdiv(D, BLOCK)
    cols = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(0) // tiles).to(tl.int64), cols.to(tl.int64), cols < D


@triton.jit
def swiglu_fwd_kernel(
    gate, up, probs, y, D, gate_r, gate_c, up_r, up_c, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, cols, inside = place(D, BLOCK)
    of_gate = tl.load(gate + row * gate_r + cols * gate_c, mask=inside, other=0.0).to(tl.float32)
    of_up = tl.load(up + row * up_r + cols * up_c, mask=inside, other=0.0).to(tl.float32)
    act, _, linear, _ = parts(of_gate, of_up, ACTIVATION)
    product = act * linear
    if probs is not None:
        product *= tl.load(probs + row)
    tl.store(y + row * D + cols, product.to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd_kernel(
    grad_y, gate, up, probs, grad_gate, grad_up, shares, D, grad_r, grad_c, gate_r, gate_c, up_r, up_c,
    to_gate_r, to_gate_c, to_up_r, to_up_c, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """shares: what each program found of the gradient of probs."""
    row, cols, inside = place(D, BLOCK)
    grad = tl.load(grad_y + row * grad_r + cols * grad_c, mask=inside, other=0.0).to(tl.float32)
    of_gate = tl.load(gate + row * gate_r + cols * gate_c, mask=inside, other=0.0).to(tl.float32)
    of_up = tl.load(up + row * up_r + cols * up_c, mask=inside, other=0.0).to(tl.float32)
    act, slope, linear, linear_slope = parts(of_gate, of_up, ACTIVATION)
    if probs is not None:
        tl.store(shares + tl.program_id(0), tl.sum(tl.where(inside, grad * act * linear, 0.0)))
        grad *= tl.load(probs + row)
    of_gate, of_up = grad * linear * slope, grad * act * linear_slope
    to_gate, to_up = (
        grad_gate + row * to_gate_r + cols * to_gate_c,
        grad_up + row * to_up_r + cols * to_up_c,
    )
    tl.store(to_gate, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(to_up, of_up.to(grad_up.dtype.element_ty), mask=inside)


def _launch(kernel: object, shape: torch.Size, strides: tuple, activation: str) -> tuple[Launch, int]:
    """The launch, and how many programs a row has."""
    rows, width = shape
    block = min(triton.next_power_of_2(max(width, 1)), 2048)
    tiles, warps = triton.cdiv(width, block), max(block // 512, 1)
    scalars = width, *strides
    launch = Launch(kernel, (rows * tiles,), scalars, ACTIVATION=activation, BLOCK=block, num_warps=warps)
    return launch, tiles


@swiglu_fwd.backend("triton", refuses=refuses, planned=True)
def _(gate: Tensor, up: Tensor, activation: str, probs: Tensor | None = None) -> Callable:
    launch, _ = _launch(swiglu_fwd_kernel, gate.shape, (*gate.stride(), *up.stride()), activation)

    def run(gate: Tensor, up: Tensor, activation: str, probs: Tensor | None = None) -> Tensor:
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if y.numel():
            launch(gate, up, probs, y)
        return y

    return run


@swiglu_bwd_.backend("triton", refuses=refuses_bwd, planned=True)
def _(
    grad_y: Tensor,
    gate: Tensor,
    up: Tensor,
    grad_gate: Tensor,
    grad_up: Tensor,
    activation: str,
    probs: Tensor | None = None,
) -> Callable:
    strides = [stride for t in (grad_y, gate, up, grad_gate, grad_up) for stride in t.stride()]
    launch, tiles = _launch(swiglu_bwd_kernel, gate.shape, tuple(strides), activation)
    rows, device = len(gate), gate.device

    def run(*args: Any) -> Tensor:
        *tensors, _, probs = args
        found = torch.empty((rows, tiles) if probs is not None else 0, dtype=torch.float32, device=device)
        if rows * tiles:
            launch(*tensors[:3], probs, *tensors[3:], None if probs is None else found)
        return found if probs is None else found.sum(1)

    return run
