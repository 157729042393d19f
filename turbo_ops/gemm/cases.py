"""Inputs of gemm and gemm_accumulate_."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from turbo_ops.arch import fp8_dtype
from turbo_ops.quantize.op import quantize

# (rows, contracted) of a and b, and the scale's dtype
SCALES = {
    "tensorwise": ((0, 0), (0, 0), torch.float32),
    "rowwise": ((1, 0), (1, 0), torch.float32),
    "1x128-128x128": ((1, 128), (128, 128), torch.float32),
    "1x128-1x128": ((1, 128), (1, 128), torch.float32),
    "mx": ((1, 32), (1, 32), torch.float8_e8m0fnu),
}
# M, N, K
SHAPES = {
    "test": [(1, 1, 1), (0, 8, 16), (8, 0, 16), (8, 16, 0), (1, 256, 576), (33, 70, 200), (128, 256, 384)],
    "bench": [(8192, 6144, 4096), (8192, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336)],
}
HIGH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def gemm(size: str, device: torch.device) -> dict:
    found = {}
    for m, n, k in SHAPES[size]:
        shape = f"{m}x{n}x{k}"
        for name, dtype in HIGH.items() if size == "test" else (("bf16", torch.bfloat16),):
            found[f"{name}-{shape}"] = partial(_high, m, n, k, dtype, dtype, device)
        for name, scales in SCALES.items():
            found[f"fp8-{name}-{shape}"] = partial(
                _fp8, m, n, k, ("e4m3", "e4m3"), scales, torch.bfloat16, device
            )
    if size == "test":
        m, n, k = 48, 80, 272
        found["bf16-to-fp32"] = partial(_high, m, n, k, torch.bfloat16, torch.float32, device)
        found["bf16-strided"] = partial(
            _high, m, n, k, torch.bfloat16, torch.bfloat16, device, transposed=True
        )
        found["bf16-bias"] = partial(_high, m, n, k, torch.bfloat16, torch.bfloat16, device, bias=True)
        for name, scales in SCALES.items():
            found[f"fp8-{name}-hybrid"] = partial(
                _fp8, m, n, k, ("e5m2", "e4m3"), scales, torch.bfloat16, device
            )
            found[f"fp8-{name}-bias"] = partial(
                _fp8, m, n, k, ("e4m3", "e4m3"), scales, torch.bfloat16, device, bias=True
            )
            found[f"fp8-{name}-to-fp32"] = partial(
                _fp8, m, n, k, ("e4m3", "e4m3"), scales, torch.float32, device
            )
    return found


def gemm_accumulate_(size: str, device: torch.device) -> dict:
    def accumulating(make: Callable[[], tuple], dtype: torch.dtype) -> tuple:
        a, b, a_scale, b_scale, _, _, fast = make()
        return torch.randn(a.shape[0], b.shape[0], device=device).to(dtype), a, b, a_scale, b_scale, fast

    return {
        f"{name}-into-{str(dtype)[6:]}": partial(accumulating, make, dtype)
        for name, make in gemm(size, device).items()
        if not name.startswith(("fp16", "fp32")) and "bias" not in name
        for dtype in (torch.float32, torch.bfloat16)
    }


def _high(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    out: torch.dtype,
    device: torch.device,
    *,
    bias: bool = False,
    transposed: bool = False,
) -> tuple:
    a, b = _operand(m, k, device).to(dtype), _operand(n, k, device).to(dtype)
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    return a, b, None, None, _bias(n, dtype, device, bias), out, True


def _fp8(
    m: int,
    n: int,
    k: int,
    names: tuple,
    scales: tuple,
    out: torch.dtype,
    device: torch.device,
    *,
    bias: bool = False,
) -> tuple:
    a_block, b_block, scale_dtype = scales
    a_dtype, b_dtype = (fp8_dtype(name, device) for name in names)
    a, a_scale = quantize.reference(_operand(m, k, device), a_dtype, *a_block, scale_dtype)
    b, b_scale = quantize.reference(_operand(n, k, device), b_dtype, *b_block, scale_dtype)
    return a, b, a_scale, b_scale, _bias(n, torch.bfloat16, device, bias), out, True


def _operand(rows: int, cols: int, device: torch.device) -> Tensor:
    """Rows of different magnitude, unit variance on average over K, so that products are near 1."""
    return (
        torch.randn(rows, cols, device=device)
        * torch.linspace(0.5, 1.5, rows, device=device)[:, None]
        / max(cols, 1) ** 0.25
    )


def _bias(n: int, dtype: torch.dtype, device: torch.device, wanted: bool) -> Tensor | None:
    return torch.randn(n, device=device).to(dtype) if wanted else None
