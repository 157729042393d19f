"""One NT kernel for every precision: scales of a whole K wait for the epilogue, others are used every BK."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import DTYPES, FP8_DTYPES, hardware
from turbo_ops.device.accumulate import add_tile
from turbo_ops.device.launch import Launch
from turbo_ops.device.target import refuses_device
from turbo_ops.gemm.op import gemm, gemm_accumulate_, operand_problem
from turbo_ops.quantize.op import block_of

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
E8M0 = torch.float8_e8m0fnu

# Tiles (BM, BN, BK, warps, stages) by operands and scales; `test_aot.py` holds them to no spills.
TILES = {
    "sm90": {
        "fp32": (128, 128, 32, 8, 3),
        "half": (128, 256, 64, 8, 3),
        "fp8": (128, 256, 128, 8, 3),
        "block": (128, 128, 128, 8, 3),
        "mx": (128, 128, 128, 8, 2),
    },
    "gfx942": {
        "fp32": (128, 128, 32, 8, 2),
        "half": (256, 256, 64, 8, 2),
        "fp8": (256, 256, 128, 8, 2),
        "block": (128, 128, 128, 8, 2),
        "mx": (128, 128, 128, 8, 1),
    },
    "gfx950": {
        "fp32": (128, 128, 32, 8, 2),
        "half": (256, 256, 64, 8, 2),
        "fp8": (256, 256, 128, 8, 2),
        "block": (128, 128, 128, 8, 2),
        "mx": (256, 256, 128, 8, 2),
    },
}
SMALL = {"fp32": (32, 64, 32, 4, 2), "half": (32, 64, 64, 4, 3)}
SMALL |= dict.fromkeys(("fp8", "block", "mx"), (32, 64, 128, 4, 3))
SMALL_GFX942 = SMALL | {"mx": (32, 64, 64, 4, 2)}  # upcasts in registers: 128 along K spill
SMALL_TILES = 64  # below this many wide tiles, half of an H200's 132 multiprocessors would idle


def refuses(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
) -> str | None:
    problem = operand_problem(a, b, a_scale, b_scale)
    if problem:
        return problem
    if dtype not in DTYPES:
        return f"the output must be fp32, bf16 or fp16, not {dtype}"
    if a_scale is None or b_scale is None:
        if a.dtype != b.dtype or a.dtype not in DTYPES:
            return f"unscaled operands must both be fp32, bf16 or fp16, are {a.dtype} and {b.dtype}"
        return refuses_device(a)
    if not {a.dtype, b.dtype} <= FP8_DTYPES:
        return f"scaled operands must be FP8, are {a.dtype} and {b.dtype}"
    if (a_scale.dtype == E8M0) != (b_scale.dtype == E8M0):
        return f"scales must both be e8m0 or neither, are {a_scale.dtype} and {b_scale.dtype}"
    blocks = {block_of(x.shape[1], s.shape[1]) for x, s in ((a, a_scale), (b, b_scale))}
    if a_scale.dtype == E8M0 and not blocks <= {0, 32}:
        return f"e8m0 scales along K must cover 32, not {blocks}"
    if a_scale.dtype != E8M0 and not blocks <= {0, 128}:
        return f"fp32 scales along K must cover 128 or all of it, not {blocks}"
    return refuses_device(a, a.dtype, b.dtype)


@triton.jit
def upcast_mx(x, scale, ROWS: tl.constexpr, COLS: tl.constexpr):
    """x [ROWS, COLS] times its e8m0 scale per 32 columns, exact in bf16."""
    wide = scale.to(tl.int32)
    factor = tl.where(wide == 255, 0x7FC00000, wide << 23).to(tl.float32, bitcast=True)
    x = tl.reshape(x.to(tl.float32), (ROWS, COLS // 32, 32)) * factor[:, :, None]
    return tl.reshape(x, (ROWS, COLS)).to(tl.bfloat16)


@triton.jit
def gemm_kernel(
    a, b, out, a_scale, b_scale, bias, M, N, K,
    stride_am, stride_ak, stride_bn, stride_bk, stride_om, scale_am, scale_ak, scale_bn, scale_bk,
    SCALE: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, MX_NATIVE: tl.constexpr,
    IMPRECISE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """SCALE: "none", "whole" (epilogue), "block" (one scale per BK) or "mx" (one per 32).

    GROUP rows of tiles are walked together, so that the tiles in flight share operands in L2.
    """
    pid, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    rows = (group * GROUP + pid % (GROUP * tiles_n) % height).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (pid % (GROUP * tiles_n) // height).to(tl.int64) * BN + tl.arange(0, BN)
    row, col = rows % M, cols % N  # loads past the edge wrap around and are never stored
    ks = tl.arange(0, BK)
    a_at = a + row[:, None] * stride_am + ks[None, :].to(tl.int64) * stride_ak
    b_at = b + col[None, :] * stride_bn + ks[:, None].to(tl.int64) * stride_bk
    if SCALE == "mx":
        blocks = tl.arange(0, BK // 32)
        a_scale_at = a_scale + row[:, None] * scale_am + blocks[None, :] * scale_ak
        b_scale_at = b_scale + col[:, None] * scale_bn + blocks[None, :] * scale_bk
    elif SCALE != "none":
        a_scale_at, b_scale_at = row // A_ROWS * scale_am, col // B_ROWS * scale_bn
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        left = K - start
        x = tl.load(a_at, mask=ks[None, :] < left, other=0.0)
        y = tl.load(b_at, mask=ks[:, None] < left, other=0.0)
        if SCALE == "mx":
            x_scale = tl.load(a_scale_at, mask=blocks[None, :] * 32 < left, other=127)
            y_scale = tl.load(b_scale_at, mask=blocks[None, :] * 32 < left, other=127)
            if MX_NATIVE:
                total = tl.dot_scaled(x, x_scale, A_FORMAT, y, y_scale, B_FORMAT, total)
            else:
                wide_y = tl.trans(upcast_mx(tl.trans(y), y_scale, BN, BK))
                total = tl.dot(upcast_mx(x, x_scale, BM, BK), wide_y, total)
            a_scale_at += BK // 32 * scale_ak
            b_scale_at += BK // 32 * scale_bk
        elif SCALE == "block":
            partial = tl.dot(x, y, max_num_imprecise_acc=IMPRECISE)
            total += partial * (
                tl.load(a_scale + a_scale_at)[:, None] * tl.load(b_scale + b_scale_at)[None, :]
            )
            a_scale_at += scale_ak
            b_scale_at += scale_bk
        elif SCALE == "whole":
            total = tl.dot(x, y, total, max_num_imprecise_acc=IMPRECISE)
        else:
            total = tl.dot(x, y, total, input_precision="ieee")
        a_at += BK * stride_ak
        b_at += BK * stride_bk
    if SCALE == "whole":
        total = total * (tl.load(a_scale + a_scale_at)[:, None] * tl.load(b_scale + b_scale_at)[None, :])
    if bias is not None:
        total += tl.load(bias + col).to(tl.float32)[None, :]
    first = (pid % (GROUP * tiles_n) // height).to(tl.int64) * BN
    if ACCUMULATE:
        add_tile(out, total, rows, first, M, N, stride_om, BM, BN)
    else:
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        out_at = out + rows[:, None] * stride_om + cols[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=inside)


def _kind(a: Tensor, a_scale: Tensor | None, b_scale: Tensor | None) -> tuple[str, str]:
    """Which row of TILES, and how the kernel applies scales."""
    if a_scale is None or b_scale is None:
        return ("fp32" if a.dtype == torch.float32 else "half"), "none"
    if a_scale.dtype == E8M0:
        return "mx", "mx"
    return ("fp8", "whole") if a_scale.shape[1] == b_scale.shape[1] == 1 else ("block", "block")


def _scale_layout(x: Tensor, scale: Tensor | None) -> tuple[int, int, int]:
    """(rows of x per scale, stride along rows, stride along K); a whole axis has stride 0."""
    if scale is None:
        return 1, 0, 0
    rows = block_of(x.shape[0], scale.shape[0])
    along_k = scale.stride(1) if scale.shape[1] > 1 or scale.dtype == E8M0 else 0
    return rows or 1, scale.stride(0) if rows else 0, along_k


def _plan(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, out_stride: int,
    *, fast_accum: bool, accumulate: bool,
) -> Callable:  # fmt: skip
    """What multiplies operands of this kind: run(out, a, b, a_scale, b_scale, bias)."""
    (M, K), N, arch = a.shape, b.shape[0], hardware(a.device)
    row, scaling = _kind(a, a_scale, b_scale)
    BM, BN, BK, warps, stages = TILES.get(arch, TILES["sm90"])[row]
    if accumulate and BM * BN > 128 * 256:
        BM = 128
    if triton.cdiv(M, BM) * triton.cdiv(N, BN) < SMALL_TILES and arch != "cpu":
        BM, BN, BK, warps, stages = (SMALL_GFX942 if arch == "gfx942" else SMALL)[row]
    (a_rows, *a_strides), (b_rows, *b_strides) = _scale_layout(a, a_scale), _scale_layout(b, b_scale)
    strides = *a.stride(), *b.stride(), out_stride, *a_strides, *b_strides
    launch = Launch(
        gemm_kernel, (triton.cdiv(M, BM) * triton.cdiv(N, BN),), (M, N, K, *strides),
        SCALE=scaling, A_ROWS=a_rows, B_ROWS=b_rows,
        A_FORMAT=FORMATS.get(a.dtype), B_FORMAT=FORMATS.get(b.dtype),
        MX_NATIVE=arch != "gfx942" and {a.dtype, b.dtype} <= FORMATS.keys(),
        IMPRECISE=None if fast_accum else 0, ACCUMULATE=accumulate,
        BM=BM, BN=BN, BK=BK, GROUP=8, num_warps=warps, num_stages=stages,
    )  # fmt: skip

    def run(
        out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None
    ) -> None:
        if scaling == "mx" and a_scale is not None and b_scale is not None:
            a_scale, b_scale = a_scale.view(torch.uint8), b_scale.view(torch.uint8)
        launch(a, b, out, a_scale, b_scale, bias)

    return run if M * N else lambda *_: None


@gemm.backend("triton", refuses=refuses, planned=True)
def _(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Callable:
    (M, N), device = (a.shape[0], b.shape[0]), a.device
    multiply = _plan(a, b, a_scale, b_scale, N, fast_accum=fast_accum, accumulate=False)

    def run(
        a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, bias: Tensor | None, *_: object
    ) -> Tensor:
        out = torch.empty_strided((M, N), (max(N, 1), 1), dtype=dtype, device=device)
        multiply(out, a, b, a_scale, b_scale, bias)
        return out

    return run


def refuses_accumulate(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, fast_accum: bool
) -> str | None:
    if out.shape != (a.shape[0], b.shape[0]) or (out.numel() and out.stride(1) != 1):
        return f"out must be [M, N] = {(a.shape[0], b.shape[0])} with contiguous rows, is {tuple(out.shape)}"
    return refuses(a, b, a_scale, b_scale, None, out.dtype, fast_accum)


@gemm_accumulate_.backend("triton", refuses=refuses_accumulate, planned=True)
def _(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    fast_accum: bool = True,
) -> Callable:
    multiply = _plan(a, b, a_scale, b_scale, out.stride(0), fast_accum=fast_accum, accumulate=True)
    return lambda out, a, b, a_scale, b_scale, *_: multiply(out, a, b, a_scale, b_scale, None)
