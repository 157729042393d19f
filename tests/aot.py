"""Compile, for a GPU that this machine need not have, what a backend would launch; report what came out.

A backend runs on meta tensors with the launch replaced by a note of it, so types, alignment, tiles and warps
are those of a real call. No GPU, no driver and no ROCm is needed; the process must not have TRITON_INTERPRET.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

import turbo_ops
from turbo_ops.dispatch import Backend

TARGETS = {name: GPUTarget("hip", name, 64) for name in ("gfx942", "gfx950")}
TARGETS["sm90"] = GPUTarget("cuda", 90, 32)
# Shared memory of a compute unit; compile() does not reject more.
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10, "sm90": 227 << 10}


@dataclass(frozen=True)
class Source:
    """One kernel as the JIT would compile it; equal sources are compiled once."""

    kernel: jit.JITFunction = field(compare=False)
    target: str
    name: str
    types: tuple  # (parameter, type, specialization)
    constants: tuple
    options: tuple

    def __str__(self) -> str:
        dtypes = "-".join(kind for _, kind, _ in self.types if kind.startswith("*"))
        constants = "-".join(f"{name}={value}" for name, value in self.constants if name.isupper())
        return f"{self.target}-{self.name}-{dtypes}-{constants}"


@dataclass(frozen=True)
class Report:
    vgprs: int
    vgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    matrix: Counter  # matrix instructions by name


def sources(backend: Backend, args: tuple, target: str) -> Iterator[Source]:
    """What a backend would launch on `target` for these meta tensors; nothing where it refuses them."""
    compiler = make_backend(TARGETS[target])
    for kernel, inputs, options in _launches(backend, args):
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, compiler)
        values, specialization, rest = bind(*inputs, **options)
        compile_options, signature, constants, _ = kernel._pack_args(
            compiler, options, values, specialization, rest
        )
        yield Source(
            kernel,
            target,
            kernel.__name__,
            tuple(
                (name, str(kind), attrs)
                for name, (kind, attrs) in zip(signature, specialization, strict=True)
            ),
            tuple((kernel.arg_names[path[0]], value) for path, value in constants.items()),
            tuple(sorted((k, v) for k, v in compile_options.__dict__.items() if k in options)),
        )


def _launches(backend: Backend, args: tuple) -> list[tuple]:
    noted = []

    def note(kernel, *args, grid, warmup, **options):
        noted.append((kernel, args, options))

    if backend.refuses(*args) is None:
        with mock.patch.object(jit.JITFunction, "run", note):
            backend.run(*args)
    return noted


@contextmanager
def pretending(target: str) -> Iterator[None]:
    """turbo_ops, its backends loaded before, believes that every device is a `target`."""
    answers = {
        "hardware": lambda device: target,
        "refuses_device": lambda x, *dtypes: None,
        "interpreted": lambda: True,  # so that a launch is made anew, not remembered
    }
    modules = [module for name, module in sys.modules.items() if name.startswith("turbo_ops.")]
    with ExitStack() as stack:
        stack.callback(_forget, modules)  # last of all, when everything is as before
        stack.enter_context(mock.patch.dict(os.environ, TURBO_ARCH=target))
        for module in modules:
            for name, answer in answers.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, answer))
        _forget(modules)
        yield


def _forget(modules: list[ModuleType]) -> None:
    turbo_ops.reset()
    for value in [value for module in modules for value in vars(module).values()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def report(source: Source) -> Report:
    """Compile and read the assembly."""
    backend, parameters = make_backend(TARGETS[source.target]), source.kernel.arg_names
    ast = ASTSource(
        fn=source.kernel,
        signature={name: kind for name, kind, _ in source.types},
        constexprs={(parameters.index(name),): value for name, value in source.constants},
        attrs={
            (index,): backend.parse_attr(attrs)
            for index, (_, _, attrs) in enumerate(source.types)
            if isinstance(attrs, str)
        },
    )
    compiled = triton.compile(ast, target=TARGETS[source.target], options=dict(source.options))
    if source.target == "sm90":
        return _nvidia_report(compiled, dict(source.options).get("maxnreg"))
    assembly = compiled.asm["amdgcn"]
    code = re.sub(r"//.*|;.*", "", assembly)
    return Report(
        vgprs=_metadata(assembly, "vgpr_count"),
        vgpr_spills=_metadata(assembly, "vgpr_spill_count"),
        scratch_bytes=_metadata(assembly, "private_segment_fixed_size"),
        lds_bytes=compiled.metadata.shared,
        matrix=Counter(re.findall(r"v_mfma_\w+", code)),
    )


def _nvidia_report(compiled: object, registers: int | None) -> Report:
    """What the ptxas that comes with Triton says: bytes that it spills stand for both of AMD's numbers."""
    limit = [f"-maxrregcount={registers}"] if registers else []
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", *limit, file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = int(re.search(r"(\d+) bytes spill stores", said)[1])
    return Report(
        vgprs=int(re.search(r"Used (\d+) registers", said)[1]),
        vgpr_spills=spilled,
        scratch_bytes=spilled,
        lds_bytes=compiled.metadata.shared,
        matrix=Counter(re.findall(r"wgmma\.mma_async[\w.]*", compiled.asm["ptx"])),
    )


def _metadata(assembly: str, name: str) -> int:
    found = re.search(rf"\.{name}: *(\d+)", assembly)
    if not found:
        raise ValueError(f"the assembly has no .{name}")
    return int(found[1])
