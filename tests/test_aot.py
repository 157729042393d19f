"""Every Triton kernel, as its backend launches it, compiles for gfx942, gfx950 and sm90 within its gate."""

import ast
import functools
import importlib
import itertools
import re
from pathlib import Path

import pytest
import torch
from gates import GATES, SPILLED_BYTES, TRITON, matrix_pattern

import turbo_ops
from turbo_ops.cases import cases
from turbo_ops.dispatch import REGISTRY

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.aot

INTERPRETED = triton.knobs.runtime.interpret
META = torch.device("meta")


def entry_kernels() -> set[str]:
    """@triton.jit functions of the Triton backends that no other kernel calls."""
    kernels, called = set(), set()
    for path in Path(turbo_ops.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in map(
                ast.unparse, function.decorator_list
            ):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                called |= {call.id for call in calls if isinstance(call, ast.Name)}
                if path.stem == "backend_triton" or path.parent.stem == "backend_triton":
                    kernels.add(function.name)
    return kernels - called


def is_fp16_twin(source) -> bool:
    """Without products, fp16 is bf16 with other conversions: a tenth of the time for nothing."""
    return GATES[source.name].operand is None and any(kind == "*fp16" for _, kind, _ in source.types)


def kind_of(source) -> tuple:
    """Sources that differ in what is a multiple of 16 alone: gfx942 compiles all, the others one."""
    pointers = tuple((name, kind) for name, kind, _ in source.types if kind.startswith("*"))
    constants = tuple((name, value) for name, value in source.constants if name.isupper())
    return source.target, source.name, pointers, constants, source.options


@functools.cache
def launched() -> dict:
    """{source: the first case that launches it}, over every case of every op and both targets."""
    import aot

    found, kinds, backends = {}, set(), [(op, op.load("triton")) for op in REGISTRY.values()]
    for target in aot.TARGETS:
        with aot.pretending(target):
            sizes = ("bench",) if target == "sm90" else ("bench", "test")  # tests run on that one itself
            for (op, backend), size in itertools.product(backends, sizes):
                for case, make in cases(op, size, META).items() if backend else ():
                    for source in aot.sources(backend, make(), target):
                        kind = kind_of(source)
                        if is_fp16_twin(source) or (target != "gfx942" and kind in kinds):
                            continue
                        kinds.add(kind)
                        found.setdefault(source, f"{target}-{source.name}-{op.name}-{case}")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Sources are drawn in an aot run only: drawing them takes seconds."""
    if "source" not in metafunc.fixturenames:
        return
    if INTERPRETED or "not aot" in metafunc.config.option.markexpr:
        metafunc.parametrize("source", [pytest.param(None, id="any")])
    else:
        metafunc.parametrize("source", [pytest.param(source, id=case) for source, case in launched().items()])


@pytest.fixture
def aot():
    """The compiler, where this process has one."""
    if INTERPRETED:
        pytest.skip("needs a process of its own: TRITON_INTERPRET=0 pytest -m aot")
    return importlib.import_module("aot")


def test_kernel_passes_its_gate(source, aot) -> None:
    report, lds = aot.report(source), aot.LDS_BYTES[source.target]
    print(source, report)
    types = {name: kind for name, kind, _ in source.types}
    pattern = matrix_pattern(GATES[source.name], types, dict(source.constants), source.target)
    spilled = SPILLED_BYTES.get(source.target, 0)
    problems = {
        "vgpr spills": report.vgpr_spills > spilled,
        "bytes of scratch": report.scratch_bytes > spilled,
        f"more than {lds} bytes of LDS": report.lds_bytes > lds,
        f"no matrix instruction like {pattern}": pattern and not re.search(pattern, " ".join(report.matrix)),
    }
    found = [problem for problem, is_there in problems.items() if is_there]
    if found and triton.__version__ != TRITON:
        pytest.xfail(f"gates are for Triton {TRITON}, this is {triton.__version__}: {', '.join(found)}")
    assert not found, f"{', '.join(found)}: {report}"


def test_every_kernel_has_a_gate() -> None:
    assert entry_kernels() == GATES.keys()


def test_every_kernel_is_launched_by_a_case(aot) -> None:
    for target in ("gfx942", "gfx950"):
        missing = entry_kernels() - {source.name for source in launched() if source.target == target}
        assert not missing, f"no case launches {sorted(missing)} on {target}"
