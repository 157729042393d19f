"""Which backend a person asked for: `force(...)` in code, `TURBO_<OP or FAMILY>_BACKEND` in the environment.

A pin is "triton", or by precision of the operands "fp8:triton,other:blaslt".
Pins are process-wide, not context variables: a GPU backward runs on autograd's own threads.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from turbo_ops.arch import FP8_DTYPES

BACKENDS = ("native", "triton", "blaslt", "torch", "reference")
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PRECISION_NAMES = ("fp8", *PRECISIONS.values(), "other")

FORCED: dict[str, str] = {}  # op or family -> pin, from code
ENVIRONMENT: dict[str, str] = {}  # op or family -> pin, from the environment


def precision(args: Iterable[object]) -> str:
    """ "fp8" if any argument is FP8 data or asks for it, else the name of the first tensor's dtype."""
    dtypes = [arg.dtype if isinstance(arg, Tensor) else arg for arg in args]
    if any(d in FP8_DTYPES for d in dtypes if isinstance(d, torch.dtype)):
        return "fp8"
    return next((PRECISIONS[d] for d in dtypes if isinstance(d, torch.dtype) and d in PRECISIONS), "other")


def parse(name: str, value: str) -> dict[str, str]:
    """ "fp8:triton,other:blaslt" -> {"fp8": "triton", "other": "blaslt"}; a bare name is for all."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r}: give a backend, one of {', '.join(BACKENDS)}")
    pins: dict[str, str] = {}
    for part in value.split(",") if value.strip() else ():
        key, colon, backend = part.rpartition(":")
        key, backend = key.strip() if colon else "other", backend.strip()
        if key not in PRECISION_NAMES:
            raise ValueError(
                f"{name}={value!r}: unknown precision {key!r}, use one of {', '.join(PRECISION_NAMES)}"
            )
        if backend not in BACKENDS:
            raise ValueError(
                f"{name}={value!r}: unknown backend {backend!r}, use one of {', '.join(BACKENDS)}"
            )
        if key in pins:
            raise ValueError(f"{name}={value!r}: {key!r} is pinned twice, drop one")
        pins[key] = backend
    return pins


def pin(pins: Mapping[str, str], names: Iterable[str], args: Iterable[object]) -> tuple[str, str] | None:
    """(op or family, backend) that `pins` name for an op or its family, `names`, on these arguments."""
    for name in names:
        if name in pins:
            by_precision = parse(name, pins[name])
            backend = by_precision.get(precision(args), by_precision.get("other"))
            return (name, backend) if backend else None
    return None


def flag(variable: str, default: bool) -> bool:
    """A switch in the environment; ValueError for anything but 0 and 1."""
    value = os.environ.get(variable, "").strip() or str(int(default))
    if value not in ("0", "1"):
        raise ValueError(f"{variable}={value!r}: use 0 or 1, or unset it")
    return value == "1"


def read_environment(known: Iterable[str]) -> None:
    """Take TURBO_<X>_BACKEND for every known X; raise ValueError for a name or a value that means nothing."""
    known, found = set(known), {}
    for variable, value in os.environ.items():
        if variable.startswith("TURBO_") and variable.endswith("_BACKEND"):
            name = variable.removeprefix("TURBO_").removesuffix("_BACKEND").lower()
            name = name if name in known else f"{name}_"  # gemm_accumulate_ has no trailing underscore there
            if name not in known:
                raise ValueError(
                    f"{variable}={value!r}: no op or family of that name; known: {', '.join(sorted(known))}"
                )
            parse(variable, value)
            found[name] = value
    ENVIRONMENT.clear()
    ENVIRONMENT.update(found)


@contextlib.contextmanager
def force(known: Iterable[str], pins: Mapping[str, str]) -> Iterator[None]:
    """Pin backends for a block of code; `dispatch.force` supplies the known names."""
    for name, value in pins.items():
        if name not in known:
            raise ValueError(
                f"force({name}={value!r}): no op or family {name!r}; known: {', '.join(sorted(known))}"
            )
        parse(name, value)
    before = FORCED.copy()
    FORCED.update(pins)
    try:
        yield
    finally:
        FORCED.clear()
        FORCED.update(before)
