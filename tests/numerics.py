"""How close a result must be to the truth, and why."""

import re

import torch
from torch import Tensor

# Absolute and relative, by the dtype of the result.
TOLERANCE = {
    torch.bfloat16: 1e-2,  # half an ulp is 2^-9, and a kernel may round once more than the reference
    torch.float16: 1e-2,  # as bf16, so that one number holds for both; an ulp of a sum near 10 is 8e-3
    torch.float32: 1e-4,  # sums of up to 9000 terms in another order; TF32 (1e-3) does not pass
}
FEW = 0.02  # share of results that may be another FP8 number
# Hopper's tensor cores keep 13 bits below the largest of the FP8 products they add (arXiv 2412.19437).
FP8_PRODUCT_ON_GPU = 1e-2
# Bitwise: the casts. A scale that differs by an ulp makes resumed and recomputed runs differ.
BITWISE_FAMILIES = ("quantize",)
# But not of what a kernel makes on the way: a sum or an exp that differs by an ulp moves a value to the next.
MADE = re.compile("swiglu|cross_entropy")
FP8_STEP = {
    torch.float8_e4m3fn: 0.13,
    torch.float8_e4m3fnuz: 0.13,
    torch.float8_e5m2: 0.26,
    torch.float8_e5m2fnuz: 0.26,
}

# Signal to noise in dB of a linear layer's output and gradients, by the least precise FP8 type in the recipe.
SNR_FLOOR = {
    "e4m3": 25.0,  # 3 fraction bits: 31.5 dB an operand, two operands
    "e5m2": 20.0,  # 2 fraction bits: 25.4 dB an operand
}


def tolerance(name: str, family: str, result: Tensor, args: tuple) -> float:
    """The absolute and relative tolerance of one result of an op on `args`; 0 means bitwise."""
    if not result.is_floating_point():
        return 0.0
    if family in BITWISE_FAMILIES and MADE.search(name):
        return FP8_STEP.get(result.dtype, TOLERANCE[torch.bfloat16])
    if family in BITWISE_FAMILIES:
        return 0.0
    products_of_fp8 = any(isinstance(arg, Tensor) and arg.element_size() == 1 for arg in args)
    if products_of_fp8 and result.is_cuda:
        return max(FP8_PRODUCT_ON_GPU, TOLERANCE[result.dtype])
    return TOLERANCE[result.dtype]


def assert_close(actual: Tensor, expected: Tensor, within: float, what: str) -> None:
    """Values within a tolerance (0: every bit), and shape, dtype and strides equal; NaN equals NaN."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert strides(actual) == strides(expected), (
        f"{what}: strides {actual.stride()}, expected {expected.stride()} for {actual.shape}"
    )
    if within:
        if actual.element_size() == 1:
            share = (actual.float() != expected.float()).float().mean().item()
            assert share <= FEW, f"{what}: {share:.1%} of the results are the next FP8 number"
            actual, expected = actual.float(), expected.float()
        torch.testing.assert_close(
            actual, expected, atol=within, rtol=within, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
        return
    differs = different_bits(actual, expected)
    assert not differs.any(), (
        f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, first at "
        f"{differs.nonzero()[0].tolist()}: {actual[differs][:1].float().item()!r}, "
        f"expected {expected[differs][:1].float().item()!r}"
    )


def different_bits(actual: Tensor, expected: Tensor) -> Tensor:
    """Where bits differ; any NaN equals any NaN."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    both_nan = actual.float().isnan() & expected.float().isnan()
    return (actual.contiguous().view(bits) != expected.contiguous().view(bits)) & ~both_nan


def strides(tensor: Tensor) -> list[int]:
    """The strides that mean something, those of axes longer than 1; inductor asserts the same ones."""
    return [step for extent, step in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1]


def snr_db(actual: Tensor, expected: Tensor) -> float:
    """Signal to noise in dB; inf where both are equal (empty tensors included)."""
    actual, expected = actual.detach().double(), expected.detach().double()
    noise = (actual - expected).norm()
    return float("inf") if noise == 0 else (20 * torch.log10(expected.norm() / noise)).item()
