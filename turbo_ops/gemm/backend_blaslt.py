"""cuBLASLt and hipBLASLt through torch.mm, torch._scaled_mm and torch._scaled_mm_v2."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from turbo_ops.arch import FP8_DTYPES, FP8_FNUZ, hardware
from turbo_ops.gemm.op import gemm, gemm_accumulate_, operand_problem
from turbo_ops.quantize.op import scale_layout

HIGH = (torch.float32, torch.bfloat16, torch.float16)
E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)
# What cuBLASLt knows: blocks (rows, contracted) of a and of b, 0 = the whole axis
PLAIN = (((0, 0), (0, 0)), ((1, 0), (1, 0)))
BLOCKWISE = (((1, 128), (128, 128)), ((1, 128), (1, 128)))
KINDS = {(1, 128): ScalingType.BlockWise1x128, (128, 128): ScalingType.BlockWise128x128}
ONE_ROW = [ScalingType.BlockWise1x128.value]
FP8_ARCHS = ("sm89", "sm90", "sm100", "gfx942", "gfx950")


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
    if problem or a.device.type != "cuda":
        return problem or f"needs a GPU, the tensors are on {a.device}"
    if a_scale is None or b_scale is None:
        if a.dtype != b.dtype or a.dtype not in HIGH or dtype not in (a.dtype, torch.float32):
            return f"no product of {a.dtype} and {b.dtype} into {dtype}"
        return None
    return _refuses_fp8(a, b, a_scale, b_scale, bias, dtype)


def _refuses_fp8(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> str | None:
    (M, K), N, arch = a.shape, b.shape[0], hardware(a.device)
    if arch not in FP8_ARCHS or not {a.dtype, b.dtype} <= FP8_DTYPES:
        return f"no FP8 product of {a.dtype} and {b.dtype} on {arch}"
    if (arch == "gfx942") != (a.dtype in FP8_FNUZ.values()) or (a.dtype in E5M2 and b.dtype in E5M2):
        return f"no product of {a.dtype} and {b.dtype} on {arch}"
    if N % 16 or K % 16 or K == 0:
        return f"N and K must be multiples of 16, are {N} and {K}"
    for name, x in (("a", a), ("b", b)):
        if x.stride(1) != 1 or x.stride(0) % 16 or x.storage_offset() % 16:
            return (
                f"{name} needs a contiguous contracted axis and rows aligned to 16, has strides {x.stride()}"
            )
    if bias is not None and dtype != torch.float32 and bias.dtype != dtype:
        return f"bias must have the output's dtype {dtype}, has {bias.dtype}"
    blocks = _blocks(a, b, a_scale, b_scale)
    if blocks is None or a_scale.dtype != torch.float32:
        return (
            f"no scales of {a_scale.dtype}, {tuple(a_scale.shape)} and {tuple(b_scale.shape)}, in this layout"
        )
    if blocks in BLOCKWISE and (arch != "sm90" or M % 4 or a.dtype in E5M2 or b.dtype in E5M2):
        return f"blockwise scales need sm90, E4M3 and M % 4 == 0, not {arch}, {a.dtype}, {b.dtype} and M={M}"
    return None


def _blocks(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> tuple | None:
    return _matching_blocks(
        a.shape, b.shape, a_scale.shape, b_scale.shape, a_scale.stride(), b_scale.stride()
    )


@functools.lru_cache(maxsize=4096)
def _matching_blocks(a: tuple, b: tuple, a_scale: tuple, b_scale: tuple, *strides: tuple) -> tuple | None:
    """The first pair of blocks that gives scales of these shapes, blockwise ones in their strides too."""
    for blocks in (*PLAIN, *BLOCKWISE):
        layouts = [
            scale_layout(shape[0], shape[1], *block) for shape, block in zip((a, b), blocks, strict=True)
        ]
        if [shape for shape, _ in layouts] == [tuple(a_scale), tuple(b_scale)] and (
            blocks in PLAIN or [stride for _, stride in layouts] == list(strides)
        ):
            return blocks
    return None


@gemm.backend("blaslt", refuses=refuses, planned=True)
def plan(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = True,
) -> Callable:
    if a_scale is None or b_scale is None:
        return _plan_high(a.dtype, bias, dtype)
    fused = bias is not None and dtype != torch.float32  # cuBLASLt has no bias epilogue for fp32 outputs
    blocks = _blocks(a, b, a_scale, b_scale)
    product = _blockwise if blocks in BLOCKWISE else _whole_axis
    # what F.scaled_mm works out in 20 us of Python a call
    tensorwise = a_scale.numel() == b_scale.numel() == 1
    kinds = [[KINDS[block].value] for block in blocks] if blocks in BLOCKWISE else (tensorwise, fast_accum)

    def run(
        a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, *_: object
    ) -> Tensor:
        out = product(a, b.t(), a_scale, b_scale, bias if fused else None, dtype, *kinds)
        return out if bias is None or fused else out.add_(bias)

    return run


def _blockwise(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype,
    a_kind: list[int], b_kind: list[int],
) -> Tensor:  # fmt: skip
    padded = b_scale if b_kind == ONE_ROW else _padded(b_scale).t()
    return torch._scaled_mm_v2(a, b, [a_scale], a_kind, [], [padded], b_kind, [], bias, dtype, [], False)


def _whole_axis(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype,
    tensorwise: bool, fast_accum: bool,
) -> Tensor:  # fmt: skip
    b_scale = b_scale if tensorwise else b_scale.t()
    return torch._scaled_mm(a, b, a_scale, b_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast_accum)


def _padded(scale: Tensor) -> Tensor:
    """The scales of 128x128 blocks with padding along K: as `empty_scale` laid them out, else copied."""
    rows, cols, width = *scale.shape, scale.stride(0)
    if width == cols:
        return scale
    if scale.untyped_storage().nbytes() >= 4 * (scale.storage_offset() + rows * width):
        return scale.as_strided((rows, width), (width, 1))
    return torch.nn.functional.pad(scale, (0, width - cols))


def _plan_high(operand: torch.dtype, bias: Tensor | None, dtype: torch.dtype) -> Callable:
    if dtype != operand:

        def widened(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
            out = torch.mm(a, b.t(), out_dtype=dtype)
            return out if rest[2] is None else out.add_(rest[2])

        return widened
    if bias is None:
        return lambda a, b, *_: torch.mm(a, b.t())
    return lambda a, b, a_scale, b_scale, bias, *_: torch.addmm(bias.to(dtype), a, b.t())


def refuses_accumulate(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, fast_accum: bool
) -> str | None:
    return refuses(a, b, a_scale, b_scale, None, torch.float32, fast_accum)


@gemm_accumulate_.backend("blaslt", refuses=refuses_accumulate, planned=True)
def _(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    fast_accum: bool = True,
) -> Callable:
    in_epilogue = a_scale is None and out.dtype == a.dtype  # no product of its own in memory
    product = None if in_epilogue else plan(a, b, a_scale, b_scale, None, torch.float32, fast_accum)

    def run(
        out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, *_: object
    ) -> None:
        if product is None:
            out.addmm_(a, b.t())
        else:
            out.add_(product(a, b, a_scale, b_scale, None))

    return run
