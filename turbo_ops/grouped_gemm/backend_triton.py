"""Tiles of rows are numbered over all groups; each program looks among the ends for the group of its own."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import hardware
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.grouped_gemm.op import grouped_gemm, grouped_gemm_wgrad, rows_problem, wgrad_problem

# Tiles (rows, columns, contracted, warps, stages) by dtype; `test_aot.py` holds them to no spills.
TILES = {
    "sm90": {"fp32": (128, 128, 32, 8, 3), "half": (128, 256, 64, 8, 3)},
    "gfx942": {"fp32": (128, 128, 32, 8, 2), "half": (128, 256, 64, 8, 2)},
    "gfx950": {"fp32": (128, 128, 32, 8, 2), "half": (128, 256, 64, 8, 2)},
}
MAX_EXPERTS = 1024  # ends that a program holds


def refuses(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None) -> str | None:
    return rows_problem(a, b, ends, bias) or _refuses_ends(a, ends)


def refuses_wgrad(a: Tensor, b: Tensor, ends: Tensor) -> str | None:
    return wgrad_problem(a, b, ends) or _refuses_ends(a, ends)


def _refuses_ends(a: Tensor, ends: Tensor) -> str | None:
    if not ends.is_contiguous() or len(ends) > MAX_EXPERTS:
        return f"ends must be contiguous and at most {MAX_EXPERTS}, are {len(ends)}"
    return refuses_device(a)


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
def grouped_gemm_kernel(
    a, b, out, ends, bias, R, N, K, E, slots,
    stride_am, stride_ak, stride_be, stride_bn, stride_bk,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """GROUP tiles of rows are walked together, so that the tiles in flight share operands in L2."""
    pid, tiles_n = tl.program_id(0), tl.cdiv(N, BN)
    band = pid // (GROUP * tiles_n)
    height = min(slots - band * GROUP, GROUP)
    slot = band * GROUP + pid % (GROUP * tiles_n) % height
    group, first, end = group_of(slot.to(tl.int64), ends, R, E, EXPERTS, BM)
    rows = first + tl.arange(0, BM)
    cols = (pid % (GROUP * tiles_n) // height).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (rows[:, None] < end) & (cols[None, :] < N)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if group < E:
        if bias is not None:
            total += tl.load(bias + group.to(tl.int64) * N + cols % N).to(tl.float32)[None, :]
        ks = tl.arange(0, BK)
        a_at = a + rows[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak
        b_at = b + group.to(tl.int64) * stride_be
        b_at += (cols % N)[None, :] * stride_bn + ks[:, None].to(tl.int64) * stride_bk
        for start in range(0, K, BK):
            left = K - start
            x = tl.load(a_at, mask=(rows[:, None] < end) & (ks[None, :] < left), other=0.0)
            y = tl.load(b_at, mask=ks[:, None] < left, other=0.0)
            total = tl.dot(x, y, total, input_precision="ieee")
            a_at += BK * stride_ak
            b_at += BK * stride_bk
    tl.store(out + rows[:, None] * N + cols[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def grouped_wgrad_kernel(
    a, b, out, ends, M, N, stride_am, stride_ar, stride_bn, stride_br,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's product, over the rows that its group has."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    expert, tile = (pid // (tiles_m * tiles_n)).to(tl.int64), pid % (tiles_m * tiles_n)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    rows = (tile // tiles_n).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tile % tiles_n).to(tl.int64) * BN + tl.arange(0, BN)
    ks = first + tl.arange(0, BK)
    a_at = a + (rows % M)[:, None] * stride_am + ks[None, :] * stride_ar
    b_at = b + (cols % N)[None, :] * stride_bn + ks[:, None] * stride_br
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(first, end, BK):
        left = end - start + first
        x = tl.load(a_at, mask=ks[None, :] < left, other=0.0)
        y = tl.load(b_at, mask=ks[:, None] < left, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
        a_at += BK * stride_ar
        b_at += BK * stride_br
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = out + expert * M * N + rows[:, None] * N + cols[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def _tile(a: Tensor) -> tuple[dict, dict]:
    """The tile's extents, and how it is compiled."""
    tiles = TILES.get(hardware(a.device), TILES["sm90"])
    BM, BN, BK, warps, stages = tiles["fp32" if a.dtype == torch.float32 else "half"]
    return {"BM": BM, "BN": BN, "BK": BK}, {"num_warps": warps, "num_stages": stages}


@grouped_gemm.backend("triton", refuses=refuses, planned=True)
def _(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None = None) -> Callable:
    (R, K), (E, N, _) = a.shape, b.shape
    tile, how = _tile(a)
    if bias is not None and hardware(a.device) == "gfx942":
        tile["BN"] = 128  # 256 spill 13 registers
    slots = triton.cdiv(R, tile["BM"]) + E  # each group may leave a tile in part, and so may what is behind
    grid = (slots * triton.cdiv(N, tile["BN"]),)
    launch = Launch(
        grouped_gemm_kernel, grid, (R, N, K, E, slots, *a.stride(), *b.stride()),
        EXPERTS=triton.next_power_of_2(E + 1), **tile, GROUP=8, **how,
    )  # fmt: skip

    def run(a: Tensor, b: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.empty((R, N), dtype=a.dtype, device=a.device)
        if R * N:
            launch(a, b, out, ends, None if bias is None else bias.contiguous())
        return out

    return run


@grouped_gemm_wgrad.backend("triton", refuses=refuses_wgrad, planned=True)
def _(a: Tensor, b: Tensor, ends: Tensor) -> Callable:
    M, N, E = len(a), len(b), len(ends)
    tile, how = _tile(a)
    grid = (E * triton.cdiv(M, tile["BM"]) * triton.cdiv(N, tile["BN"]),)
    strides = *a.stride(), *b.stride()
    launch = Launch(grouped_wgrad_kernel, grid, (M, N, *strides), **tile, **how)

    def run(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        out = torch.empty((E, M, N), dtype=a.dtype, device=a.device)
        if E * M * N:
            launch(a, b, out, ends)
        return out

    return run
