"""How this process runs Triton, memory poisoned on demand, and one seed for every test."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
import torch.utils._device

import turbo_ops

EMPTY_FUNCTIONS = ("empty", "empty_like", "empty_strided", "empty_permuted")
EMPTY_METHODS = ("new_empty", "new_empty_strided")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deterministic-only",
        action="store_true",
        help="run the tests marked deterministic, under torch.use_deterministic_algorithms",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Numbers come from a GPU or the interpreter, code from another process: Triton cannot do both in one."""
    only_code = config.option.markexpr.strip() == "aot"
    interpret = not (only_code or torch.cuda.is_available())
    if os.environ.setdefault("TRITON_INTERPRET", str(int(interpret))) == "1" and importlib.util.find_spec(
        "triton"
    ):
        import interpreter

        interpreter.install()
    if config.option.deterministic_only:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.deterministic_only:
        rest = [item for item in items if not item.get_closest_marker("deterministic")]
        items[:] = [item for item in items if item.get_closest_marker("deterministic")]
        config.hook.pytest_deselected(items=rest)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch whose changes turbo_ops sees after a `turbo_ops.reset()` and forgets after the test."""
    yield monkeypatch
    monkeypatch.undo()
    turbo_ops.reset()


@pytest.fixture
def poisoned_memory(environment: pytest.MonkeyPatch) -> None:
    """What nobody wrote reads as NaN (bytes of 0xFF): an unwritten row cannot pass as a lucky zero."""
    turbo_ops.reset()  # plans hold on to what allocates for them
    torch.utils._device._device_constructors()  # torch remembers them at first use: not the poisoned ones
    trace_rules = importlib.import_module("torch._dynamo.trace_rules")  # late: it imports triton
    trace_rules.get_torch_obj_rule_map()  # likewise
    for owner, names in ((torch, EMPTY_FUNCTIONS), (torch.Tensor, EMPTY_METHODS)):
        for name in names:
            environment.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(allocate):
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        # A compiler plans its own memory and would see an operation that the program does not have.
        is_real = type(tensor) is torch.Tensor and not tensor.is_meta and not torch.compiler.is_compiling()
        return poison(tensor) if is_real else tensor

    return poisoned


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with bytes of 0xFF: NaN in fp32, bf16, fp16 and every FP8 type but FNUZ, whose NaN is 0x80."""
    fnuz = tensor.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    storage, byte = tensor.untyped_storage(), 0x80 if fnuz else 0xFF
    pattern = torch.full((storage.nbytes(),), byte, dtype=torch.uint8, device=tensor.device)
    storage.copy_(pattern.untyped_storage())
    return tensor
