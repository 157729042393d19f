"""Inputs of grouped_gemm and grouped_gemm_wgrad."""

from functools import partial

import torch
from torch import Tensor

# sizes of the groups, rows behind them, N, K
SHAPES = {
    "test": {
        "one-padded": ([70], 10, 40, 72),
        "empty-ends": ([0, 33, 0, 129, 0], 7, 70, 200),
        "one-has-all": ([0, 0, 150, 0], 0, 24, 40),
        "no-row": ([0, 0], 0, 8, 16),
        "none-used": ([0, 0, 0], 5, 8, 16),
        "one-row": ([0, 1], 0, 1, 1),
        "no-K": ([3, 4], 1, 8, 0),
        "no-N": ([3, 4], 1, 0, 8),
        "many": ([i * 7 % 13 for i in range(130)], 3, 16, 32),
    },
    "bench": {
        "mixtral": ([4096, 512, 2048, 3072, 1024, 2560, 1536, 1536], 0, 28672, 4096),
        "qwen3": ([64 + 14 * (i % 64) for i in range(128)], 384, 1536, 2048),
    },
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def grouped_gemm(size: str, device: torch.device) -> dict:
    found = {}
    for name, shape in SHAPES[size].items():
        for dtype in DTYPES if size == "test" else ("bf16",):
            found[f"{dtype}-{name}"] = partial(_rows, shape, DTYPES[dtype], device, False, False)
    if size == "test":
        shape = SHAPES[size]["empty-ends"]
        found["bf16-bias"] = partial(_rows, shape, torch.bfloat16, device, True, False)
        found["bf16-transposed"] = partial(_rows, shape, torch.bfloat16, device, False, True)
    return found


def grouped_gemm_wgrad(size: str, device: torch.device) -> dict:
    return {
        f"{dtype}-{name}": partial(_wgrad, shape, DTYPES[dtype], device)
        for name, shape in SHAPES[size].items()
        for dtype in (DTYPES if size == "test" else ("bf16",))
    }


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0)


def _operand(shape: tuple, contracted: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) / max(contracted, 1) ** 0.25).to(dtype)


def _rows(shape: tuple, dtype: torch.dtype, device: torch.device, biased: bool, transposed: bool) -> tuple:
    sizes, behind, n, k = shape
    a = _operand((sum(sizes) + behind, k), k, dtype, device)
    b = _operand((len(sizes), n, k), k, dtype, device)
    a[sum(sizes) :] = torch.nan  # not to be read
    b = b.transpose(1, 2).contiguous().transpose(1, 2) if transposed else b
    bias = torch.randn(len(sizes), n, device=device).to(dtype) if biased else None
    return a, b, _ends(sizes, device), bias


def _wgrad(shape: tuple, dtype: torch.dtype, device: torch.device) -> tuple:
    """As backward has them: both transposed."""
    sizes, behind, n, k = shape
    rows = max(sizes, default=0)
    a, b = (_operand((sum(sizes) + behind, width), rows, dtype, device) for width in (n, k))
    a[sum(sizes) :], b[sum(sizes) :] = torch.nan, torch.nan
    return a.t(), b.t(), _ends(sizes, device)
