"""RMSNorm (arXiv 1910.07467): y = x * rsqrt(mean(x^2) + eps) * (weight + offset), statistics in fp32."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import Runner, directly, kind_of, op, refuse_second_derivative, runner


@op("triton", "native")
def rms_norm_fwd(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """x [T, D], weight [D] -> y [T, D], rstd [T] fp32; both contiguous.

    round_first rounds the normalised x to x's dtype before the weight multiplies it, and y has the promoted
    dtype (Llama); else all is fp32 until y is rounded to x's dtype (torch, Gemma, Olmo). Gemma's offset is 1.
    """
    rstd = torch.rsqrt(x.float().square().mean(-1) + eps)
    x_hat, dtype = _normalised(x, weight, rstd, round_first)
    return (x_hat * (weight.float() + offset)).to(dtype).contiguous(), rstd


@op("triton", "native")
def rms_norm_bwd(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """grad_y, x [T, D], weight [D], rstd [T] -> grad_x [T, D] of x's dtype, grad_weight [D] of weight's."""
    grad_x, grad_weight = _gradients(grad_y, x, weight, rstd, offset, round_first)
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(weight.dtype)


@op("triton")
def rms_norm_add_fwd(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [T, D], weight [D] -> y [T, D], x + residual [T, D] of x's dtype, rstd [T] fp32.

    y is `rms_norm_fwd` of the sum as it is stored; all contiguous.
    """
    total = (x.float() + residual.float()).to(x.dtype).contiguous()
    y, rstd = rms_norm_fwd.reference(total, weight, eps, offset, round_first)
    return y, total, rstd


@op("triton")
def rms_norm_add_bwd(
    grad_y: Tensor,
    grad_total: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float = 0.0,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """grad_y, grad_total, total [T, D], weight [D], rstd [T] -> the summands' gradient, grad_weight [D]."""
    grad, grad_weight = _gradients(grad_y, total, weight, rstd, offset, round_first)
    return (grad + grad_total.float()).to(total.dtype).contiguous(), grad_weight.to(weight.dtype)


def _gradients(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """Of x and weight, in fp32."""
    x_hat = x.float() * rstd[:, None]
    scaled = grad_y.float() * (weight.float() + offset)
    grad_x = rstd[:, None] * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
    rounded, _ = _normalised(x, weight, rstd, round_first)
    return grad_x, (grad_y.float() * rounded).sum(0)


def _normalised(x: Tensor, weight: Tensor, rstd: Tensor, round_first: bool) -> tuple[Tensor, torch.dtype]:
    x_hat = x.float() * rstd[:, None]
    if round_first:
        return x_hat.to(x.dtype).float(), torch.promote_types(x.dtype, weight.dtype)
    return x_hat, x.dtype


class Call(NamedTuple):
    """All but the tensors to differentiate. run: the ops of this kind of call."""

    eps: float
    offset: float
    round_first: bool
    run: Runner

    def within(self, grad_y: Tensor) -> Runner:
        return directly if self.run is directly else runner(kind_of(grad_y), self.run)


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: Call) -> Tensor:
        y, rstd = call.run("fwd", rms_norm_fwd, x, weight, *call[:3])
        ctx.save_for_backward(x, weight, rstd)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivative("rms_norm")
        call, grad_y = ctx.call, grad_y.contiguous()
        run = call.within(grad_y)
        return *run("bwd", rms_norm_bwd, grad_y, *ctx.saved_tensors, call.offset, call.round_first), None


class AddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        y, total, rstd = call.run("add fwd", rms_norm_add_fwd, x, residual, weight, *call[:3])
        ctx.save_for_backward(total, weight, rstd)
        ctx.call = call
        return y, total

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_total: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        refuse_second_derivative("add_rms_norm")
        call, grads = ctx.call, (grad_y.contiguous(), grad_total.contiguous())
        run, variant = call.within(grads[0]), (call.offset, call.round_first)
        grad, grad_weight = run("add bwd", rms_norm_add_bwd, *grads, *ctx.saved_tensors, *variant)
        return grad, grad, grad_weight, None


def _checked(
    name: str, x: Tensor, weight: Tensor | None, eps: float | None, offset: float, round_first: bool
) -> tuple[Tensor, Tensor, Call]:
    """x as [T, D] contiguous, the weight, and the call."""
    width = x.shape[-1]
    if weight is None:
        weight = torch.ones(width, dtype=x.dtype, device=x.device)
    if weight.shape != (width,):
        raise ValueError(
            f"{name}: weight has shape {tuple(weight.shape)}, x {tuple(x.shape)} needs ({width},)"
        )
    if not {x.dtype, weight.dtype} <= set(DTYPES):
        raise ValueError(f"{name}: x is {x.dtype}, weight {weight.dtype}: give fp32, bf16 or fp16")
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    rows = x.reshape(x.shape[:-1].numel(), width).contiguous()
    compiling = torch.compiler.is_compiling()
    kind = None if compiling else (kind_of(rows), kind_of(weight), eps, offset, round_first)
    return rows, weight, Call(eps, offset, round_first, runner(kind) if kind else directly)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    round_first: bool = False,
) -> Tensor:
    """Normalise the last dimension of x [..., D] and scale it by weight [D] (None: by 1).

    eps defaults to fp32's machine epsilon, for bf16 and fp16 as well, as in torch. offset and
    round_first: see `rms_norm_fwd`. Differentiable in x and weight. ValueError where weight is not [D],
    or for other dtypes than fp32, bf16 and fp16.
    """
    rows, weight, call = _checked("rms_norm", x, weight, eps, offset, round_first)
    return RMSNormFunction.apply(rows, weight, call).view(x.shape)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)` and the sum, both [..., D], in one pass; the residual stream is written once.

    Differentiable once in x, residual and weight. ValueError as `rms_norm`, and where residual is not of x's
    shape and dtype.
    """
    if residual.shape != x.shape or residual.dtype != x.dtype:
        given = f"residual {tuple(residual.shape)} {residual.dtype}, x {tuple(x.shape)} {x.dtype}"
        raise ValueError(f"add_rms_norm: {given}: give two of one shape and dtype")
    rows, weight, call = _checked("add_rms_norm", x, weight, eps, offset, round_first)
    y, total = AddRMSNormFunction.apply(rows, residual.reshape(rows.shape).contiguous(), weight, call)
    return y.view(x.shape), total.view(x.shape)


def rms_norm_backend(weight: Tensor) -> str:
    """What `rms_norm` will run on for this weight: "rms_norm:native". Allocates and computes nothing."""
    with FakeTensorMode():
        x, fake = (
            torch.empty(shape, dtype=weight.dtype, device=weight.device)
            for shape in ((4096, *weight.shape), weight.shape)
        )
        return f"rms_norm:{rms_norm_fwd.choose(x, fake, 1e-6, 0.0, False).name}"
