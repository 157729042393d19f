"""One pass: each element is read once and written once, forward and backward."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.swiglu.op import ACTIVATIONS, swiglu_bwd, swiglu_fwd

ROOT_2_OVER_PI = tl.constexpr(0.7978845608028654)


def refuses(gate: Tensor, up: Tensor, activation: str) -> str | None:
    if gate.ndim != 2 or gate.shape != up.shape or gate.dtype != up.dtype or gate.dtype not in DTYPES:
        return f"gate and up must be [T, D] of one dtype, fp32, bf16 or fp16, are {gate.dtype} and {up.dtype}"
    if activation not in ACTIVATIONS:
        return f"no kernel for {activation}"
    return refuses_device(gate)


def refuses_bwd(grad_y: Tensor, gate: Tensor, up: Tensor, activation: str) -> str | None:
    return refuses(gate, up, activation)


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """act(gate) and its slope."""
    if GELU:
        inner = ROOT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        act = 0.5 * gate * (1 + tanh)
        slope = 0.5 * (1 + tanh)
        slope += 0.5 * gate * (1 - tanh * tanh) * ROOT_2_OVER_PI * (1 + 0.134145 * gate * gate)
    else:
        share = tl.sigmoid(gate)
        act = gate * share
        slope = share * (1 + gate * (1 - share))
    return act, slope


@triton.jit
def swiglu_fwd_kernel(
    gate, up, y, D, gate_r, gate_c, up_r, up_c, GELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    tiles = tl.cdiv(D, BLOCK)
    row, cols = (
        (tl.program_id(0) // tiles).to(tl.int64),
        tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK),
    )
    inside, wide = cols < D, cols.to(tl.int64)
    act, _ = activate(
        tl.load(gate + row * gate_r + wide * gate_c, mask=inside, other=0.0).to(tl.float32), GELU
    )
    product = act * tl.load(up + row * up_r + wide * up_c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * D + cols, product.to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd_kernel(
    grad_y, gate, up, grad_gate, grad_up, D, grad_r, grad_c, gate_r, gate_c, up_r, up_c,
    GELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BLOCK)
    row, cols = (
        (tl.program_id(0) // tiles).to(tl.int64),
        tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK),
    )
    inside, wide = cols < D, cols.to(tl.int64)
    grad = tl.load(grad_y + row * grad_r + wide * grad_c, mask=inside, other=0.0).to(tl.float32)
    act, slope = activate(
        tl.load(gate + row * gate_r + wide * gate_c, mask=inside, other=0.0).to(tl.float32), GELU
    )
    above = tl.load(up + row * up_r + wide * up_c, mask=inside, other=0.0).to(tl.float32)
    out = row * D + cols
    tl.store(grad_gate + out, (grad * above * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + out, (grad * act).to(grad_up.dtype.element_ty), mask=inside)


def _launch(kernel: object, shape: torch.Size, strides: tuple, activation: str) -> Launch:
    rows, width = shape
    block = min(triton.next_power_of_2(max(width, 1)), 2048)
    grid, warps = (rows * triton.cdiv(width, block),), max(block // 512, 1)
    return Launch(kernel, grid, (width, *strides), GELU=activation != "silu", BLOCK=block, num_warps=warps)


@swiglu_fwd.backend("triton", refuses=refuses, planned=True)
def _(gate: Tensor, up: Tensor, activation: str) -> Callable:
    launch = _launch(swiglu_fwd_kernel, gate.shape, (*gate.stride(), *up.stride()), activation)

    def run(gate: Tensor, up: Tensor, *_: object) -> Tensor:
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if y.numel():
            launch(gate, up, y)
        return y

    return run


@swiglu_bwd.backend("triton", refuses=refuses_bwd, planned=True)
def _(grad_y: Tensor, gate: Tensor, up: Tensor, activation: str) -> Callable:
    strides = *grad_y.stride(), *gate.stride(), *up.stride()
    launch = _launch(swiglu_bwd_kernel, gate.shape, strides, activation)

    def run(grad_y: Tensor, gate: Tensor, up: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        grad_gate, grad_up = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (gate, up))
        if gate.numel():
            launch(grad_y, gate, up, grad_gate, grad_up)
        return grad_gate, grad_up

    return run
