"""A product for each group of rows, of any size, in one launch; where groups end, the device alone knows."""

import torch
from torch import Tensor

from turbo_ops.arch import DTYPES, FP8_DTYPES
from turbo_ops.dispatch import op
from turbo_ops.quantize.groups import ALIGN
from turbo_ops.quantize.op import expand_scale


def _empty_rows(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def _empty_weights(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Tensor:
    return a.new_empty((ends.shape[0], a.shape[0], b.shape[0]), dtype=dtype)


@op("torch", "triton", fake=_empty_rows)
def grouped_gemm(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Tensor:
    """a [R, K], b [E, N, K], ends [E] int64, bias [E, N] -> [R, N] of `dtype`, contiguous.

    Rows ends[e - 1] to ends[e] are a @ b[e].T + bias[e], rows from the last end on zero. Ends never fall, and
    none is past R; groups may be empty. FP8 operands have scales: a_scale [E] (a group), [R, 1] (a row) or
    [R, K / 128]; b_scale [E], [E, N, 1], [E, N, K / 128] or [E, N / 128, K / 128], edges rounded up. Sums are
    fp32. Any strides, any extents, 0 included.
    """
    problem = rows_problem(a, b, ends, a_scale, b_scale, bias)
    if problem:
        raise ValueError(f"grouped_gemm: {problem}")
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    for expert, rows in enumerate(_groups(ends)):
        scale = a_scale if a_scale is None or a_scale.ndim == 1 else a_scale[rows]
        product = _real(a[rows], scale, expert) @ _real(b[expert], _of(b_scale, expert), expert).t()
        out[rows] = (product if bias is None else product + bias[expert].float()).to(dtype)
    return out


@op("torch", "triton", fake=_empty_weights)
def grouped_gemm_wgrad(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Tensor:
    """a [M, R], b [N, R], ends [E] int64 -> [E, M, N] of `dtype`, contiguous.

    Of e it is a @ b.T over the columns from ends[e - 1] to ends[e], zero for an empty group; the columns from
    the last end on are not read. FP8 operands have scales and ends that are multiples of 128: a_scale [E] (a
    group), [E, M, 1] (a row of a group) or [M, R / 128], b_scale likewise. Sums are fp32. Any strides, any
    extents, 0 included.
    """
    problem = wgrad_problem(a, b, ends, a_scale, b_scale)
    if problem:
        raise ValueError(f"grouped_gemm_wgrad: {problem}")
    return _shares(a, b, ends, a_scale, b_scale).to(dtype)


@op("triton", mutates=("out",), fake=lambda *args: None)
def grouped_gemm_accumulate_(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    fast_accum: bool = True,
) -> None:
    """out [E, M, N] += `grouped_gemm_wgrad(a, b, ends)`; summed in fp32, rounded once to out's dtype."""
    problem = wgrad_problem(a, b, ends, a_scale, b_scale)
    if problem:
        raise ValueError(f"grouped_gemm_accumulate_: {problem}")
    out.copy_(out.float() + _shares(a, b, ends, a_scale, b_scale))


@op("triton", mutates=("out",), fake=lambda *args: None)
def grouped_gemm_clear_(out: Tensor, ends: Tensor) -> None:
    """Zero rows ends[-1] to R of out [R, N], contiguous: what a product of the groups need not write."""
    out[_groups(ends)[-1].stop :] = 0


def _shares(a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> Tensor:
    shares = [a.new_zeros((0, len(a), len(b)), dtype=torch.float32)]
    for expert, rows in enumerate(_groups(ends)):
        operands = []
        for x, scale in ((a, a_scale), (b, b_scale)):
            if scale is not None and scale.ndim == 2:
                scale = scale[:, rows.start // ALIGN : rows.stop // ALIGN]
            operands.append(_real(x[:, rows], _of(scale, expert) if scale_is_own(scale) else scale, expert))
        shares.append((operands[0] @ operands[1].t())[None])
    return torch.cat(shares)


def scale_is_own(scale: Tensor | None) -> bool:
    """Whether it is one a group and row, and not one a block."""
    return scale is not None and scale.ndim == 3


def _of(scale: Tensor | None, expert: int) -> Tensor | None:
    return scale if scale is None or scale.ndim == 1 else scale[expert]


def _real(data: Tensor, scale: Tensor | None, expert: int) -> Tensor:
    if scale is None:
        return data.float()
    if scale.ndim == 1:
        return data.float() * scale[expert]
    return data.float() * expand_scale(scale, *data.shape)


def _groups(ends: Tensor) -> list[slice]:
    last = ends.tolist()
    return [slice(first, end) for first, end in zip([0, *last], last, strict=False)]


def rows_problem(
    a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
) -> str | None:
    """What makes this no grouped product at all, for any backend."""
    if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[2]:
        return f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [R, K] and [E, N, K]"
    if bias is not None and bias.shape != b.shape[:2]:
        return f"bias {tuple(bias.shape)} must be {tuple(b.shape[:2])}"
    problem = _ends_problem(a, b, ends, b.shape[0], a_scale, b_scale)
    if problem or a_scale is None or b_scale is None:
        return problem
    (R, K), (E, N, _) = a.shape, b.shape
    blocks = -(-K // 128)
    return _scale_problem("a", a_scale, ((E,), (R, 1), (R, blocks))) or _scale_problem(
        "b", b_scale, ((E,), (E, N, 1), (E, N, blocks), (E, -(-N // 128), blocks))
    )


def wgrad_problem(
    a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None
) -> str | None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        return f"a {tuple(a.shape)} and b {tuple(b.shape)} must be [M, R] and [N, R]"
    E = ends.shape[0] if ends.ndim == 1 else 0
    problem = _ends_problem(a, b, ends, E, a_scale, b_scale)
    if problem or a_scale is None or b_scale is None:
        return problem
    (M, R), N = a.shape, b.shape[0]
    blocks = -(-R // 128)
    return _scale_problem("a", a_scale, ((E,), (E, M, 1), (M, blocks))) or _scale_problem(
        "b", b_scale, ((E,), (E, N, 1), (N, blocks))
    )


def _ends_problem(
    a: Tensor, b: Tensor, ends: Tensor, experts: int, a_scale: Tensor | None, b_scale: Tensor | None
) -> str | None:
    if ends.shape != (experts,) or ends.dtype != torch.int64:
        return f"ends {tuple(ends.shape)} of {ends.dtype} must be ({experts},) of torch.int64"
    if (a_scale is None) != (b_scale is None):
        return "scale both operands or neither"
    if a_scale is None and (a.dtype != b.dtype or a.dtype not in DTYPES):
        return f"a is {a.dtype}, b {b.dtype}: give fp32, bf16 or fp16, both the same, or FP8 with scales"
    if a_scale is not None and not {a.dtype, b.dtype} <= FP8_DTYPES:
        return f"a is {a.dtype}, b {b.dtype}: operands with scales are FP8"
    return None


def _scale_problem(name: str, scale: Tensor, shapes: tuple[tuple[int, ...], ...]) -> str | None:
    if scale.dtype != torch.float32 or tuple(scale.shape) not in shapes:
        return f"{name}_scale {tuple(scale.shape)} of {scale.dtype} must be fp32, one of {shapes}"
    return None
