"""Imports point downwards, files and functions stay short, one word names folder, op and backends."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from turbo_ops.dispatch import REGISTRY
from turbo_ops.policy import BACKENDS

ROOT = Path(__file__).parents[1]
PACKAGES = ("turbo_ops", "turbo_nn")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NO_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "manager", "misc", "triton"}
MAX_LINES, MAX_KERNEL_LINES = 400, 600
MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_CONTRACT_PARAMETERS = 60, 6, 20

by_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


def is_triton_backend(path: Path) -> bool:
    return "backend_triton" in parts(path)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it; those for the type checker too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import of {node.module}"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def decorators(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in function.decorator_list]


def is_kernel(function: ast.FunctionDef) -> bool:
    return any(under(name.partition("(")[0], "triton") for name in decorators(function))


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 15
    assert any(map(is_triton_backend, FILES))


@by_file
def test_imports_point_downwards(path: Path) -> None:
    package = parts(path)[0]
    allowed_triton = is_triton_backend(path) or parts(path)[:2] == ("turbo_ops", "device")
    for module in imports(path):
        assert not under(module, "tests")
        assert not under(module, "recipes")
        assert not under(module, "benchmarks")
        if under(module, "triton"):
            assert allowed_triton, f"imports {module}: only backend_triton.py and device/ do"
        if package == "turbo_ops":
            assert not under(module, "turbo_nn")
        else:
            assert not under(module, "turbo_ops.dispatch"), "turbo_nn uses turbo_ops' public names"
            assert ".backend_" not in module
        if under(module, "turbo_ops.device"):
            assert allowed_triton, f"imports {module}: kernels do, others do not"


@by_file
def test_backends_stand_alone(path: Path) -> None:
    """backend -> op -> dispatch: nobody imports a backend, but for the parts of one that is a folder."""
    own_folder = ".".join(parts(path)[:-1])
    for module in imports(path):
        if ".backend_" in module:
            assert under(module, own_folder), f"imports {module}"
            assert is_triton_backend(path), f"imports {module}"
    if path.stem == "op":
        wanted = {".".join(m.split(".")[:2]) for m in imports(path) if under(m, "turbo_ops")} - {"turbo_ops"}
        families = {f"turbo_ops.{op.family}" for op in REGISTRY.values()}
        assert wanted <= {f"turbo_ops.{name}" for name in ("arch", "casting", "dispatch")} | families


@pytest.mark.parametrize("path", FILES + TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    assert not NO_NAMES & set(parts(path))
    lines = len(path.read_text().splitlines())
    assert lines <= (MAX_KERNEL_LINES if is_triton_backend(path) else MAX_LINES), f"{lines} lines"
    for function in functions(path):
        length = function.end_lineno - function.lineno + 1
        assert is_kernel(function) or length <= MAX_FUNCTION_LINES, f"{function.name} has {length} lines"


@by_file
def test_functions_take_few_parameters(path: Path) -> None:
    contracts = {name for op in REGISTRY.values() for name in (op.name, f"{op.name}_kernel")}
    for function in functions(path):
        taken = [
            arg.arg
            for arg in (*function.args.posonlyargs, *function.args.args)
            if arg.arg not in ("self", "cls", "ctx")
        ]
        answers_a_contract = (
            function.name in contracts
            or function.name.startswith("refuses")
            or any(".backend(" in name for name in decorators(function))
        )
        if is_kernel(function) or (function.name.startswith("_") and not answers_a_contract):
            continue
        limit = MAX_CONTRACT_PARAMETERS if answers_a_contract else MAX_PARAMETERS
        assert len(taken) <= limit, (
            f"{function.name} takes {len(taken)} positional parameters, at most {limit}"
        )


def test_one_word_names_folder_and_op() -> None:
    folders = {path.parent.name for path in (ROOT / "turbo_ops").glob("*/op.py")}
    assert folders == {op.family for op in REGISTRY.values()}
    for op in REGISTRY.values():
        assert op.name.startswith(op.family) or op.family == "quantize", f"{op.name} lives in {op.family}/"
    for folder in folders:
        assert (ROOT / "turbo_ops" / folder / "cases.py").exists()


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "turbo_ops").glob("*/backend_*")),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_backend_files_attach_to_ops_of_their_folder(path: Path) -> None:
    name = path.stem.removeprefix("backend_")
    assert name in BACKENDS
    sources = [path] if path.is_file() else sorted(path.glob("*.py"))
    attached = {
        decorator.partition(".backend(")[0]
        for source in sources
        for function in functions(source)
        for decorator in decorators(function)
        if f".backend({name!r}" in decorator
    }
    assert attached, f"{path.name} attaches nothing as {name!r}"
    for op_name in attached:
        assert REGISTRY[op_name].family == path.parent.name
        assert name in REGISTRY[op_name].order, f"{op_name} does not list {name}"


def test_contracts_say_their_shapes() -> None:
    for op in REGISTRY.values():
        assert op.__doc__, f"{op.name} has no docstring"
        assert "[" in op.__doc__, f"{op.name} does not say its shapes"
