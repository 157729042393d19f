"""csrc: the CPU library, its GPU bodies as wave64 on the CPU, and what clang makes of them for CDNA."""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numerics import assert_close

from turbo_ops import native
from turbo_ops.cases import cases
from turbo_ops.dispatch import REGISTRY

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent / "native"
OPS = ("rms_norm_fwd", "rms_norm_bwd")
LLVM = Path("/usr/lib/llvm-22/bin")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in turbo_kernels.h

needs_library = pytest.mark.skipif(native.reason() is not None, reason=str(native.reason()))


class Forward(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y", "rstd")),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
        *((name, ctypes.c_int) for name in ("round_first", "dtype", "weight_dtype")),
    )


class Backward(ctypes.Structure):
    _fields_ = (
        *(
            (n, ctypes.c_void_p)
            for n in ("grad_y", "x", "weight", "rstd", "grad_x", "grad_weight", "partial")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        ("offset", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("round_first", "dtype", "weight_dtype")),
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> ctypes.CDLL:
    """The HIP bodies, compiled by g++ against fibers: a wave is 64 threads."""
    library = tmp_path_factory.mktemp("emulated") / "libemulated.so"
    sources = sorted((ROOT / "csrc/rms_norm").glob("*.cu"))
    flags = ["-DTURBO_EMULATE", f"-I{HERE}", "-O1", "-std=c++17", "-shared", "-fPIC", "-x", "c++"]
    done = subprocess.run(["g++", *flags, *sources, "-o", library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def run_emulated(library: ctypes.CDLL, name: str, args: tuple) -> tuple:
    """What the contract returns, computed by the emulated kernels."""
    pointer = lambda t: t.data_ptr()  # noqa: E731
    if name == "rms_norm_fwd":
        x, weight, eps, offset, round_first = args
        dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
        y, rstd = torch.full_like(x, torch.nan, dtype=dtype), torch.full((len(x),), torch.nan)
        fields = *map(pointer, (x, weight, y, rstd)), *x.shape, eps, offset
        code = library.turbo_rms_norm_fwd(
            ctypes.byref(Forward(*fields, round_first, DTYPES[x.dtype], DTYPES[weight.dtype])), 0, None
        )
        outputs = y, rstd
    else:
        grad_y, x, weight, rstd, offset, round_first = args
        grad_x, grad_weight = torch.full_like(x, torch.nan), torch.full_like(weight, torch.nan)
        library.turbo_rms_norm_bwd_partials.restype = ctypes.c_int64
        partials = library.turbo_rms_norm_bwd_partials(ctypes.c_int64(len(x)), 0)
        partial = torch.full((partials, x.shape[1]), torch.nan)
        tensors = grad_y, x, weight, rstd, grad_x, grad_weight, partial
        fields = *map(pointer, tensors), *x.shape, offset
        code = library.turbo_rms_norm_bwd(
            ctypes.byref(Backward(*fields, round_first, DTYPES[x.dtype], DTYPES[weight.dtype])), 0, None
        )
        outputs = grad_x, grad_weight
    assert code == 0
    return outputs


@pytest.mark.parametrize("name", OPS)
def test_bodies_as_wave64(name: str, emulated) -> None:
    op, ran = REGISTRY[name], 0
    for case, make in cases(op, "test", torch.device("cpu")).items():
        args = make()
        x = args[0] if name == "rms_norm_fwd" else args[1]
        odd = x.shape[1] * x.element_size() % 16 != 0
        if len(x) == 0 or x.shape[1] > (8192 if odd else 16384):  # what backend_native refuses on a GPU
            continue
        ran += 1
        for actual, expected in zip(run_emulated(emulated, name, args), op.reference(*args), strict=True):
            assert_close(actual, expected, 1e-4 if actual.dtype == torch.float32 else 1e-2, f"{name} {case}")
    assert ran > 15


def test_bodies_refuse_what_does_not_fit(emulated) -> None:
    x, weight = torch.randn(1, 20000), torch.randn(20000)
    y, rstd = torch.empty_like(x), torch.empty(1)
    fields = (*(t.data_ptr() for t in (x, weight, y, rstd)), *x.shape, 1e-6, 0.0, 0, 0, 0)
    assert emulated.turbo_rms_norm_fwd(ctypes.byref(Forward(*fields)), 0, None) == -1


@needs_library
@pytest.mark.parametrize("name", OPS)
def test_operators_are_registered_right(name: str) -> None:
    REGISTRY[name].load("native")
    op = REGISTRY[name]
    for case in ("llama-bf16-5x576", "gemma-fp32-5x576"):
        args = cases(op, "test", torch.device("cpu"))[case]()
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(getattr(torch.ops.turbo, name).default, args, test_utils=utils)


@needs_library
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="torch 2.11 died of a segmentation fault where an operator of the stable ABI throws",
)
def test_operators_check_their_arguments() -> None:
    REGISTRY["rms_norm_fwd"].load("native")
    with pytest.raises(RuntimeError, match=r"weight \[D\]"):
        torch.ops.turbo.rms_norm_fwd(torch.randn(2, 8), torch.randn(7), 1e-6, 0.0, False)
    with pytest.raises(RuntimeError, match="contiguous"):
        torch.ops.turbo.rms_norm_fwd(torch.randn(8, 2).t(), torch.randn(8), 1e-6, 0.0, False)
    with pytest.raises(RuntimeError, match="no kernel for these dtypes"):
        torch.ops.turbo.rms_norm_fwd(torch.randn(2, 8), torch.randn(8).half(), 1e-6, 0.0, False)


@needs_library
def test_build_info() -> None:
    info = native.build_info()
    assert info["backend"] in ("hip", "cuda", "cpu")
    assert info["compiler"]
    assert bool(info["kernels"]) == (info["backend"] != "cpu")
    assert all(kernel["spills"] == 0 and 0 < kernel["registers"] <= 512 for kernel in info["kernels"])


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    """setup.py on a copy of the sources, so that the checkout's own libraries stay."""
    copy = tmp_path / "copy"
    if not copy.exists():
        for folder in ("csrc", "turbo_ops"):
            shutil.copytree(
                ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__")
            )
        for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, copy)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=copy, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TURBO_BUILD": "metal"}, "TURBO_BUILD='metal' is unknown: use auto, hip, cuda, cpu"),
        ({"TURBO_BUILD": "hip", "ROCM_HOME": "/nowhere"}, "set ROCM_HOME"),
        ({"TURBO_BUILD": "cpu", "CXX": "no-such-compiler"}, "cpu build failed"),
    ],
    ids=["unknown", "no-rocm", "no-compiler"],
)
def test_a_build_that_was_asked_for_fails_loudly(environment: dict, message: str, tmp_path) -> None:
    before = tmp_path / "copy/turbo_ops/libturbo_kernels.so"
    build(tmp_path, TURBO_BUILD="metal")  # makes the copy
    before.write_text("an earlier library")
    done = build(tmp_path, **environment)
    assert done.returncode != 0
    assert before.read_text() == "an earlier library"
    assert message in done.stderr


def test_an_automatic_build_that_fails_leaves_pure_python(tmp_path) -> None:
    done = build(
        tmp_path, TURBO_BUILD="auto", CXX="no-such-compiler", ROCM_HOME="/nowhere", CUDA_HOME="/nowhere"
    )
    assert done.returncode == 0
    assert "NO NATIVE KERNELS" in done.stderr
    script = (
        "import torch, turbo_ops; from turbo_ops import native; print(native.reason()); "
        "print(turbo_ops.rms_norm(torch.ones(2, 8)).sum().item())"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path / "copy")}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert "not built: cpu build failed" in ran.stdout, ran.stderr
    assert float(ran.stdout.split()[-1]) == pytest.approx(16, rel=1e-5)


@pytest.fixture(scope="module")
def setup_module_():
    spec = importlib.util.spec_from_file_location("turbo_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_archs(setup_module_, monkeypatch) -> None:
    for value, expected in (
        ("", ("gfx942", "gfx950")),
        ("gfx950", ("gfx950",)),
        ("gfx942;gfx950", ("gfx942", "gfx950")),
    ):
        monkeypatch.setenv("GPU_ARCHS", value)
        assert setup_module_.hip_archs(Path("/nowhere")) == expected
    monkeypatch.setenv("GPU_ARCHS", "gfx942,gfx90a")
    with pytest.raises(setup_module_.BuildError, match=r"GPU_ARCHS.*gfx90a.*use gfx942 or gfx950"):
        setup_module_.hip_archs(Path("/nowhere"))
    for build in ("cpu", "auto"):  # on a machine without ROCm, too
        monkeypatch.setenv("TURBO_BUILD", build)
        with pytest.raises(setup_module_.BuildError, match="gfx90a"):
            setup_module_.toolchain()
    both = ("gfx942", "gfx950")
    assert setup_module_.archs_of(Path("gemm_gfx950.cu"), both) == ("gfx950",)
    assert setup_module_.archs_of(Path("gemm_gfx950.cu"), ("gfx942",)) == ()
    assert setup_module_.archs_of(Path("rms_norm_fwd.cu"), both) == both


@pytest.fixture(scope="module")
def rocm(tmp_path_factory) -> Path:
    """Headers and bitcode of the triton wheel, Debian's clang-22 and a libamdhip64 that has no device."""
    if not (LLVM / "clang++").exists():
        if os.environ.get("TURBO_REQUIRE_GATES") == "1":
            pytest.fail("clang-22 is missing: apt-get install clang-22 lld-22 llvm-22 clang-tools-22")
        pytest.skip("HIP gates need clang-22: apt-get install clang-22 lld-22 llvm-22 clang-tools-22")
    triton = Path(importlib.util.find_spec("triton").origin).parent
    root = tmp_path_factory.mktemp("rocm") / "rocm"
    subprocess.run(["bash", HERE / "mk_rocm.sh", root, triton], check=True)
    stub = [HERE / "hip_stub.c", "-o", root / "lib/libamdhip64.so.7"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libamdhip64.so.7", *stub], check=True)
    (root / "lib/libamdhip64.so").symlink_to("libamdhip64.so.7")
    return root


@pytest.mark.aot
def test_fat_library_for_both_archs(rocm: Path, tmp_path) -> None:
    """No spills, registers that leave two waves a SIMD, and it loads where there is no GPU."""
    done = build(tmp_path, TURBO_BUILD="hip", ROCM_HOME=str(rocm), GPU_ARCHS="gfx942;gfx950")
    assert done.returncode == 0, done.stderr
    script = (
        "import json, torch, turbo_ops; from turbo_ops import native\n"
        "print(json.dumps(native.build_info()))\n"
        "x = torch.ones(2, 8); turbo_ops.explain('rms_norm_fwd', x, x[0].contiguous(), 1e-6)"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path / "copy"), "LD_LIBRARY_PATH": str(rocm / "lib")}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    info = json.loads(ran.stdout.splitlines()[0])
    assert info["backend"] == "hip"
    assert info["archs"] == ["gfx942", "gfx950"]
    for arch in info["archs"]:
        kernels = [kernel for kernel in info["kernels"] if kernel["arch"] == arch]
        assert {re.match(r"\w+", kernel["name"])[0] for kernel in kernels} == {
            "rms_norm_fwd_kernel",
            "rms_norm_bwd_kernel",
            "add_partials_kernel",
        }
        assert max(kernel["registers"] for kernel in kernels) <= 256
        assert sum(kernel["spills"] for kernel in kernels) == 0
    assert "native: accepts" in ran.stdout


@pytest.mark.aot
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("source", ["rms_norm_fwd", "rms_norm_bwd"])
def test_isa(source: str, arch: str, rocm: Path, tmp_path) -> None:
    """16-byte loads and stores, wave64, no scratch, LDS of a few sums."""
    code = tmp_path / "kernel.hsaco"
    flags = [
        "-O3",
        "-std=c++17",
        f"--rocm-path={rocm}",
        "-isystem",
        f"{rocm}/include",
        "-D__HIP_PLATFORM_AMD__=1",
    ]
    only = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", f"--offload-arch={arch}"]
    subprocess.run(
        [LLVM / "clang++", *only, *flags, ROOT / f"csrc/rms_norm/{source}.cu", "-o", code], check=True
    )
    listing = subprocess.run(
        [LLVM / "llvm-objdump", "-d", code], capture_output=True, text=True, check=True
    ).stdout
    notes = subprocess.run(
        [LLVM / "llvm-readelf", "--notes", code], capture_output=True, text=True, check=True
    ).stdout
    assert "global_load_dwordx4" in listing
    assert "global_store_dwordx4" in listing
    assert set(re.findall(r"\.wavefront_size: *(\d+)", notes)) == {"64"}
    assert set(re.findall(r"\.private_segment_fixed_size: *(\d+)", notes)) == {"0"}
    assert max(map(int, re.findall(r"\.group_segment_fixed_size: *(\d+)", notes))) <= 2048
