"""Matrix product of two operands that both have the contracted axis last; a transpose is a view."""

from collections.abc import Hashable

import torch
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.casting import Scaled
from turbo_ops.dispatch import Runner, directly, op
from turbo_ops.quantize.op import expand_scale

# An FP8 product of fewer multiplications is held up by the host: on an H200's, torch._scaled_mm takes 23 us
# and a planned launch 6 (a step of 32x256x256: 3.4 and 2.3 times nn.Linear's).
HOST_BOUND = 1 << 28


def host_bound(
    a: Tensor, b: Tensor, a_scale: Tensor | None = None, b_scale: Tensor | None = None, *rest: object
) -> str | None:
    """Triton where the host is what counts."""
    small = a_scale is not None and a.shape[0] * a.shape[1] * b.shape[0] <= HOST_BOUND
    return "triton" if small and a.is_cuda else None


@op("blaslt", "triton", prefers=host_bound)
def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Tensor:
    """a [M, K], b [N, K] -> (a * a_scale) @ (b * b_scale).T + bias: [M, N] of `dtype`, contiguous.

    A scale has one entry per block (`casting.Cast`): its shape is the granularity. Both operands have one
    (FP8) or neither (bf16, fp16, fp32). bias [N]. Sums are fp32. Any strides, any extents, 0 included.
    """
    return _product(a, b, a_scale, b_scale, bias).to(dtype)


def sums_in_epilogue(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor | None = None, *rest: object
) -> str | None:
    """Triton where cuBLASLt would need the product in fp32 beside a 16-bit sum: 12 bytes an element more."""
    return "triton" if a_scale is not None and out.element_size() == 2 and out.is_cuda else None


@op("blaslt", "triton", mutates=("out",), prefers=sums_in_epilogue)
def gemm_accumulate_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    fast_accum: bool = True,
) -> None:
    """out [M, N] += (a * a_scale) @ (b * b_scale).T; summed in fp32, rounded once to out's dtype."""
    out.copy_(out.float() + _product(a, b, a_scale, b_scale, None))


def _product(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    problem = operand_problem(a, b, a_scale, b_scale)
    if problem:
        raise ValueError(f"gemm: {problem}")
    product = _real(a, a_scale) @ _real(b, b_scale).t()
    return product if bias is None else product + bias.float()


def _real(data: Tensor, scale: Tensor | None) -> Tensor:
    return data.float() if scale is None else data.float() * expand_scale(scale, *data.shape)


def operand_problem(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> str | None:
    """What makes these operands no GEMM at all, for any backend."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        return f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [M, K] and [N, K]; transpose with .t()"
    if (a_scale is None) != (b_scale is None):
        return "scale both operands or neither"
    if a_scale is None and not {a.dtype, b.dtype} <= set(DTYPES):
        return f"a is {a.dtype}, b {b.dtype}: give fp32, bf16 or fp16, or FP8 with scales"
    return None


def matmul(
    lhs: Scaled,
    rhs: Scaled,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = True,
    run: Runner = directly,
    slot: Hashable = None,
) -> Tensor:
    """lhs [M, K] @ rhs [N, K].T -> [M, N] of `dtype`. run, slot: as of `quantize.cast`."""
    return run(slot, gemm, lhs.data, rhs.data, lhs.scale, rhs.scale, bias, dtype, fast_accum)
