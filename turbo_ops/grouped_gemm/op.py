"""A product for each group of rows, of any size, in one launch; where groups end, the device alone knows."""

from typing import Any

import torch
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.dispatch import op, refuse_second_derivative


def _empty_rows(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _empty_weights(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty((ends.shape[0], a.shape[0], b.shape[0]))


@op("triton", fake=_empty_rows)
def grouped_gemm(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [R, K], b [E, N, K], ends [E] int64, bias [E, N] -> [R, N] of a's dtype, contiguous.

    Rows ends[e - 1] to ends[e] are a @ b[e].T + bias[e], rows from the last end on zero. Ends never fall, and
    none is past R; groups may be empty. Sums are fp32. Any strides, any extents, 0 included.
    """
    problem = rows_problem(a, b, ends, bias)
    if problem:
        raise ValueError(f"grouped_gemm: {problem}")
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    for expert, rows in enumerate(_groups(ends)):
        product = a[rows].float() @ b[expert].float().t()
        out[rows] = (product if bias is None else product + bias[expert].float()).to(a.dtype)
    return out


@op("triton", fake=_empty_weights)
def grouped_gemm_wgrad(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a [M, R], b [N, R], ends [E] int64 -> [E, M, N] of a's dtype, contiguous.

    Of e it is a @ b.T over the columns from ends[e - 1] to ends[e], zero for an empty group; the columns from
    the last end on are not read. Sums are fp32. Any strides, any extents, 0 included.
    """
    problem = wgrad_problem(a, b, ends)
    if problem:
        raise ValueError(f"grouped_gemm_wgrad: {problem}")
    shares = [a[:, rows].float() @ b[:, rows].float().t() for rows in _groups(ends)]
    return torch.stack(shares).to(a.dtype) if shares else a.new_zeros((0, len(a), len(b)))


def _groups(ends: Tensor) -> list[slice]:
    last = ends.tolist()
    return [slice(first, end) for first, end in zip([0, *last], last, strict=False)]


def rows_problem(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None) -> str | None:
    """What makes this no grouped product at all, for any backend."""
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[2]:
        return f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [R, K] and [E, N, K]"
    if bias is not None and bias.shape != b.shape[:2]:
        return f"bias {tuple(bias.shape)} must be {tuple(b.shape[:2])}"
    return _ends_problem(a, b, ends, b.shape[0])


def wgrad_problem(a: Tensor, b: Tensor, ends: Tensor) -> str | None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        return f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [M, R] and [N, R]"
    return _ends_problem(a, b, ends, ends.shape[0] if ends.ndim == 1 else 0)


def _ends_problem(a: Tensor, b: Tensor, ends: Tensor, experts: int) -> str | None:
    if ends.shape != (experts,) or ends.dtype != torch.int64:
        return f"ends {tuple(ends.shape)} of {ends.dtype} must be ({experts},) of torch.int64"
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        return f"a is {a.dtype}, b {b.dtype}: give fp32, bf16 or fp16, both the same"
    return None


class GroupedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return grouped_gemm(x, weight, ends, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("grouped_linear")
        x, weight, ends = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = grouped_gemm(grad_y, weight.transpose(1, 2), ends) if need_x else None
        grad_weight = grouped_gemm_wgrad(grad_y.t(), x.t(), ends) if need_weight else None
        grad_bias = None
        if need_bias:  # the sum of a group's rows: a product with ones, which stops at its end
            ones = grad_y.new_ones((1, len(grad_y)))
            grad_bias = grouped_gemm_wgrad(grad_y.t(), ones, ends)[:, :, 0].to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, in], weight [E, out, in], ends [E] int64, bias [E, out] -> [R, out]: a linear layer a group.

    Rows ends[e - 1] to ends[e] go through expert e (`moe_permute` makes rows and ends); those from the last
    end on are zero, in the output and in x's gradient. An expert without rows has gradients of 0.
    Differentiable once in x, weight and bias. ValueError where shapes or dtypes do not fit.
    """
    problem = rows_problem(x, weight, ends, bias)
    if problem:
        raise ValueError(f"grouped_linear: {problem}")
    return GroupedLinearFunction.apply(x, weight, bias, ends)
