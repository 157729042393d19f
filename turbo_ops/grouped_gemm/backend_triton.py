"""Tiles of rows are numbered over all groups; each program looks among the ends for the group of its own."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES, hardware
from turbo_ops.device.accumulate import add_tile
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.grouped_gemm.op import (
    grouped_gemm,
    grouped_gemm_accumulate_,
    grouped_gemm_clear_,
    grouped_gemm_wgrad,
    rows_problem,
    wgrad_problem,
)

# Tiles (rows, columns, contracted, warps, stages) by operands and scales; `test_aot.py` holds them to no
# spills.
TILES = {
    "sm90": {
        "fp32": (128, 128, 32, 8, 3),
        "half": (128, 256, 64, 8, 3),
        "fp8": (128, 256, 128, 8, 3),
        "block": (128, 128, 128, 8, 3),
    },
    "gfx942": {
        "fp32": (128, 128, 32, 8, 2),
        "half": (128, 256, 64, 8, 2),
        "fp8": (128, 128, 64, 8, 2),
        "block": (64, 128, 128, 8, 2),
    },
    "gfx950": {
        "fp32": (128, 128, 32, 8, 2),
        "half": (128, 256, 64, 8, 2),
        "fp8": (128, 256, 64, 8, 2),
        "block": (64, 128, 128, 8, 2),
    },
}
UNSCALED = (0, 0, 0)
MAX_EXPERTS = 1024  # ends that a program holds


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
    return rows_problem(a, b, ends, a_scale, b_scale, bias) or _refuses(a, b, ends, dtype)


def refuses_wgrad(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
) -> str | None:
    return wgrad_problem(a, b, ends, a_scale, b_scale) or _refuses(a, b, ends, dtype)


def refuses_accumulate(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    fast_accum: bool,
) -> str | None:
    if out.shape != (len(ends), len(a), len(b)) or not out.is_contiguous():
        return f"out must be {(len(ends), len(a), len(b))}, contiguous, is {tuple(out.shape)}"
    return refuses_wgrad(a, b, ends, a_scale, b_scale, out.dtype, fast_accum)


def _refuses(a: Tensor, b: Tensor, ends: Tensor, dtype: torch.dtype) -> str | None:
    if not ends.is_contiguous() or len(ends) > MAX_EXPERTS:
        return f"ends must be contiguous and at most {MAX_EXPERTS}, are {len(ends)}"
    if dtype not in DTYPES:
        return f"the output must be fp32, bf16 or fp16, not {dtype}"
    return refuses_device(a, a.dtype, b.dtype)


@triton.jit
def group_of(slot, ends, R, E, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Of the slot-th tile of BM rows: its group, first row and its group's end. Group E is what is behind."""
    experts = tl.arange(0, EXPERTS)
    end = tl.load(ends + experts, mask=experts < E, other=R)
    first = tl.load(ends + experts - 1, mask=(experts > 0) & (experts <= E), other=0)
    first = tl.where(experts <= E, first, R)
    tiles = tl.cdiv(end - first, BM)
    through = tl.cumsum(tiles, 0)
    mine = (through > slot) & (through - tiles <= slot)
    group = tl.min(tl.where(mine, experts, E), 0)  # E, too, for a slot that no group needs: it ends at 0
    row = tl.sum(tl.where(mine, first + (slot - through + tiles) * BM, 0), 0)
    return group, row, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def multiply(
    a_at, b_at, a_scale_at, b_scale_at, K, step_a, step_b, step_a_scale, step_b_scale, total,
    SCALE: tl.constexpr, IMPRECISE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """total and the product over K; scales of a whole K multiply at the end, others every BK ("block")."""
    ks = tl.arange(0, BK)
    for start in range(0, K, BK):
        left = K - start
        x = tl.load(a_at, mask=ks[None, :] < left, other=0.0)
        y = tl.load(b_at, mask=ks[:, None] < left, other=0.0)
        if SCALE == "block":
            partial = tl.dot(x, y, max_num_imprecise_acc=IMPRECISE)
            total += partial * (tl.load(a_scale_at)[:, None] * tl.load(b_scale_at)[None, :])
            a_scale_at += step_a_scale
            b_scale_at += step_b_scale
        elif SCALE == "whole":
            total = tl.dot(x, y, total, max_num_imprecise_acc=IMPRECISE)
        else:
            total = tl.dot(x, y, total, input_precision="ieee")
        a_at += step_a
        b_at += step_b
    if SCALE == "whole":
        total = total * (tl.load(a_scale_at)[:, None] * tl.load(b_scale_at)[None, :])
    return total


@triton.jit
def grouped_gemm_kernel(
    a, b, out, ends, a_scale, b_scale, bias, R, N, K, E, slots,
    stride_am, stride_ak, stride_be, stride_bn, stride_bk,
    scale_ae, scale_am, scale_ak, scale_be, scale_bn, scale_bk,
    SCALE: tl.constexpr, B_ROWS: tl.constexpr, IMPRECISE: tl.constexpr, EXPERTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP tiles of rows are walked together, so that the tiles in flight share operands in L2."""
    pid, tiles_n = tl.program_id(0), tl.cdiv(N, BN)
    band = pid // (GROUP * tiles_n)
    height = min(slots - band * GROUP, GROUP)
    slot = band * GROUP + pid % (GROUP * tiles_n) % height
    group, first, end = group_of(slot.to(tl.int64), ends, R, E, EXPERTS, BM)
    rows = first + tl.arange(0, BM)
    cols = (pid % (GROUP * tiles_n) // height).to(tl.int64) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if group < E:
        own, row, col = group.to(tl.int64), tl.minimum(rows, R - 1), cols % N
        ks = tl.arange(0, BK)
        a_at = a + row[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak
        b_at = b + own * stride_be + col[None, :] * stride_bn + ks[:, None].to(tl.int64) * stride_bk
        a_scale_at, b_scale_at = a_scale, b_scale
        if SCALE != "none":
            a_scale_at = a_scale + own * scale_ae + row * scale_am
            b_scale_at = b_scale + own * scale_be + col // B_ROWS * scale_bn
        total = multiply(
            a_at, b_at, a_scale_at, b_scale_at, K, BK * stride_ak, BK * stride_bk, scale_ak, scale_bk, total,
            SCALE, IMPRECISE, BK,
        )  # fmt: skip
        if bias is not None:
            total += tl.load(bias + own * N + col).to(tl.float32)[None, :]
    inside = (rows[:, None] < end) & (cols[None, :] < N)
    tl.store(out + rows[:, None] * N + cols[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def grouped_wgrad_kernel(
    a, b, out, ends, a_scale, b_scale, M, N, stride_am, stride_ar, stride_bn, stride_br,
    scale_ae, scale_am, scale_ak, scale_be, scale_bn, scale_bk,
    SCALE: tl.constexpr, IMPRECISE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's product, over the rows that its group has."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    expert, tile = (pid // (tiles_m * tiles_n)).to(tl.int64), pid % (tiles_m * tiles_n)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    K = (end - first).to(tl.int32)
    if SCALE != "none":  # as they are, and the compiler sees that rows are aligned
        first, K = first // 128 * 128, K // 128 * 128
    rows = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    row, col, ks = rows % M, cols % N, first + tl.arange(0, BK)
    a_at = a + row[:, None] * stride_am + ks[None, :] * stride_ar
    b_at = b + col[None, :] * stride_bn + ks[:, None] * stride_br
    a_scale_at, b_scale_at = a_scale, b_scale
    if SCALE != "none":
        a_scale_at = a_scale + expert * scale_ae + row * scale_am + first // 128 * scale_ak
        b_scale_at = b_scale + expert * scale_be + col * scale_bn + first // 128 * scale_bk
    total = multiply(
        a_at, b_at, a_scale_at, b_scale_at, K, BK * stride_ar, BK * stride_br, scale_ak,
        scale_bk, tl.zeros((BM, BN), dtype=tl.float32), SCALE, IMPRECISE, BK,
    )  # fmt: skip
    out += expert * M * N
    if ACCUMULATE:
        add_tile(out, total, rows, (tile % tiles_n).to(tl.int64) * BN, M, N, N, BM, BN)
    else:
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        tl.store(out + rows[:, None] * N + cols[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def clear_kernel(out, ends, R, N, E, BM: tl.constexpr, BN: tl.constexpr):
    """Zeros behind the last end."""
    last = tl.load(ends + E - 1)
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    if (tl.program_id(0).to(tl.int64) + 1) * BM > last:
        for start in range(0, N, BN):
            cols = start + tl.arange(0, BN)
            inside = (rows[:, None] >= last) & (rows[:, None] < R) & (cols[None, :] < N)
            tl.store(out + rows[:, None] * N + cols[None, :], 0.0, mask=inside)


class Tile(NamedTuple):
    """How a product is tiled and how its kernel takes scales."""

    extents: dict
    compiled: dict
    facts: dict


def _tile(a: Tensor, of_a: tuple | None, of_b: tuple | None, fast_accum: bool) -> Tile:
    """of_a, of_b: `_scale_strides`; None without scales."""
    tiles = TILES.get(hardware(a.device), TILES["sm90"])
    kind = "fp32" if a.dtype == torch.float32 else "half"
    scaling = "none"
    if of_a and of_b and a.shape[1]:
        kind, scaling = ("block", "block") if of_a[2] or of_b[2] else ("fp8", "whole")
    BM, BN, BK, warps, stages = tiles[kind]
    facts = {"SCALE": scaling, "IMPRECISE": None if fast_accum else 0}
    return Tile({"BM": BM, "BN": BN, "BK": BK}, {"num_warps": warps, "num_stages": stages}, facts)


def _scale_strides(scale: Tensor | None) -> tuple[int, int, int] | None:
    """Along groups, rows and the contracted axis; an axis with one entry has stride 0."""
    if scale is None:
        return None
    strides = [
        stride if extent > 1 else 0 for extent, stride in zip(scale.shape, scale.stride(), strict=True)
    ]
    return {1: (*strides, 0, 0), 2: (0, *strides), 3: tuple(strides)}[scale.ndim]  # type: ignore[return-value]


@grouped_gemm.backend("triton", refuses=refuses, planned=True)
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
    (R, K), (E, N, _) = a.shape, b.shape
    of_a, of_b = _scale_strides(a_scale), _scale_strides(b_scale)
    tile, how, facts = _tile(a, of_a, of_b, fast_accum)
    if bias is not None and hardware(a.device) == "gfx942":
        tile["BN"] = 128  # 256 spill 13 registers
    slots = triton.cdiv(R, tile["BM"]) + E  # each group may leave a tile in part, and so may what is behind
    rows = 128 if b_scale is not None and b_scale.ndim == 3 and b_scale.shape[1] != N else 1
    launch = Launch(
        grouped_gemm_kernel, (slots * triton.cdiv(N, tile["BN"]),),
        (R, N, K, E, slots, *a.stride(), *b.stride(), *(of_a or UNSCALED), *(of_b or UNSCALED)),
        B_ROWS=rows, EXPERTS=triton.next_power_of_2(E + 1), **facts, **tile, GROUP=8, **how,
    )  # fmt: skip

    def run(
        a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None,
        bias: Tensor | None, *_: object,
    ) -> Tensor:  # fmt: skip
        out = torch.empty((R, N), dtype=dtype, device=a.device)
        if R * N:
            launch(a, b, out, ends, a_scale, b_scale, None if bias is None else bias.contiguous())
        return out

    return run


def _plan_wgrad(
    a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None,
    *, fast_accum: bool, accumulate: bool,
) -> Callable:  # fmt: skip
    """What writes or adds: run(out, a, b, ends, a_scale, b_scale)."""
    M, N, E = len(a), len(b), len(ends)
    of_a, of_b = _scale_strides(a_scale), _scale_strides(b_scale)
    tile, how, facts = _tile(a, of_a, of_b, fast_accum)
    launch = Launch(
        grouped_wgrad_kernel, (E * triton.cdiv(M, tile["BM"]) * triton.cdiv(N, tile["BN"]),),
        (M, N, *a.stride(), *b.stride(), *(of_a or UNSCALED), *(of_b or UNSCALED)),
        ACCUMULATE=accumulate, **facts, **tile, **how,
    )  # fmt: skip

    def run(
        out: Tensor, a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None
    ) -> None:
        if E * M * N:
            launch(a, b, out, ends, a_scale, b_scale)

    return run


@grouped_gemm_wgrad.backend("triton", refuses=refuses_wgrad, planned=True)
def _(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Callable:
    shape = len(ends), len(a), len(b)
    multiply_into = _plan_wgrad(a, b, ends, a_scale, b_scale, fast_accum=fast_accum, accumulate=False)

    def run(
        a: Tensor, b: Tensor, ends: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, *_: object
    ) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=a.device)
        multiply_into(out, a, b, ends, a_scale, b_scale)
        return out

    return run


@grouped_gemm_accumulate_.backend("triton", refuses=refuses_accumulate, planned=True)
def _(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    fast_accum: bool = True,
) -> Callable:
    multiply_into = _plan_wgrad(a, b, ends, a_scale, b_scale, fast_accum=fast_accum, accumulate=True)
    return lambda out, a, b, ends, a_scale, b_scale, *_: multiply_into(out, a, b, ends, a_scale, b_scale)


def refuses_clear(out: Tensor, ends: Tensor) -> str | None:
    if out.ndim != 2 or not out.is_contiguous() or not ends.is_contiguous():
        return f"out {tuple(out.shape)} and ends {tuple(ends.shape)} must be contiguous"
    return refuses_device(out)


@grouped_gemm_clear_.backend("triton", refuses=refuses_clear, planned=True)
def _(out: Tensor, ends: Tensor) -> Callable:
    (R, N), rows = out.shape, 64
    launch = Launch(clear_kernel, (triton.cdiv(R, rows),), (R, N, len(ends)), BM=rows, BN=64, num_warps=4)
    return launch if R * N else lambda *_: None
