"""Scale each block of a tensor to the range of an FP8 type, then round."""

from collections.abc import Hashable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from turbo_ops.arch import DTYPES, FP8_DTYPES, fp8_dtype
from turbo_ops.casting import BLOCKS, GRAD_OUTPUT, SCALE_DTYPES, AmaxRow, Cast, Scaled
from turbo_ops.dispatch import Runner, directly, op
from turbo_ops.swiglu.op import swiglu_fwd

# Keeps amax / limit and limit / amax normal fp32 numbers for every FP8 type (limits 2^7.9 .. 2^15.8).
AMAX_FLOOR = 2.0**-110


@op("triton")
def quantize(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x [R, C], any strides -> data [R, C] of `dtype`, contiguous; scale, one per block, edges rounded up.

    A block of 0 is the whole axis. scale = amax / limit of its block (1 where amax is 0), data = x * (limit /
    amax), rounded to nearest even; NaN or inf in x makes its whole block of data * scale NaN. e8m0 scales are
    the power of two at or above amax / limit. Strides of scale: see `empty_scale`.
    """
    problem = cast_problem(x, dtype, block_rows, block_cols, scale_dtype)
    if problem:
        raise ValueError(f"quantize: {problem}")
    limit = torch.finfo(dtype).max
    blocks, rows, cols = _blocks(x.float(), block_rows, block_cols)
    scale, inverse = _scale(blocks.abs().amax((1, 3)), limit, scale_dtype)
    data = (blocks * inverse[:, None, :, None]).clamp(-limit, limit)
    data = data.flatten(2).flatten(0, 1)[:rows, :cols].to(dtype, memory_format=torch.contiguous_format)
    return data, empty_scale(x.device, rows, cols, block_rows, block_cols, scale_dtype).copy_(scale)


@op("triton")
def quantize_both(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize(x)` and `quantize(x.t())` from one read of x [R, C]: data, scale, data_t [C, R], scale_t."""
    args = (dtype, block_rows, block_cols, scale_dtype)
    return *quantize.reference(x, *args), *quantize.reference(x.t(), *args)


@op("triton", mutates=("history",))
def quantize_delayed(x: Tensor, history: Tensor, row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize(x)`, tensorwise, by the largest amax of the steps before: history[row, 1:] (`delayed`).

    Past the limit data saturates; what is not finite becomes NaN. x's own amax goes into history[row, 0]. The
    scale is 1 where the steps before saw only zeros.
    """
    return _delayed(x, history, row, dtype)


@op("triton", mutates=("history",))
def quantize_both_delayed(
    x: Tensor, history: Tensor, row: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_delayed(x)` and of x.t(), from one read of x [R, C]: data, scale, data_t [C, R], scale_t."""
    data, scale = _delayed(x, history, row, dtype)
    return data, scale, data.t().clone(memory_format=torch.contiguous_format), scale.clone()


@op("triton")
def quantize_both_swiglu(
    gate: Tensor,
    up: Tensor,
    activation: str,
    dtype: torch.dtype,
    block_rows: int,
    block_cols: int,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_both(swiglu(gate, up))` of gate, up [R, C]: what they make is never in memory itself."""
    y = swiglu_fwd.reference(gate, up, activation)
    return quantize_both.reference(y, dtype, block_rows, block_cols, scale_dtype)


@op("triton", mutates=("history",))
def quantize_both_swiglu_delayed(
    gate: Tensor, up: Tensor, activation: str, history: Tensor, row: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_both_delayed(swiglu(gate, up))` of gate, up [R, C], which is never in memory itself."""
    return quantize_both_delayed.reference(swiglu_fwd.reference(gate, up, activation), history, row, dtype)


@op("triton")
def quantize_both_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    row_scale: Tensor,
    lse: Tensor,
    peak: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    block_rows: int,
    block_cols: int,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_both` of d(sum(row_scale * cross-entropy)) / d(logits) [T, V], which is never in memory.

    labels [T] int64, row_scale [T] fp32; lse and peak [T] fp32 are `cross_entropy`'s.
    """
    grad = torch.exp(logits.float() - lse[:, None])
    grad = grad - (torch.arange(logits.shape[1], device=logits.device) == labels[:, None]).float()
    grad = torch.where((labels != ignore_index)[:, None], grad * row_scale[:, None], 0.0).to(logits.dtype)
    return quantize_both.reference(grad, dtype, block_rows, block_cols, scale_dtype)


@op("triton")
def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """data [R, C] of FP8 times scale (one entry per block, see `casting.Cast`) -> [R, C] of `dtype`."""
    return (data.float() * expand_scale(scale, *data.shape)).to(dtype).contiguous()


def cast_problem(
    x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> str | None:
    """What makes this no cast at all, for any backend."""
    if x.ndim != 2 or x.dtype not in DTYPES:
        return f"x must be [R, C] of fp32, bf16 or fp16, is {tuple(x.shape)} of {x.dtype}"
    if dtype not in FP8_DTYPES:
        return f"dtype={dtype}: use an FP8 type"
    asked = block_rows, block_cols, scale_dtype
    # compared, not looked up: a compiler that saw two recipes makes the blocks SymInts, which do not hash
    if all(asked != (*block, SCALE_DTYPES[scale]) for block, scale in BLOCKS.items()):
        known = ", ".join(f"{block} with {scale}" for block, scale in BLOCKS.items())
        return f"blocks of {(block_rows, block_cols)} with scales of {scale_dtype}: use one of {known}"
    return None


def _delayed(x: Tensor, history: Tensor, row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    problem = cast_problem(x, dtype, 0, 0, torch.float32)
    if problem:
        raise ValueError(f"quantize_delayed: {problem}")
    limit = torch.finfo(dtype).max
    scale, inverse = _scale(history[row, 1:].amax().view(1, 1), limit, torch.float32)
    visible = torch.where(x.isinf(), torch.nan, x.float())
    own = F.pad(visible.abs().flatten(), (0, 1)).amax()
    history[row, 0] = torch.maximum(history[row, 0], own)
    return (visible * inverse).clamp(-limit, limit).to(dtype).contiguous(), scale


def _blocks(x: Tensor, block_rows: int, block_cols: int) -> tuple[Tensor, int, int]:
    """x padded with zeros to whole blocks, as [R / r, r, C / c, c], and the true extents."""
    rows, cols = x.shape
    r, c = block_rows or max(rows, 1), block_cols or max(cols, 1)
    grid_r = -(-rows // r) if block_rows else 1
    grid_c = -(-cols // c) if block_cols else 1
    x = F.pad(x, (0, grid_c * c - cols, 0, grid_r * r - rows))
    return x.reshape(grid_r, r, grid_c, c), rows, cols


def _scale(amax: Tensor, limit: float, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """amax -> (scale, inverse); both come from a division that rounds to nearest, as in the kernels."""
    limits = torch.full_like(amax, limit)  # a tensor: CUDA divides by a number through its rounded reciprocal
    floored = torch.where(amax == 0, limits, amax.clamp_min(AMAX_FLOOR))
    scale, inverse = floored / limits, limits / floored
    if scale_dtype == torch.float8_e8m0fnu:
        bits = scale.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # rounded up: the scale never saturates a value
        exponent = torch.where(scale.isfinite(), exponent, 255)
        inverse = torch.where(exponent == 255, torch.nan, ((254 - exponent) << 23).view(torch.float32))
        scale = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale, inverse


def scale_layout(
    rows: int, cols: int, block_rows: int, block_cols: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape and strides of the scales of a [rows, cols] tensor: what cuBLASLt reads on Hopper.

    (1, 128): strides (1, rows). (128, 128): rows padded to a multiple of 4 entries. Others: contiguous.
    """
    r = -(-rows // block_rows) if block_rows else 1
    c = -(-cols // block_cols) if block_cols else 1
    if (block_rows, block_cols) == (1, 128):  # no look-up: see cast_problem
        return (r, c), (1, r)
    return (r, c), ((c + 3) // 4 * 4 if (block_rows, block_cols) == (128, 128) else c, 1)


def empty_scale(
    device: torch.device, rows: int, cols: int, block_rows: int, block_cols: int, scale_dtype: torch.dtype
) -> Tensor:
    """Room for the scales of a [rows, cols] tensor, laid out by `scale_layout`."""
    (r, c), strides = scale_layout(rows, cols, block_rows, block_cols)
    if strides[0] > c and strides[1] == 1:
        return torch.empty((r, strides[0]), dtype=scale_dtype, device=device)[:, :c]  # padding included
    return torch.empty_strided((r, c), strides, dtype=scale_dtype, device=device)


def block_of(extent: int, scales: int) -> int:
    """The block of an axis with `scales` scales: 0 (whole), 1, 32 or 128; ValueError where none fits."""
    if scales == 1 or extent == scales == 0:
        return 0
    for block in (1, 32, 128):
        if -(-extent // block) == scales:
            return block
    raise ValueError(
        f"scale has {scales} entries along an axis of {extent}: neither 1, nor one per 1, 32 or 128"
    )


def expand_scale(scale: Tensor, rows: int, cols: int) -> Tensor:
    """scale, one entry per block -> fp32, broadcastable to [rows, cols]."""
    scale = scale.float()
    for axis, extent in enumerate((rows, cols)):
        block = block_of(extent, scale.shape[axis])
        if block > 1:
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, extent)
    return scale


def cast(
    x: Tensor, how: Cast | None, amax: AmaxRow | None = None, run: Runner = directly, slot: Hashable = None
) -> Scaled:
    """x [R, C] cast by `how`, blocks along its last axis; None keeps it as it is. amax: of a delayed cast.

    run, slot: of a caller that casts tensors of one kind in this slot, again and again.
    """
    if how is None:
        return Scaled(x)
    past = _past(x, how, amax) if how.history else None
    if past is None:
        return Scaled(*run((slot, quantize), quantize, x, *cast_arguments(x, how)))
    dtype = fp8_dtype(how.dtype, x.device)
    return Scaled(*run((slot, quantize_delayed), quantize_delayed, x, past.history, past.row, dtype))


def cast_both(
    x: Tensor,
    how: Cast | None,
    how_t: Cast | None,
    amax: AmaxRow | None = None,
    run: Runner = directly,
    slot: Hashable = None,
) -> tuple[Scaled, Scaled]:
    """x [R, C] cast by `how` along C, and x.t() by `how_t` along R; one read where the casts are the same."""
    if how is None or how != how_t:
        return cast(x, how, amax, run, slot), cast(x.t(), how_t, amax, run, (slot, "transposed"))
    past = _past(x, how, amax) if how.history else None
    if past is None:
        data, scale, data_t, scale_t = run((slot, quantize_both), quantize_both, x, *cast_arguments(x, how))
    else:
        dtype = fp8_dtype(how.dtype, x.device)
        data, scale, data_t, scale_t = run(
            (slot, quantize_both_delayed), quantize_both_delayed, x, past.history, past.row, dtype
        )
    return Scaled(data, scale), Scaled(data_t, scale_t)


def _past(x: Tensor, how: Cast, amax: AmaxRow | None) -> AmaxRow | None:
    """The row to cast x by; None, with x noted in it, where it knows nothing yet."""
    if amax is None:
        raise ValueError(f"a cast with a history of {how.history} steps needs one: use turbo_nn.Linear")
    if torch.compiler.is_compiling() and amax.row == GRAD_OUTPUT:
        return None  # a compiled backward cannot write what forward was given
    if amax.known:
        return amax
    amax.note(x)
    return None


def cast_arguments(x: Tensor, how: Cast) -> tuple[torch.dtype, int, int, torch.dtype]:
    """What `quantize` takes behind x for a cast on x's device."""
    return fp8_dtype(how.dtype, x.device), *how.block, SCALE_DTYPES[how.scale_dtype]
