"""The csrc library: loaded once, on first use, or a reason why not."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
FAILED = HERE / "native_build_failed.txt"  # written by setup.py


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    kernels, operators = HERE / "libturbo_kernels.so", HERE / "libturbo_torch.so"
    if not (kernels.exists() and operators.exists()):
        why = f": {FAILED.read_text().strip()}" if FAILED.exists() else ""
        return None, f"the native library is not built{why} (pip install --no-build-isolation -e . builds it)"
    try:
        library = ctypes.CDLL(str(kernels))
        torch.ops.load_library(str(operators))
    except OSError as error:
        return None, f"the native library does not load: {error}"
    library.turbo_backend.restype = library.turbo_archs.restype = ctypes.c_char_p
    return library, None


def reason() -> str | None:
    """Why there are no native kernels; None where there are."""
    return _loaded()[1]


def load() -> None:
    """Make torch.ops.turbo callable; ImportError with `reason()` where it cannot be."""
    if reason() is not None:
        raise ImportError(reason())


def archs() -> tuple[str, ...]:
    """The GPU archs that the library has kernels for; () for a CPU build or none."""
    library = _loaded()[0]
    return tuple(filter(None, library.turbo_archs().decode().split(";"))) if library else ()


def build_info() -> dict[str, Any]:
    """backend, archs, compiler, and for each GPU kernel arch, name, registers and spills.

    Raises ImportError with the reason where the library, or this optional module of it, was not built.
    """
    load()
    from turbo_ops._build_info import build_info as info

    return info()
