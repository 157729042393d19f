"""act(gate) * up, the middle of a gated MLP (arXiv 2002.05202), and weighted by a router for its experts."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import (
    Runner,
    directly,
    keeps_graph,
    kind_of,
    op,
    refuse_second_derivative,
    runner,
)

ACTIVATIONS = ("silu", "gelu_tanh", "swigluoai")
ALPHA, LIMIT = 1.702, 7.0  # of swigluoai


@op("triton")
def swiglu_fwd(gate: Tensor, up: Tensor, activation: str, probs: Tensor | None = None) -> Tensor:
    """gate, up [T, D], any strides, probs [T] fp32 -> act(gate) * up * probs [T, D], contiguous.

    All in fp32 and rounded once. activation: "silu"; "gelu_tanh" (Gemma's); "swigluoai" (gpt-oss's: gate and
    up clamped to 7, then gate * sigmoid(1.702 * gate) * (up + 1)).
    """
    act, _, linear, _ = _parts(gate, up, activation)
    y = act * linear
    return (y if probs is None else y * probs[:, None]).to(gate.dtype).contiguous()


@op("triton", mutates=("grad_gate", "grad_up"))
def swiglu_bwd_(
    grad_y: Tensor,
    gate: Tensor,
    up: Tensor,
    grad_gate: Tensor,
    grad_up: Tensor,
    activation: str,
    probs: Tensor | None = None,
) -> Tensor:
    """grad_y, gate, up [T, D], probs [T] fp32 -> the gradient of probs [T] fp32, or [0] without any.

    Writes those of gate and up into grad_gate and grad_up [T, D], which may be gate and up themselves.
    """
    act, slope, linear, linear_slope = _parts(gate, up, activation)
    grad = grad_y.float()
    grad_probs = (grad * act * linear).sum(1) if probs is not None else grad.new_empty(0)
    grad = grad if probs is None else grad * probs[:, None]
    grad_gate.copy_(grad * linear * slope)
    grad_up.copy_(grad * act * linear_slope)
    return grad_probs


def _parts(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """act(gate) and its slope, what multiplies it and its slope, in fp32."""
    g, u = gate.float(), up.float()
    if activation == "silu":
        share = torch.sigmoid(g)
        return F.silu(g), share * (1 + g * (1 - share)), u, 1.0
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        tanh = torch.tanh(inner)
        slope = 0.5 * (1 + tanh) + 0.5 * g * (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 0.134145 * g**2)
        return F.gelu(g, approximate="tanh"), slope, u, 1.0
    inside, within = g <= LIMIT, u.abs() <= LIMIT
    g, u = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT)
    share = torch.sigmoid(ALPHA * g)
    return g * share, share * (1 + ALPHA * g * (1 - share)) * inside, u + 1, within.float()


class Call(NamedTuple):
    """All but the tensors to differentiate.

    consume: gate and up are nobody else's. run: ops of this kind. cast: takes gate and up [T, D] in place of
    the result, which is then nowhere but in its casts.
    """

    activation: str
    consume: bool
    run: Runner
    cast: Callable[[Tensor, Tensor], None] | None


class SwigluFunction(torch.autograd.Function):
    """Of gate and up, or of one tensor that holds both side by side: then its gradient is one tensor, too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, probs: Tensor | None, call: Call) -> Tensor:
        ctx.save_for_backward(gate, up, probs)  # backward finds act(gate) again: nothing of its own is kept
        ctx.call = call
        gate, up = gate.chunk(2, 1) if up is None else (gate, up)
        if call.cast is not None:
            call.cast(gate, up)
            return torch.full((), torch.nan, dtype=gate.dtype, device=gate.device).expand(gate.shape)
        return call.run("fwd", swiglu_fwd, gate, up, call.activation, _wide(probs))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("swiglu")
        call, (gate, up, probs) = ctx.call, ctx.saved_tensors
        if call.consume and not torch.compiler.is_compiling() and not keeps_graph():
            given = gate, up
        else:
            given = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), None
            if up is not None:
                given = given[0], torch.empty(up.shape, dtype=up.dtype, device=up.device)
        halves, grads = (pair[0].chunk(2, 1) if up is None else pair for pair in ((gate, up), given))
        run = directly if call.run is directly else runner(kind_of(grad_y), call.run)
        grad_probs = run(
            ("bwd", given[0] is gate), swiglu_bwd_, grad_y, *halves, *grads, call.activation, _wide(probs)
        )
        return *given, None if probs is None else grad_probs.to(probs.dtype), None


def _wide(probs: Tensor | None) -> Tensor | None:
    return None if probs is None else probs.float().contiguous()


def swiglu_backend(device: torch.device, dtype: torch.dtype) -> str:
    """What `swiglu` will run on: "swiglu:triton". Allocates and computes nothing."""
    with FakeTensorMode():
        gate = torch.empty(4096, 4096, dtype=dtype, device=device)
        return f"swiglu:{swiglu_fwd.choose(gate, gate, ACTIVATIONS[0], None).name}"


def _problem(
    gate: Tensor, up: Tensor | None, activation: str, probs: Tensor | None, consume: bool
) -> str | None:
    given = f"gate {tuple(gate.shape)} {gate.dtype}"
    if up is None and (gate.ndim == 0 or gate.shape[-1] % 2):
        return f"{given} without up: give [..., 2 * D], both side by side"
    if up is not None and (gate.shape != up.shape or gate.dtype != up.dtype or gate.ndim == 0):
        return f"{given}, up {tuple(up.shape)} {up.dtype}: give two of one shape [..., D] and dtype"
    if gate.dtype not in DTYPES:
        return f"gate is {gate.dtype}: give fp32, bf16 or fp16"
    if activation not in ACTIVATIONS:
        return f"activation={activation!r}: use one of {', '.join(ACTIVATIONS)}"
    same = consume and up is not None and gate.storage_offset() == up.storage_offset()
    # of storages: meta tensors all begin at address 0
    if same and torch._C._is_alias_of(gate, up):  # type: ignore[attr-defined]
        return "consume=True with gate and up in the same memory: their gradients would be, too"
    if probs is not None and (probs.shape != gate.shape[:-1] or probs.dtype not in DTYPES):
        given = f"probs {tuple(probs.shape)} {probs.dtype}"
        return f"{given}: give {tuple(gate.shape[:-1])} of fp32, bf16 or fp16, one a token"
    return None


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    activation: str = "silu",
    probs: Tensor | None = None,
    *,
    consume: bool = False,
    cast: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """gate, up [..., D] of one dtype -> act(gate) * up [..., D], times probs [...] where given.

    Differentiable once in all three. up None: gate is [..., 2 * D], both side by side; halves of one tensor,
    in any order and interleaved as well, are taken without a copy. activation: see `swiglu_fwd`. consume: a
    backward that keeps no graph may write the gradients over gate and up, which nothing else may hold then.
    cast: takes gate and up [T, D] in place of the result, which is NaN then (`gated_linear`).
    ValueError where shapes or dtypes differ, or for an activation that is none of `ACTIVATIONS`.
    """
    compiling = torch.compiler.is_compiling()
    problem = _problem(gate, up, activation, probs, consume and not compiling)
    if problem:
        raise ValueError(f"swiglu: {problem}")
    shape = (*gate.shape[:-1], gate.shape[-1] // (1 if up is not None else 2))
    if gate.ndim != 2:
        rows = gate.shape[:-1].numel(), gate.shape[-1]
        gate, up = gate.reshape(rows), None if up is None else up.reshape(rows)
        probs = None if probs is None else probs.reshape(-1)
    kinds = None if compiling else tuple(None if t is None else kind_of(t) for t in (gate, up, probs))
    run = directly if compiling else runner((kinds, activation))
    y = SwigluFunction.apply(gate, up, probs, Call(activation, consume, run, cast))
    return y if y.shape == shape else y.view(shape)
