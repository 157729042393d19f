"""CUTLASS through torch._grouped_mm and torch._scaled_grouped_mm; on other GPUs these are loops that wait."""

from collections.abc import Callable

import torch
from torch import Tensor

from turbo_ops.arch import hardware
from turbo_ops.grouped_gemm.op import (
    grouped_gemm,
    grouped_gemm_clear_,
    grouped_gemm_wgrad,
    rows_problem,
    wgrad_problem,
)

ARCHS = ("sm90",)
FP8 = torch.float8_e4m3fn


def refuses(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
) -> str | None:
    problem = rows_problem(a, b, ends, a_scale, b_scale, bias)
    if problem or bias is not None:
        return problem or "it adds no bias"
    if a_scale is not None and b_scale is not None and not _is_whole(b, a_scale, b_scale):
        return f"scales along K, {tuple(a_scale.shape)} and {tuple(b_scale.shape)}"
    return _refuses(a, b, a_scale is not None, dtype)


def refuses_wgrad(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
) -> str | None:
    problem = wgrad_problem(a, b, ends, a_scale, b_scale)
    if problem:
        return problem
    if a_scale is not None and b_scale is not None and 2 in (a_scale.ndim, b_scale.ndim):
        return f"scales along rows, {tuple(a_scale.shape)} and {tuple(b_scale.shape)}"
    return _refuses(a, b, a_scale is not None, dtype)


def _is_whole(b: Tensor, a_scale: Tensor, b_scale: Tensor) -> bool:
    """Whether scales are of whole rows or groups."""
    of_rows = b_scale.ndim == 1 or (b_scale.shape[1] in (1, b.shape[1]) and b_scale.shape[2] == 1)
    return of_rows and (a_scale.ndim == 1 or a_scale.shape[1] == 1)


def _refuses(a: Tensor, b: Tensor, scaled: bool, dtype: torch.dtype) -> str | None:
    if a.device.type != "cuda" or hardware(a.device) not in ARCHS:
        return f"needs {' or '.join(ARCHS)}, the tensors are on {a.device}"
    if dtype != torch.bfloat16:
        return f"the output must be bf16, not {dtype}"
    wanted = FP8 if scaled else torch.bfloat16
    if {a.dtype, b.dtype} != {wanted}:
        return f"operands must be {wanted}, are {a.dtype} and {b.dtype}"
    for name, x in (("a", a), ("b", b)):
        if 0 in x.shape:
            return f"{name} is empty, {tuple(x.shape)}"
        # FP8 operands have the contracted axis last in memory, others it or the one before
        last, size = 1 if scaled or x.stride(-1) == 1 else 2, x.element_size()
        strides = [stride * size for axis, stride in enumerate(x.stride()) if axis != x.ndim - last]
        if x.stride(-last) != 1 or any(stride % 16 for stride in (*strides, x.storage_offset() * size)):
            return f"{name} needs rows aligned to 16 bytes, has strides {x.stride()}"
    columns = b.shape[-2]
    return f"N must be a multiple of 8, is {columns}" if columns % 8 else None


@grouped_gemm.backend("torch", refuses=refuses, planned=True)
def _(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Callable:
    R, (E, N, _) = len(a), b.shape
    row = torch.arange(R, device=a.device) if a_scale is not None and a_scale.ndim == 1 else None

    def run(
        a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, *_: object
    ) -> Tensor:
        groups = ends.int()
        if a_scale is None or b_scale is None:
            out = torch._grouped_mm(a, b.transpose(1, 2), groups)
        else:
            if row is not None:  # a group's, one a row
                a_scale = a_scale[torch.searchsorted(ends, row, right=True).clamp_(max=E - 1)]
            b_scale = (b_scale[:, None] if b_scale.ndim == 1 else b_scale[:, :, 0]).expand(E, N)
            out = torch._scaled_grouped_mm(
                a, b.transpose(1, 2), a_scale.reshape(-1), b_scale.contiguous(), groups,
                out_dtype=dtype, use_fast_accum=fast_accum,
            )  # fmt: skip
        grouped_gemm_clear_(out, ends)
        return out

    return run


@grouped_gemm_wgrad.backend("torch", refuses=refuses_wgrad, planned=True)
def _(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Callable:
    M, N, E = len(a), len(b), len(ends)

    def every(scale: Tensor, rows: int) -> Tensor:
        """One a row of each group, [E * rows]."""
        return (scale[:, None].expand(E, rows) if scale.ndim == 1 else scale).reshape(-1)

    def run(
        a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, *_: object
    ) -> Tensor:
        if a_scale is None or b_scale is None:
            return torch._grouped_mm(a, b.t(), ends.int())
        return torch._scaled_grouped_mm(
            a, b.t(), every(a_scale, M), every(b_scale, N), ends.int(),
            out_dtype=dtype, use_fast_accum=fast_accum,
        )  # fmt: skip

    return run
