"""The cases of an op: inputs that tests, benchmarks and tuning share, from each family's `cases.py`."""

import importlib
from collections.abc import Callable

import torch

from turbo_ops.dispatch import REGISTRY, Op

Cases = dict[str, Callable[[], tuple]]


def cases(op: Op, size: str, device: torch.device) -> Cases:
    """{id: make} of `size` "test" (odd, small) or "bench" (models' shapes); make() draws fresh arguments."""
    module = importlib.import_module(f"{op.reference.__module__.rpartition('.')[0]}.cases")
    return getattr(module, op.name)(size, device)


def ops() -> list[Op]:
    """Every contract of the library, by family."""
    ours = (op for op in REGISTRY.values() if op.reference.__module__.startswith("turbo_ops."))
    return sorted(ours, key=lambda op: op.family)
