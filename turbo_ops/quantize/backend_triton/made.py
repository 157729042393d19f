"""Casts of what a kernel makes of its inputs on the way: what is cast is never in memory itself."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES
from turbo_ops.device.gated import gated
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.quantize.backend_triton.blocks import cast_blocks, plan_blockwise
from turbo_ops.quantize.backend_triton.layout import Layout
from turbo_ops.quantize.backend_triton.tiles import load4, this_tile
from turbo_ops.quantize.backend_triton.whole_axis import cast_by_amax, cast_by_history, plan_delayed
from turbo_ops.quantize.op import (
    cast_problem,
    quantize_both_cross_entropy,
    quantize_both_swiglu,
    quantize_both_swiglu_delayed,
)
from turbo_ops.swiglu.op import ACTIVATIONS


@triton.jit
def gated_tile(
    gate, up, R, C, gate_r, gate_c, up_r, up_c,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`this_tile` of act(gate) * up."""
    first_r, first_c, left_r, left_c, groups, cols, gates = this_tile(
        gate, R, C, gate_r, gate_c, EVEN, WIDE, G, BC
    )
    corner = up + first_r * up_r + first_c * up_c
    ups = load4(corner, 4 * groups, cols, left_r, left_c, up_r, up_c, EVEN)
    tiles = (
        gated(gates[0], ups[0], ACTIVATION), gated(gates[1], ups[1], ACTIVATION),
        gated(gates[2], ups[2], ACTIVATION), gated(gates[3], ups[3], ACTIVATION),
    )  # fmt: skip
    return first_r, first_c, left_r, left_c, groups, cols, tiles


@triton.jit
def gated_block_cast_kernel(
    gate, up, data, scale, data_t, scale_t, R, C, gate_r, gate_c, scale_r, scale_c, scale_t_r, scale_t_c,
    up_r, up_c, LIMIT: tl.constexpr, E8M0: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile = gated_tile(gate, up, R, C, gate_r, gate_c, up_r, up_c, ACTIVATION, EVEN, WIDE, G, BC)
    cast_blocks(
        tile, data, scale, data_t, scale_t, R, C, scale_r, scale_c, scale_t_r, scale_t_c,
        LIMIT, E8M0, B, SQUARE, EVEN, PACK, G, BC,
    )  # fmt: skip


@triton.jit
def gated_delayed_cast_kernel(
    gate, up, history, history_t, data, scale, data_t, scale_t, R, C, gate_r, gate_c, up_r, up_c,
    LIMIT: tl.constexpr, SATURATES: tl.constexpr, H: tl.constexpr, SLOTS: tl.constexpr, ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile = gated_tile(gate, up, R, C, gate_r, gate_c, up_r, up_c, ACTIVATION, EVEN, WIDE, G, BC)
    cast_by_history(
        tile, history, history_t, data, scale, data_t, scale_t, R, C,
        LIMIT, SATURATES, H, SLOTS, ROW, EVEN, PACK,
    )  # fmt: skip


@triton.jit
def loss_slope(
    z, rows, cols, labels, row_scale, lse, left_r, left_c, first_c, ignore_index, EVEN: tl.constexpr
):  # fmt: skip
    """The gradient of row_scale * cross-entropy by logits z, 0 where the tile ends."""
    label = tl.load(labels + rows, mask=rows < left_r, other=ignore_index)
    counts = label != ignore_index
    factor = tl.load(row_scale + rows, mask=counts, other=0.0)
    of_row = tl.load(lse + rows, mask=counts, other=0.0)
    slope = tl.exp(z.to(tl.float32) - of_row[:, None])
    slope = tl.where((first_c + cols)[None, :] == label[:, None], slope - 1, slope) * factor[:, None]
    inside = counts[:, None] if EVEN else counts[:, None] & (cols[None, :] < left_c)
    return tl.where(inside, slope, 0.0).to(z.dtype)


@triton.jit
def loss_tile(
    logits, labels, row_scale, lse, R, C, stride_r, stride_c, ignore_index,
    EVEN: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`this_tile` of the loss's gradient."""
    first_r, first_c, left_r, left_c, groups, cols, z = this_tile(
        logits, R, C, stride_r, stride_c, EVEN, WIDE, G, BC
    )
    rows = 4 * groups
    labels, row_scale, lse = labels + first_r, row_scale + first_r, lse + first_r
    tiles = (
        loss_slope(z[0], rows, cols, labels, row_scale, lse, left_r, left_c, first_c, ignore_index, EVEN),
        loss_slope(z[1], rows + 1, cols, labels, row_scale, lse, left_r, left_c, first_c, ignore_index, EVEN),
        loss_slope(z[2], rows + 2, cols, labels, row_scale, lse, left_r, left_c, first_c, ignore_index, EVEN),
        loss_slope(z[3], rows + 3, cols, labels, row_scale, lse, left_r, left_c, first_c, ignore_index, EVEN),
    )
    return first_r, first_c, left_r, left_c, groups, cols, tiles


@triton.jit
def loss_block_cast_kernel(
    logits, labels, row_scale, lse, data, scale, data_t, scale_t,
    R, C, stride_r, stride_c, scale_r, scale_c, scale_t_r, scale_t_c, ignore_index,
    LIMIT: tl.constexpr, E8M0: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    tile = loss_tile(
        logits, labels, row_scale, lse, R, C, stride_r, stride_c, ignore_index, EVEN, WIDE, G, BC
    )
    cast_blocks(
        tile, data, scale, data_t, scale_t, R, C, scale_r, scale_c, scale_t_r, scale_t_c,
        LIMIT, E8M0, B, SQUARE, EVEN, PACK, G, BC,
    )  # fmt: skip


@triton.jit
def loss_cast_kernel(
    logits, labels, row_scale, lse, amax, amax_t, data, scale, data_t, scale_t,
    R, C, stride_r, stride_c, ignore_index, LIMIT: tl.constexpr,
    EVEN: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """By one scale for all of it: amax [1] is known, and amax_t is amax."""
    tile = loss_tile(
        logits, labels, row_scale, lse, R, C, stride_r, stride_c, ignore_index, EVEN, WIDE, G, BC
    )
    cast_by_amax(
        tile, logits, amax, amax_t, data, scale, data_t, scale_t, R, C, stride_r, stride_c,
        LIMIT, 1, 0, EVEN, PACK, G, BC,
    )  # fmt: skip


def refuses_swiglu(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> str | None:
    if gate.ndim != 2 or gate.shape != up.shape or gate.dtype != up.dtype or gate.dtype not in DTYPES:
        return f"gate and up must be [R, C] of one dtype, fp32, bf16 or fp16, are {gate.dtype} and {up.dtype}"
    if activation not in ACTIVATIONS:
        return f"no kernel for {activation}"
    if 0 in gate.shape or (gate.stride(0) == 1 and gate.stride(1) != 1):
        return f"gate must have rows, is {tuple(gate.shape)} with strides {gate.stride()}"
    return refuses_device(gate, dtype)


def refuses_blocks(
    gate: Tensor,
    up: Tensor,
    activation: str,
    dtype: torch.dtype,
    block_rows: int,
    block_cols: int,
    scale_dtype: torch.dtype,
) -> str | None:
    if block_rows == 0 or block_cols == 0:
        return f"blocks of {(block_rows, block_cols)} reach beyond a tile: there amax comes before the cast"
    problem = cast_problem(gate, dtype, block_rows, block_cols, scale_dtype)
    return problem or refuses_swiglu(gate, up, activation, dtype)


@quantize_both_swiglu.backend("triton", refuses=refuses_blocks, planned=True)
def _(
    gate: Tensor,
    up: Tensor,
    activation: str,
    dtype: torch.dtype,
    block_rows: int,
    block_cols: int,
    scale_dtype: torch.dtype,
) -> Callable:
    layout = Layout(gate, dtype, (block_rows, block_cols), scale_dtype, both=True)
    cast = plan_blockwise(layout, gated_block_cast_kernel, up.stride(), ACTIVATION=activation)
    return lambda gate, up, *_: cast(gate, up)


def refuses_swiglu_delayed(
    gate: Tensor, up: Tensor, activation: str, history: Tensor, row: int, dtype: torch.dtype
) -> str | None:
    if history.dtype != torch.float32 or not history.is_contiguous():
        return f"history must be contiguous fp32, is {history.dtype} with strides {history.stride()}"
    return cast_problem(gate, dtype, 0, 0, torch.float32) or refuses_swiglu(gate, up, activation, dtype)


@quantize_both_swiglu_delayed.backend("triton", refuses=refuses_swiglu_delayed, planned=True)
def _(gate: Tensor, up: Tensor, activation: str, history: Tensor, row: int, dtype: torch.dtype) -> Callable:
    layout = Layout(gate, dtype, (0, 0), torch.float32, both=True)
    cast = plan_delayed(layout, history, row, gated_delayed_cast_kernel, up.stride(), ACTIVATION=activation)
    return lambda gate, up, activation, history, *_: cast(gate, up, history)


def refuses_loss(*args: object) -> str | None:
    logits, labels, row_scale, lse, peak, _, dtype, block_rows, block_cols, scale_dtype = args
    problem = cast_problem(logits, dtype, block_rows, block_cols, scale_dtype)  # type: ignore[arg-type]
    if problem or (block_rows, block_cols) == (1, 0):
        return problem or "a whole row's amax comes before its cast"
    for name, given in (("row_scale", row_scale), ("lse", lse), ("peak", peak)):
        if given.dtype != torch.float32 or not given.is_contiguous():  # type: ignore[attr-defined]
            return f"{name} must be contiguous fp32, is {given.dtype}"  # type: ignore[attr-defined]
    if labels.dtype != torch.int64 or not labels.is_contiguous():  # type: ignore[attr-defined]
        return f"labels must be contiguous int64, are {labels.dtype}"  # type: ignore[attr-defined]
    if 0 in logits.shape or logits.stride(1) != 1:  # type: ignore[attr-defined]
        return f"logits must have contiguous rows, are {tuple(logits.shape)}"  # type: ignore[attr-defined]
    return refuses_device(logits, dtype)  # type: ignore[arg-type]


@quantize_both_cross_entropy.backend("triton", refuses=refuses_loss, planned=True)
def _(
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
) -> Callable:
    layout = Layout(logits, dtype, (block_rows, block_cols), scale_dtype, both=True)
    if block_cols:
        cast = plan_blockwise(layout, loss_block_cast_kernel, (ignore_index,))
        return lambda logits, labels, row_scale, lse, *_: cast(logits, labels, row_scale, lse)
    grid, facts = layout.tiles(64, 128)
    whole = Launch(
        loss_cast_kernel, grid, (*layout.extents, *layout.strides, ignore_index),
        LIMIT=layout.limit, **facts, num_warps=4,
    )  # fmt: skip
    rounding = logits.dtype

    def run(
        logits: Tensor, labels: Tensor, row_scale: Tensor, lse: Tensor, peak: Tensor, *_: object
    ) -> tuple[Tensor, ...]:
        amax = (peak * row_scale).abs().amax(0, keepdim=True).to(rounding).float()
        outputs = layout.allocate()
        whole(logits, labels, row_scale, lse, amax, amax, *outputs)
        return layout.results(outputs)

    return run
