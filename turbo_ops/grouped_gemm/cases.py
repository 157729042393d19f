"""Inputs of the ops of grouped_gemm."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from turbo_ops.arch import fp8_dtype

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


# scales of FP8 operands: a group's, a row's, 1x128 by 128x128, and 1x128 twice
WAYS = ("tensorwise", "rowwise", "blockwise", "1x128")
# sizes in blocks of 128, where FP8 operands are contracted over rows
ALIGNED = {
    "empty-ends": ([0, 128, 0, 256, 0], 128, 70, 200),
    "none-used": ([0, 0], 128, 8, 16),
    "no-row": ([0, 0], 0, 8, 16),
}


def grouped_gemm(size: str, device: torch.device) -> dict:
    found = {}
    for name, shape in SHAPES[size].items():
        for dtype in DTYPES if size == "test" else ("bf16",):
            found[f"{dtype}-{name}"] = partial(_rows, shape, DTYPES[dtype], device)
        for way in ("rowwise", "blockwise") if size == "bench" else ():
            found[f"e4m3-{way}-{name}"] = partial(_fp8_rows, shape, way, "e4m3", device)
    if size == "test":
        shape = SHAPES[size]["empty-ends"]
        found["bf16-bias"] = partial(_rows, shape, torch.bfloat16, device, biased=True)
        found["bf16-transposed"] = partial(_rows, shape, torch.bfloat16, device, transposed=True)
        found["bf16-to-fp32"] = partial(_rows, shape, torch.bfloat16, device, out=torch.float32)
        for way in WAYS:
            for name in ("empty-ends", "no-row", "one-row", "many"):
                found[f"e4m3-{way}-{name}"] = partial(_fp8_rows, SHAPES[size][name], way, "e4m3", device)
        found["hybrid-tensorwise-bias"] = partial(_fp8_rows, shape, "tensorwise", "e5m2", device, biased=True)
    return found


def grouped_gemm_wgrad(size: str, device: torch.device) -> dict:
    found = {
        f"{dtype}-{name}": partial(_wgrad, shape, DTYPES[dtype], device)
        for name, shape in SHAPES[size].items()
        for dtype in (DTYPES if size == "test" else ("bf16",))
    }
    for name, shape in ALIGNED.items() if size == "test" else SHAPES[size].items():
        sizes, behind, n, k = shape
        aligned = [-(-rows // 128) * 128 for rows in sizes], -(-behind // 128) * 128, n, k
        for way in WAYS if size == "test" else ("rowwise", "1x128"):
            if way != "blockwise":
                found[f"e4m3-{way}-{name}"] = partial(_fp8_wgrad, aligned, way, "e4m3", device)
    if size == "test":
        found["bf16-to-fp32"] = partial(
            _wgrad, SHAPES[size]["empty-ends"], torch.bfloat16, device, out=torch.float32
        )
        found["hybrid-tensorwise"] = partial(_fp8_wgrad, ALIGNED["empty-ends"], "tensorwise", "e5m2", device)
    return found


def grouped_gemm_accumulate_(size: str, device: torch.device) -> dict:
    """Into fp32, and into the operands' own type."""
    return {
        f"{name}-into-{str(into)[6:]}": partial(_accumulate, make, into)
        for name, make in grouped_gemm_wgrad(size, device).items()
        for into in (torch.float32, torch.bfloat16)
        if not name.startswith("fp")
    }


def grouped_gemm_clear_(size: str, device: torch.device) -> dict:
    return {
        f"{str(dtype)[6:]}-{name}": partial(_garbage, shape, dtype, device)
        for name, shape in SHAPES[size].items()
        for dtype in (torch.bfloat16, torch.float32)
    }


def _garbage(shape: tuple, dtype: torch.dtype, device: torch.device) -> tuple:
    sizes, behind, n, _ = shape
    out = torch.randn(sum(sizes) + behind, n, device=device).to(dtype)
    out[sum(sizes) :] = torch.nan
    return out, _ends(sizes, device)


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0)


def _operand(shape: tuple, contracted: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) / max(contracted, 1) ** 0.25).to(dtype)


def _rows(
    shape: tuple, dtype: torch.dtype, device: torch.device,
    *, biased: bool = False, transposed: bool = False, out: torch.dtype | None = None,
) -> tuple:  # fmt: skip
    sizes, behind, n, k = shape
    a = _operand((sum(sizes) + behind, k), k, dtype, device)
    b = _operand((len(sizes), n, k), k, dtype, device)
    a[sum(sizes) :] = torch.nan  # not to be read
    b = b.transpose(1, 2).contiguous().transpose(1, 2) if transposed else b
    bias = torch.randn(len(sizes), n, device=device).to(dtype) if biased else None
    return a, b, _ends(sizes, device), None, None, bias, out or dtype, True


def _wgrad(
    shape: tuple, dtype: torch.dtype, device: torch.device, *, out: torch.dtype | None = None
) -> tuple:
    """As backward has them: both transposed."""
    sizes, behind, n, k = shape
    rows = max(sizes, default=0)
    a, b = (_operand((sum(sizes) + behind, width), rows, dtype, device) for width in (n, k))
    a[sum(sizes) :], b[sum(sizes) :] = torch.nan, torch.nan
    return a.t(), b.t(), _ends(sizes, device), None, None, out or dtype, True


def _fp8_rows(shape: tuple, way: str, of_a: str, device: torch.device, *, biased: bool = False) -> tuple:
    """Values of an FP8 type near 1, and scales that undo what they sum to."""
    a, b, ends, _, _, bias, dtype, _ = _rows(shape, torch.bfloat16, device, biased=biased)
    (R, K), (E, N, _) = a.shape, b.shape
    blocks = -(-K // 128)
    shapes = {
        "tensorwise": ((E,), (E,)),
        "rowwise": ((R, 1), (E, N, 1)),
        "blockwise": ((R, blocks), (E, -(-N // 128), blocks)),
        "1x128": ((R, blocks), (E, N, blocks)),
    }[way]
    scales = [torch.rand(shape, device=device) + 0.5 for shape in shapes]
    return a.to(fp8_dtype(of_a, device)), b.to(fp8_dtype("e4m3", device)), ends, *scales, bias, dtype, True


def _fp8_wgrad(shape: tuple, way: str, of_a: str, device: torch.device) -> tuple:
    """Contracted along contiguous rows, as a cast leaves them."""
    a, b, ends, _, _, dtype, _ = _wgrad(shape, torch.bfloat16, device)
    (M, R), N, E = a.shape, len(b), len(ends)
    blocks = -(-R // 128)
    shapes = {
        "tensorwise": ((E,), (E,)),
        "rowwise": ((E, M, 1), (E, N, 1)),
        "1x128": ((M, blocks), (N, blocks)),
    }[way]
    scales = [torch.rand(shape, device=device) + 0.5 for shape in shapes]
    operands = (x.to(fp8_dtype(name, device)).contiguous() for x, name in ((a, of_a), (b, "e4m3")))
    return *operands, ends, *scales, dtype, True


def _accumulate(make: Callable[[], tuple], into: torch.dtype) -> tuple:
    a, b, ends, a_scale, b_scale, _, fast_accum = make()
    out = torch.randn(len(ends), len(a), len(b), device=a.device).to(into)
    return out, a, b, ends, a_scale, b_scale, fast_accum
