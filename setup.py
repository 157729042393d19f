"""Builds csrc with ninja: libturbo_kernels.so, libturbo_torch.so (torch's stable ABI) and _build_info.

TURBO_BUILD=auto|hip|cuda|cpu  auto takes the first of ROCm, CUDA, neither; a failure then leaves pure Python
GPU_ARCHS="gfx942;gfx950"      HIP targets, or `native`; TURBO_CUDA_ARCHS="90a" for CUDA
ROCM_HOME, CUDA_HOME, CXX      where the compilers are; MAX_JOBS, how many run at once
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
HIP_ARCHS = ("gfx942", "gfx950")
FAILED = "native_build_failed.txt"  # turbo_ops.native.reason() reads it
SONAME = "-Wl,-soname,libturbo_kernels.so"
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11


class BuildError(Exception):
    """A build that cannot go on, in words for the person who started it."""


HEADER = """// Written by setup.py.
#include <vector>
struct Kernel {{
  const char *arch, *name;
  int registers, spills;
}};
static const char *kBackend = "{backend}", *kArchs = "{archs}", *kCompiler = "{compiler}";
static const std::vector<Kernel> kKernels = {{
{rows}
}};
"""


@dataclass(frozen=True)
class Toolchain:
    backend: str
    compiler: str
    archs: tuple[str, ...]  # what kernels are compiled for; () on a CPU
    compile: str  # ninja command for one kernel file, with $flags
    link: str  # ninja command for libturbo_kernels.so


def toolchain() -> Toolchain:
    """The backend that TURBO_BUILD names, or the first that is there."""
    wanted = os.environ.get("TURBO_BUILD", "auto").strip().lower() or "auto"
    asked_archs()  # a name that nobody knows is an error on any machine
    finders = {"hip": _hip, "cuda": _cuda, "cpu": _cpu}
    if wanted != "auto":
        if wanted not in finders:
            raise BuildError(f"TURBO_BUILD={wanted!r} is unknown: use auto, {', '.join(finders)}")
        found = finders[wanted]()
        if isinstance(found, str):
            raise BuildError(f"TURBO_BUILD={wanted}: {found}")
        return found
    return next(found for find in finders.values() if not isinstance(found := find(), str))


def _hip() -> Toolchain | str:
    hipcc = shutil.which("hipcc")
    places = [os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm"]
    places.insert(2, hipcc and str(Path(hipcc).resolve().parents[1]))
    for root in map(Path, filter(None, places)):
        clang = next(
            (c for c in (root / "lib/llvm/bin/clang++", root / "llvm/bin/clang++") if c.exists()), None
        )
        if clang and (root / "include/hip/hip_runtime.h").exists():
            archs = hip_archs(root)
            command = (
                f"{clang} -x hip --rocm-path={root} -isystem {root}/include -D__HIP_PLATFORM_AMD__=1 "
                "-O3 -std=c++17 -fPIC -fvisibility=hidden --offload-compress "
                "-Rpass-analysis=kernel-resource-usage $flags -c $in -o $out"
            )
            link = f"{_cxx()} -shared -o $out $in {SONAME} -L{root}/lib -lamdhip64 -Wl,-rpath,{root}/lib"
            return Toolchain("hip", str(clang), archs, command, link)
    return "no ROCm: set ROCM_HOME to a folder with include/hip and lib/llvm/bin/clang++"


def asked_archs() -> tuple[str, ...] | None:
    """GPU_ARCHS, all that are known where it is not set; None for `native`."""
    asked = os.environ.get("GPU_ARCHS", "").strip().lower()
    return None if asked == "native" else known_archs(asked) if asked else HIP_ARCHS


def hip_archs(root: Path) -> tuple[str, ...]:
    """GPU_ARCHS; `native` asks rocm_agent_enumerator."""
    asked = asked_archs()
    if asked is not None:
        return asked
    try:
        found = subprocess.check_output([root / "bin/rocm_agent_enumerator"], text=True).split()
    except OSError as error:
        raise BuildError(f"GPU_ARCHS=native: {error}; name the archs instead") from error
    return known_archs(";".join(arch for arch in found if arch != "gfx000"))


def known_archs(asked: str) -> tuple[str, ...]:
    archs = tuple(dict.fromkeys(filter(None, re.split(r"[;,\s]+", asked))))
    unknown = [arch for arch in archs if arch not in HIP_ARCHS]
    if unknown or not archs:
        raise BuildError(
            f"GPU_ARCHS={asked!r}: {unknown or 'nothing'} is not supported, use {' or '.join(HIP_ARCHS)}"
        )
    return archs


def _cuda() -> Toolchain | str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home, "bin/nvcc")) if home else shutil.which("nvcc")
    if not nvcc or not Path(nvcc).exists():
        return f"no nvcc{f' in {home}' if home else ''}: set CUDA_HOME"
    if os.environ.get("TURBO_BUILD", "auto").lower() in ("", "auto") and not _torch_has_gpu():
        return "this torch is a CPU build"
    sms = [
        arch.removeprefix("sm") for arch in re.split(r"[;,\s]+", os.environ.get("TURBO_CUDA_ARCHS", "90a"))
    ]
    if bad := [sm for sm in sms if not re.fullmatch(r"\d+[af]?", sm)]:
        raise BuildError(f"TURBO_CUDA_ARCHS: {bad} is no compute capability, use for example 90a")
    command = (
        f"{nvcc} -x cu -O3 -std=c++17 --expt-relaxed-constexpr -Xptxas -v "
        "-Xcompiler -fPIC,-fvisibility=hidden $flags -c $in -o $out"
    )
    # the CUDA runtime is linked in: no version of it to match at run time
    link = f"{nvcc} -shared -o $out $in -Xlinker=-soname=libturbo_kernels.so"
    return Toolchain("cuda", nvcc, tuple(f"sm{sm}" for sm in sms), command, link)


def _torch_has_gpu() -> bool:
    import torch

    return bool(torch.version.cuda)


def _cpu() -> Toolchain:
    command = f"{_cxx()} -x c++ -O3 -std=c++17 -fPIC -fvisibility=hidden $flags -c $in -o $out"
    return Toolchain("cpu", _cxx(), (), command, f"{_cxx()} -shared -o $out $in {SONAME}")


def _cxx() -> str:
    return os.environ.get("CXX", "g++")


def archs_of(path: Path, archs: tuple[str, ...]) -> tuple[str, ...]:
    """What a kernel file is compiled for: `*_gfx942.cu` for gfx942 alone, any other for all."""
    own = re.search(r"_(gfx\w+|sm\d+[af]?)$", path.stem)
    return tuple(arch for arch in archs if arch == own[1]) if own else archs


def flags_of(backend: str, archs: tuple[str, ...], all_archs: tuple[str, ...]) -> str:
    names = ";".join(arch.rstrip("af") if backend == "cuda" else arch for arch in all_archs)
    define = f"-DTURBO_ARCHS='\"{names}\"'"
    if backend == "hip":
        return " ".join([define, *(f"--offload-arch={arch}" for arch in archs)])
    sms = [arch.removeprefix("sm") for arch in archs]
    return " ".join([define, *(f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in sms)])


def resources(log: str) -> list[tuple[str, str, int, int]]:
    """(arch, kernel, registers, spills) by clang's remarks (registers) or ptxas (bytes spilled)."""
    found, arch, name, spills = [], "", "", 0
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            name, arch = m.groups()
        elif m := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(m[1]) + int(m[2])
        elif m := re.search(r"Used (\d+) registers", line):
            found.append((arch, name, int(m[1]), spills))
        elif m := re.search(r"remark: .*Function Name: (\w+)", line):
            name = m[1]
        elif m := re.search(r"remark: .* VGPRs: (\d+)", line):
            registers = int(m[1])
        elif m := re.search(r"remark: .*VGPRs Spill: (\d+)", line):
            found.append(("", name, registers, int(m[1])))
    return found


class Build:
    """One build: build.ninja, objects and libraries under `work`, and from there into `package`."""

    def __init__(self, package: Path):
        self.tools, self.package = toolchain(), package
        self.work = ROOT / "build" / f"native-{self.tools.backend}"
        self.made = self.work / "made"
        self.made.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        for old in self.made.glob("*.so"):
            old.unlink()
        (self.work / "build.ninja").write_text("\n".join([*self._kernels(), *self._torch(), ""]))
        self._ninja()
        try:
            (self.work / "build_info.h").write_text(self._build_info())
            (self.work / "build.ninja").write_text("\n".join([*self._python(), ""]))
            self._ninja()
        except (BuildError, ImportError) as error:
            print(f"turbo_ops: no build_info(), the libraries work without it: {error}", file=sys.stderr)
        for old in (*self.package.glob("*.so"), self.package / FAILED):  # not before all is built
            old.unlink(missing_ok=True)
        for library in self.made.glob("*.so"):
            shutil.copy2(library, self.package)

    def _kernels(self) -> list[str]:
        tools, objects = self.tools, []
        # the log is kept beside the object: it says what registers each kernel takes
        lines = [f"rule kernel\n  command = {tools.compile} > $out.log 2>&1 || (cat $out.log; false)",
                 "  depfile = $out.d", "  deps = gcc"]  # fmt: skip
        lines[0] = lines[0].replace("$flags", "$flags -MD -MF $out.d")
        for path in sorted(CSRC.glob("*/*.cu")):
            archs = archs_of(path, tools.archs)
            if archs or not tools.archs:
                objects.append(self.work / f"{path.stem}.o")
                lines += [
                    f"build {objects[-1]}: kernel {path}",
                    f"  flags = {flags_of(tools.backend, archs, tools.archs)}",
                ]
        library = self.made / "libturbo_kernels.so"
        built = f"build {library}: link {' '.join(map(str, objects))}"
        return [*lines, f"rule link\n  command = {tools.link}", built]

    def _torch(self) -> list[str]:
        from torch.utils.cpp_extension import include_paths, library_paths

        includes = " ".join(f"-isystem {path}" for path in include_paths())
        compile_ = (
            f"{_cxx()} -O2 -g0 -std=c++17 -fPIC -fvisibility=hidden {STABLE_ABI} {includes} -MD -MF $out.d"
        )
        # torch is needed by name, so that the weak symbol of the current stream is found
        libraries = ["torch", "torch_cpu", *_gpu_library()]
        needs = " ".join([*(f"-L{path}" for path in library_paths()), "-Wl,--no-as-needed"])
        needs += "".join(f" -l{library}" for library in libraries)
        link = f"{_cxx()} -shared -o $out $in -L{self.made} -lturbo_kernels {needs} -Wl,-rpath,'$$ORIGIN'"
        lines = [
            f"rule torch\n  command = {compile_} -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
            f"rule link_torch\n  command = {link}",
        ]
        objects = []
        for path in sorted(CSRC.glob("torch/*.cpp")):
            objects.append(self.work / f"torch_{path.stem}.o")
            lines.append(f"build {objects[-1]}: torch {path}")
        kernels, library = self.made / "libturbo_kernels.so", self.made / "libturbo_torch.so"
        return [*lines, f"build {library}: link_torch {' '.join(map(str, objects))} | {kernels}"]

    def _python(self) -> list[str]:
        import pybind11

        includes = f"-I{self.work} -I{pybind11.get_include()} -I{sysconfig.get_path('include')}"
        module = self.made / f"_build_info{sysconfig.get_config_var('EXT_SUFFIX')}"
        command = f"{_cxx()} -O2 -g0 -std=c++17 -fPIC -fvisibility=hidden -shared {includes} $in -o $out"
        source = CSRC / "python/build_info.cpp"
        return [
            f"rule python\n  command = {command}",
            f"build {module}: python {source} | {self.work}/build_info.h",
        ]

    def _build_info(self) -> str:
        version = subprocess.run(
            [self.tools.compiler, "--version"], capture_output=True, text=True
        ).stdout.strip()
        line = version.splitlines()[-1] if self.tools.backend == "cuda" else version.splitlines()[0]
        rows = []
        for log in sorted(self.work.glob("*.o.log")):
            text = log.read_text()
            names = [row[1] for row in resources(text)]
            plain = (
                subprocess.run(["c++filt", *names], capture_output=True, text=True).stdout.splitlines()
                if names
                else []
            )
            archs = [arch for arch in self.tools.archs for _ in range(len(names) // len(self.tools.archs))]
            for (arch, _, registers, spills), name, order in zip(resources(text), plain, archs, strict=True):
                short = re.sub(r"^void |\(.*$|turbo::", "", name)
                rows.append(f'    {{"{arch.replace("_", "") or order}", "{short}", {registers}, {spills}}},')
        return HEADER.format(
            backend=self.tools.backend, archs=";".join(self.tools.archs), compiler=line, rows="\n".join(rows)
        )

    def _ninja(self) -> None:
        ninja = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
        if ninja is None:
            raise BuildError("ninja is missing: pip install ninja")
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        done = subprocess.run([ninja, "-j", jobs], cwd=self.work, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(
                f"{self.tools.backend} build failed:\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
            )


def _gpu_library() -> list[str]:
    """The part of torch that knows the current stream; none in a CPU build of torch."""
    import torch

    names = ("torch_cuda", "torch_hip")
    return [name for name in names if (Path(torch.__file__).parent / f"lib/lib{name}.so").exists()]


class NativeBuild(build_ext):
    """Everything is in `Build`; an automatic build that fails leaves a package that works, and says why."""

    def run(self) -> None:
        in_source = self.inplace or self.editable_mode
        package = ROOT / "turbo_ops" if in_source else Path(self.build_lib).resolve() / "turbo_ops"
        package.mkdir(parents=True, exist_ok=True)
        self.extensions = []
        try:
            build = Build(package)
            build.run()
            print(f"turbo_ops: {build.tools.backend} kernels in {package}")
        except (BuildError, ImportError, OSError) as error:
            reason = (
                "torch is not installed where this builds" if isinstance(error, ImportError) else str(error)
            )
            if os.environ.get("TURBO_BUILD", "auto").strip().lower() not in ("", "auto"):
                sys.exit(f"error: {reason}")
            for stale in package.glob("*.so"):
                stale.unlink()
            cause = next((line for line in reason.splitlines()[1:] if "error" in line.lower()), "")
            again = "python setup.py build_ext --inplace shows all of it"
            (package / FAILED).write_text(f"{reason.splitlines()[0]} {cause} {again}")
            print(
                f"{'=' * 72}\nturbo_ops: NO NATIVE KERNELS, pure Python only. {reason}\n{'=' * 72}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    # the extension is named so that a wheel counts as one of a platform
    setup(ext_modules=[Extension("turbo_ops._build_info", [])], cmdclass={"build_ext": NativeBuild})
