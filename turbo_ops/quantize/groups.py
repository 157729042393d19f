"""Casts of tensors whose rows come in groups with scales of their own: operands of grouped products."""

import torch
from torch import Tensor

from turbo_ops.arch import fp8_dtype
from turbo_ops.casting import SCALE_DTYPES, Cast, Scaled
from turbo_ops.dispatch import op
from turbo_ops.quantize.op import cast_problem, quantize, quantize_both

ALIGN = 128  # rows: no block of any cast straddles two groups
UNWANTED = Scaled(None)  # type: ignore[arg-type]


def empty(x: Tensor, ends: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format), _scales(x, len(ends))


def empty_both(
    x: Tensor, ends: Tensor, dtype: torch.dtype, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (data, scale), (rows, cols) = empty(x, ends, dtype), x.shape
    data_t = x.new_empty((cols, rows), dtype=dtype)
    if not rowwise:
        return data, scale, data_t, torch.empty_like(scale)
    return data, _scales(x, rows, 1), data_t, _scales(x, len(ends), cols, 1)


def _scales(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


@op("triton", fake=empty)
def quantize_groups(x: Tensor, ends: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize` of each group of x [R, C], tensorwise: data [R, C] of `dtype`, scale [E] fp32.

    Group e is rows ends[e - 1] to ends[e], multiples of `ALIGN` that never fall; 0 in data behind the last.
    An empty group has scale 1.
    """
    data, scale, _, _ = quantize_both_groups.reference(x, ends, dtype, False)
    return data, scale


@op("triton", fake=empty_both)
def quantize_both_groups(
    x: Tensor, ends: Tensor, dtype: torch.dtype, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_both` of each group of x [R, C]: data [R, C], scale, data_t [C, R], scale_t.

    Tensorwise both scales are [E]; rowwise scale is [R, 1], and scale_t, one a column of a group, [E, C, 1].
    Groups are `quantize_groups`'s.
    """
    problem = groups_problem(x, ends, dtype)
    if problem:
        raise ValueError(f"quantize_both_groups: {problem}")
    found = empty_both(x, ends, dtype, rowwise)
    data, scale, data_t, scale_t = (t.view(torch.uint8).zero_().view(t.dtype) for t in found)
    scale.fill_(1), scale_t.fill_(1)
    first = 0
    for group, end in enumerate(ends.tolist()):
        part = quantize_both.reference(x[first:end], dtype, int(rowwise), 0, torch.float32)
        data[first:end], data_t[:, first:end] = part[0], part[2]
        if rowwise:
            scale[first:end], scale_t[group] = part[1], part[3]
        else:
            scale[group], scale_t[group] = part[1][0, 0], part[3][0, 0]
        first = end
    return data, scale, data_t, scale_t


def groups_problem(x: Tensor, ends: Tensor, dtype: torch.dtype) -> str | None:
    if ends.ndim != 1 or ends.dtype != torch.int64 or not len(ends):
        return f"ends {tuple(ends.shape)} of {ends.dtype} must be [E] of torch.int64"
    return cast_problem(x, dtype, 0, 0, torch.float32)


def cast_groups(
    x: Tensor, ends: Tensor, how: Cast | None, how_t: Cast | None, *, rows: bool = True, cols: bool = True
) -> tuple[Scaled, Scaled]:
    """x [R, C] cast by `how` along C, and x.t() by `how_t` along the rows of each group, where wanted.

    Scales are as `grouped_gemm` takes them. None for a cast: x as it is.
    """
    if rows and cols and how is not None and how == how_t:
        return _both(x, ends, how)
    lhs = (Scaled(x) if how is None else _rows(x, ends, how)) if rows else UNWANTED
    if not cols:
        return lhs, UNWANTED
    return lhs, Scaled(x.t()) if how_t is None else _both(x, ends, how_t)[1]


def _both(x: Tensor, ends: Tensor, how: Cast) -> tuple[Scaled, Scaled]:
    dtype = fp8_dtype(how.dtype, x.device)
    if how.block in ((0, 0), (1, 0)):
        made = quantize_both_groups(x, ends, dtype, how.block == (1, 0))
    else:
        made = quantize_both(x, dtype, *how.block, SCALE_DTYPES[how.scale_dtype])
    return Scaled(*made[:2]), Scaled(*made[2:])


def _rows(x: Tensor, ends: Tensor, how: Cast) -> Scaled:
    dtype = fp8_dtype(how.dtype, x.device)
    if how.block == (0, 0):
        return Scaled(*quantize_groups(x, ends, dtype))
    return Scaled(*quantize(x, dtype, *how.block, SCALE_DTYPES[how.scale_dtype]))
