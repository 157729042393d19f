"""Launch a compiled kernel without the JIT's inspection of every argument, some 60 us a call on the host."""

from typing import Any

import torch
from torch import Tensor

from turbo_ops.device.target import interpreted

CACHE_LIMIT = 4096  # keys hold extents, and ragged batches make new ones for ever
_COMPILED: dict[tuple, Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **constants: object) -> None:
    """`kernel[grid](*args, **constants)`; args in the kernel's order, constants (constexprs, num_warps, ...) behind."""
    if interpreted():
        kernel[grid](*args, **constants)
        return
    key = (kernel.fn, torch.cuda.current_device(), *map(_trait, args), *constants.values())
    found = _COMPILED.get(key)
    if found is None:
        if len(_COMPILED) >= CACHE_LIMIT:
            _COMPILED.clear()
        compiled = kernel[grid](*args, **constants)
        _COMPILED[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
        return
    compiled, rest = found
    compiled[(*grid, 1, 1)[:3]](*args, *rest)


def _trait(arg: object) -> object:
    """All that Triton specialises on: alignment of pointers (and, on AMD, buffers under 2 GiB), values of integers."""
    if not isinstance(arg, Tensor):
        return arg
    small = not torch.version.hip or arg.untyped_storage().nbytes() < 2**31
    return arg.dtype, arg.data_ptr() % 16 == 0, small
