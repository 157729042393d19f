"""Every backend of every op on every case has the reference's values, dtypes, shapes and strides."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from numerics import assert_close, different_bits, strides, tolerance
from torch import Tensor
from torch._subclasses import FakeTensorMode

import turbo_ops
from turbo_ops.cases import cases
from turbo_ops.dispatch import REGISTRY, Op, UnsupportedError
from turbo_ops.tuning import copy

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
PACKAGE = Path(turbo_ops.__file__).parent
BACKEND_FILES = sorted(PACKAGE.glob("*/backend_*.py"))
FNUZ_CASES = re.compile(r"130x200-fp32|37x203|130x256|70x140|0x130|33x70x200|hybrid|to-fp32")


def absent(backend: str) -> str | None:
    """Why this machine lacks what `backend` stands on; None where it must work."""
    if backend == "native":
        native = importlib.import_module("turbo_ops.native")
        return native.reason()
    if backend in ("blaslt", "torch"):
        return None if DEVICE.type == "cuda" else f"{backend} calls a GPU library"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def contracts(size: str = "test") -> list:
    return [
        pytest.param(op, backend, make, id=f"{op.name}-{backend}-{case}")
        for op in REGISTRY.values()
        for backend in op.order
        for case, make in cases(op, size, DEVICE).items()
    ]


def accepted(op: Op, backend: str, args: tuple) -> None:
    """Skip, with the reason, where `backend` refuses these arguments."""
    try:
        with turbo_ops.force(**{op.name: backend}):
            op.choose(*args)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


def as_tuple(result: object) -> tuple:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def check(op: Op, backend: str, make) -> None:
    args = make()
    accepted(op, backend, args)
    expected_args, actual_args = (tuple(copy(arg) for arg in args) for _ in range(2))
    expected = as_tuple(op.reference(*expected_args))
    with turbo_ops.force(**{op.name: backend}):
        actual = as_tuple(op(*actual_args))
    assert len(actual) == len(expected)
    for index, (ours, truth) in enumerate(zip(actual, expected, strict=True)):
        assert_close(ours, truth, tolerance(op.name, op.family, truth, args), f"{op.name} output {index}")
    for name, before, ours, truth in zip(op._parameters, args, actual_args, expected_args, strict=True):
        if not isinstance(before, Tensor):
            continue
        if name in op.mutates:
            assert_close(ours, truth, tolerance(op.name, op.family, truth, args), f"{op.name} {name}")
        else:
            assert not different_bits(ours, before).any(), f"{op.name}: {backend} wrote into its input {name}"


@pytest.mark.parametrize(("op", "backend", "make"), contracts())
def test_backend_equals_reference(op: Op, backend: str, make) -> None:
    check(op, backend, make)


ROWWISE = [param for param in contracts() if param.id.startswith("quantize_both-triton-rowwise")]


@pytest.mark.parametrize(("op", "backend", "make"), ROWWISE)
def test_kernels_for_large_tensors_equal_reference_on_small_ones(
    environment, op: Op, backend: str, make
) -> None:
    kernels = pytest.importorskip("turbo_ops.quantize.backend_triton")
    turbo_ops.reset()
    environment.setattr(kernels, "SMALL", 0)
    check(op, backend, make)


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="emulated FNUZ needs the interpreter: this GPU has OCP types"
)
@pytest.mark.parametrize(
    ("op_name", "backend", "case"),
    [
        pytest.param(param.values[0].name, param.values[1], param.id.split("-", 2)[2], id=param.id)
        for param in contracts()
        if param.values[0].family in ("quantize", "gemm") and FNUZ_CASES.search(param.id)
    ],
)
def test_gfx942_types_equal_reference(environment, op_name: str, backend: str, case: str) -> None:
    environment.setenv("TURBO_ARCH", "gfx942")
    turbo_ops.reset()
    make = cases(REGISTRY[op_name], "test", DEVICE)[case]
    fp8 = {arg.dtype if isinstance(arg, Tensor) else arg for arg in make()} & turbo_ops.arch.FP8_DTYPES
    assert fp8 <= set(turbo_ops.arch.FP8_FNUZ.values())
    check(REGISTRY[op_name], backend, make)


@pytest.mark.parametrize(
    ("op", "backend"),
    [pytest.param(op, name, id=f"{op.name}-{name}") for op in REGISTRY.values() for name in op.order],
)
def test_listed_backend_accepts_a_case(op: Op, backend: str) -> None:
    """Without this a backend that refuses everything would hide behind skips."""
    missing = absent(backend)
    if missing:
        pytest.skip(missing)
    reasons = {case: op.refusal(backend, make()) for case, make in cases(op, "test", DEVICE).items()}
    assert None in reasons.values(), (
        f"{op.name}/{backend} refuses every case: {sorted(set(reasons.values()))}"
    )


@pytest.mark.parametrize("path", BACKEND_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_backend_file_imports(path: Path) -> None:
    missing = absent(path.stem.removeprefix("backend_"))
    if missing:
        pytest.skip(missing)
    importlib.import_module(f"turbo_ops.{path.parent.name}.{path.stem}")


def sampled() -> list:
    """Of each op: the cases with an empty axis, and every ninth other one."""
    found = []
    for op in REGISTRY.values():
        makes = cases(op, "test", DEVICE)
        empty = [case for case in makes if re.search(r"(?<!\d)0x\d|x0(?!\d)", case)]
        for case in dict.fromkeys((*empty[:4], *list(makes)[::9])):
            found.append(pytest.param(op, makes[case], id=f"{op.name}-{case}"))
    return found


@pytest.mark.parametrize(("op", "make"), sampled())
def test_fake_has_the_layout_of_the_real_one(op: Op, make) -> None:
    """inductor allocates and asserts by the fake's strides."""
    args = make()
    with FakeTensorMode() as mode:
        fake = as_tuple(op.torch_op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)))
    real = as_tuple(op.torch_op(*args))
    layouts = [[(t.dtype, t.shape, strides(t)) for t in outputs] for outputs in (fake, real)]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize(("op", "make"), sampled()[::3])
def test_custom_op_is_registered_right(op: Op, make) -> None:
    torch.library.opcheck(op.torch_op, make(), test_utils=("test_faketensor", "test_autograd_registration"))


def test_quantize_by_hand() -> None:
    """The reference itself: what the other tests compare with."""
    quantize, dtype, fp32 = REGISTRY["quantize"].reference, torch.float8_e4m3fn, torch.float32
    data, scale = quantize(torch.tensor([[896.0, -2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]), dtype, 1, 0, fp32)
    assert data.float().tolist() == [[448.0, -1.0, 0.0, 0.5], [0.0] * 4]
    assert scale.tolist() == [[2.0], [1.0]]
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 40] = 1280.0, 1.0
    data, scale = quantize(x, dtype, 1, 32, torch.float8_e8m0fnu)
    assert scale.float().tolist() == [[4.0, 2.0**-8]], "powers of two at or above amax / 448"
    assert (data[0, 0].item(), data[0, 40].item()) == (320.0, 256.0)
    assert REGISTRY["dequantize"].reference(data, scale, fp32).equal(x)


@pytest.mark.parametrize(
    ("x", "dtype", "message"),
    [
        (torch.ones(5), torch.float8_e4m3fn, r"x must be \[R, C\] of fp32, bf16 or fp16, is \(5,\)"),
        (torch.ones(5, 5, dtype=torch.int32), torch.float8_e4m3fn, r"is \(5, 5\) of torch.int32"),
        (torch.ones(5, 5).double(), torch.float8_e4m3fn, r"is \(5, 5\) of torch.float64"),
        (torch.ones(5, 5), torch.float32, r"dtype=torch.float32: use an FP8 type"),
    ],
    ids=["vector", "integers", "doubles", "no FP8 type"],
)
def test_quantize_refuses_what_has_no_cast(x: torch.Tensor, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REGISTRY["quantize"](x, dtype, 0, 0, torch.float32)
    with pytest.raises(ValueError, match=message):
        REGISTRY["quantize_delayed"](x, torch.zeros(3, 5), 0, dtype)


@pytest.mark.parametrize(
    ("block", "scale_dtype"),
    [
        ((1, 40), torch.float32),
        ((1, 0), torch.float8_e8m0fnu),
        ((0, 0), torch.float16),
        ((1, 32), torch.float32),
    ],
)
def test_quantize_refuses_scales_that_dequantize_would_misread(block, scale_dtype: torch.dtype) -> None:
    for name in ("quantize", "quantize_both"):
        with pytest.raises(ValueError, match=rf"blocks of \({block[0]}, {block[1]}\).*use one of"):
            REGISTRY[name](torch.ones(64, 80), torch.float8_e4m3fn, *block, scale_dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_what_would_be_rounded_to_fp32_is_refused(dtype: torch.dtype) -> None:
    x = torch.ones(4, 8, dtype=dtype)
    calls = {
        "rms_norm": lambda: turbo_ops.rms_norm(x, x[0]),
        "swiglu": lambda: turbo_ops.swiglu(x, x),
        "gemm": lambda: turbo_ops.gemm(x, x),
        "linear": lambda: turbo_ops.linear(x, x),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name}: .* is {dtype}"):
            call()


def test_scales_lie_as_hopper_reads_them() -> None:
    quantize, x = REGISTRY["quantize"].reference, torch.randn(300, 700)
    scale = quantize(x, torch.float8_e4m3fn, 1, 128, torch.float32)[1]
    assert (scale.shape, scale.stride()) == ((300, 6), (1, 300))
    scale = quantize(x, torch.float8_e4m3fn, 128, 128, torch.float32)[1]
    assert (scale.shape, scale.stride()) == ((3, 6), (8, 1))


def test_gemm_by_hand() -> None:
    gemm, dtype = REGISTRY["gemm"].reference, torch.float8_e4m3fn
    a, b = torch.randn(5, 200).to(dtype), torch.randn(3, 200).to(dtype)
    a_scale, b_scale = torch.rand(5, 2), torch.rand(1, 2)
    bias = torch.randn(3)
    real = [
        t.double() * s.double().repeat_interleave(128, 1)[:, :200] for t, s in ((a, a_scale), (b, b_scale))
    ]
    expected = real[0] @ real[1].t() + bias
    actual = gemm(a, b, a_scale, b_scale, bias, torch.float32, True)
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-4)
