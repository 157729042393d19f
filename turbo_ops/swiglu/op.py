"""act(gate) * up, the middle of a gated MLP (arXiv 2002.05202)."""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import op, refuse_second_derivative

ACTIVATIONS = ("silu", "gelu_tanh")


@op("triton")
def swiglu_fwd(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """gate, up [T, D], any strides -> act(gate) * up [T, D], contiguous, in fp32 and rounded once.

    activation: "silu", or "gelu_tanh" (Gemma's).
    """
    act = F.silu(gate.float()) if activation == "silu" else F.gelu(gate.float(), approximate="tanh")
    return (act * up.float()).to(gate.dtype).contiguous()


@op("triton")
def swiglu_bwd(grad_y: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """grad_y, gate, up [T, D] -> grad_gate, grad_up [T, D], contiguous."""
    g, grad = gate.float(), grad_y.float()
    if activation == "silu":
        share = torch.sigmoid(g)
        act, slope = g * share, share * (1 + g * (1 - share))
    else:
        inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        tanh = torch.tanh(inner)
        act = 0.5 * g * (1 + tanh)
        slope = 0.5 * (1 + tanh) + 0.5 * g * (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 0.134145 * g**2)
    grad_gate, grad_up = grad * up.float() * slope, grad * act
    return grad_gate.to(gate.dtype).contiguous(), grad_up.to(up.dtype).contiguous()


class SwigluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)  # backward finds act(gate) again: nothing of its own is kept
        ctx.activation = activation
        return swiglu_fwd(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivative("swiglu")
        return *swiglu_bwd(grad_y, *ctx.saved_tensors, ctx.activation), None


def swiglu_backend(device: torch.device, dtype: torch.dtype) -> str:
    """What `swiglu` will run on: "swiglu:triton". Allocates and computes nothing."""
    with FakeTensorMode():
        gate = torch.empty(4096, 4096, dtype=dtype, device=device)
        return f"swiglu:{swiglu_fwd.choose(gate, gate, ACTIVATIONS[0]).name}"


def swiglu(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """gate, up [..., D] of one dtype -> act(gate) * up [..., D], differentiable once in both.

    The two may be halves of one tensor: no copy is made. ValueError where shapes or dtypes differ, or for an
    activation that is none of `ACTIVATIONS`.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.ndim == 0:
        given = f"gate {tuple(gate.shape)} {gate.dtype}, up {tuple(up.shape)} {up.dtype}"
        raise ValueError(f"swiglu: {given}: give two of one shape [..., D] and dtype")
    if gate.dtype not in DTYPES:
        raise ValueError(f"swiglu: gate is {gate.dtype}: give fp32, bf16 or fp16")
    if activation not in ACTIVATIONS:
        raise ValueError(f"swiglu: activation={activation!r}: use one of {', '.join(ACTIVATIONS)}")
    if gate.ndim == 2:
        return SwigluFunction.apply(gate, up, activation)
    rows = gate.shape[:-1].numel(), gate.shape[-1]
    return SwigluFunction.apply(gate.reshape(rows), up.reshape(rows), activation).view(gate.shape)
