"""The repaired interpreter computes what a GPU would, and notices what a GPU would not."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from numerics import assert_close  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="kernels are compiled here: TRITON_INTERPRET is not 1"
)

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
EDGES = (
    0.0,
    -0.0,
    448.0,
    460.0,
    464.0,
    239.9,
    57344.0,
    61440.0,
    1e6,
    1e-3,
    2e-3,
    1e-9,
    float("nan"),
    float("inf"),
)


@triton.jit
def cast_kernel(x, y, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0.0).to(y.dtype.element_ty), mask=at < n)


@triton.jit
def product_kernel(a, b, c, B: tl.constexpr):
    row, col = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    product = tl.dot(tl.load(a + row * B + col), tl.load(b + row * B + col))
    tl.store(c + row * B + col, product.to(c.dtype.element_ty))


@triton.jit
def scaled_product_kernel(a, a_scale, b, b_scale, c, B: tl.constexpr, FORMAT: tl.constexpr):
    row, col = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    block = tl.arange(0, B // 32)[None, :]
    left, right = tl.load(a + row * B + col), tl.load(b + col * B + row)
    scales = tl.load(a_scale + row * (B // 32) + block), tl.load(b_scale + row * (B // 32) + block)
    tl.store(c + row * B + col, tl.dot_scaled(left, scales[0], FORMAT, right, scales[1], FORMAT))


@triton.jit
def arithmetic_kernel(x, y, out, B: tl.constexpr):
    at = tl.arange(0, B)
    left, right = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, left * right + left)
    tl.store(out + B, tl.sum(left, 0))
    tl.store(out + B + 1, tl.max(left, 0))
    tl.store(out + B + 2 + at, tl.where(at % 2 == 0, left, 2.0).to(tl.bfloat16))


@triton.jit
def library_kernel(x, out, factor, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(out + at, libdevice.tanh(tl.load(x + at)) * factor)


@triton.jit
def scatter_kernel(x, out, step, B: tl.constexpr):
    tl.store(out + tl.program_id(0) * step + tl.arange(0, B), tl.load(x + tl.arange(0, B)))


@triton.jit
def gather_kernel(x, indices, out, B: tl.constexpr):
    tl.atomic_add(out + tl.load(indices + tl.arange(0, B)), tl.load(x + tl.arange(0, B)))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, *FP8], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_casts_round_and_saturate(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.cat([torch.randn(2000) * 30, torch.randn(2000) * 1e-2, torch.tensor(EDGES)]).to(source)
    y = torch.empty(x.shape, dtype=target)
    cast_kernel[(5,)](x, y, x.numel(), B=1024)
    limit = torch.finfo(target).max if target in FP8 else float("inf")
    assert_close(y, x.float().clamp(-limit, limit).to(target), 0.0, f"{source} -> {target}")


@pytest.mark.parametrize("source", FP8, ids=str)
def test_casts_from_fp8_are_exact(source: torch.dtype) -> None:
    x, y = torch.arange(256).to(torch.uint8).view(source), torch.empty(256)
    cast_kernel[(1,)](x, y, 256, B=256)
    assert_close(y, x.float(), 0.0, f"{source} -> fp32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8], ids=str)
def test_dot(dtype: torch.dtype) -> None:
    a, b = (torch.randn(32, 32).to(dtype) for _ in range(2))
    c = torch.empty(32, 32)
    product_kernel[(1,)](a, b, c, B=32)
    torch.testing.assert_close(c, a.float() @ b.float())


@pytest.mark.parametrize(("dtype", "form"), [(FP8[0], "e4m3"), (FP8[1], "e5m2")], ids=str)
def test_dot_scaled(dtype: torch.dtype, form: str) -> None:
    a, b = (torch.randn(64, 64).to(dtype) for _ in range(2))
    scales = [torch.randint(120, 134, (64, 2), dtype=torch.uint8) for _ in range(2)]
    c = torch.empty(64, 64)
    scaled_product_kernel[(1,)](a, scales[0], b, scales[1], c, B=64, FORMAT=form)
    real = [
        x.float() * torch.exp2(s.float() - 127).repeat_interleave(32, 1)
        for x, s in zip((a, b), scales, strict=True)
    ]
    torch.testing.assert_close(c, real[0] @ real[1].t(), atol=1e-3, rtol=1e-4)


def test_bf16_arithmetic() -> None:
    x, y = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.empty(130, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](x, y, out, B=64)
    assert_close(out[:64], x * y + x, 0.0, "x * y + x")
    torch.testing.assert_close(out[64].float(), x.float().sum(), atol=0.05, rtol=1e-2)
    assert out[65] == x.max()
    assert torch.equal(out[66:], torch.where(torch.arange(64) % 2 == 0, x, 2.0))


def test_libdevice_and_float_arguments() -> None:
    x, out = torch.randn(64), torch.empty(64)
    library_kernel[(1,)](x, out, 0.1, B=64)
    torch.testing.assert_close(out, x.tanh() * torch.tensor(0.1), atol=1e-6, rtol=1e-6)


def test_bf16_atomics() -> None:
    x, indices = torch.ones(64).bfloat16(), torch.arange(64, dtype=torch.int32) % 4
    out = torch.zeros(4, dtype=torch.bfloat16)
    gather_kernel[(1,)](x, indices, out, B=64)
    assert out.tolist() == [16.0] * 4


def test_out_of_bounds_is_an_error() -> None:
    x, out = torch.randn(64), torch.empty(127)
    with pytest.raises(
        triton.runtime.errors.InterpreterError, match=r"out-of-bounds store: 1 of 64 lanes.*lane 63"
    ):
        scatter_kernel[(2,)](x, out, 64, B=64)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="out-of-bounds load"):
        scatter_kernel[(1,)](x[:32].clone(), out, 64, B=64)


def test_racing_stores_are_an_error() -> None:
    x, out = torch.randn(64), torch.empty(128)
    with pytest.raises(RuntimeError, match="store race: 32 addresses are written by more than one program"):
        scatter_kernel[(2,)](x, out, 32, B=64)
    scatter_kernel[(2,)](x, out, 64, B=64)
    assert torch.equal(out, torch.cat([x, x]))
