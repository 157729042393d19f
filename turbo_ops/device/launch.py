"""Launch a kernel at one shape: compiled on first use, then run without the JIT's look at every argument.

The JIT's own launch costs some 60 us of host time a call, this one 15; a linear layer's step makes 3 to 9.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turbo_ops.device.target import interpreted


class Launch:
    """`kernel[grid](*tensors, *scalars, **constants)` for one grid, set of scalars and device."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], scalars: tuple, **constants: object):
        self._kernel, self._grid, self._scalars, self._constants = kernel, grid, scalars, constants
        self._compiled: dict[tuple, Callable] = {}
        self._rest: tuple = ()  # the constants in the kernel's order, once it is compiled

    def __call__(self, *tensors: Tensor | None) -> None:
        # what Triton specialises tensors on: absence, dtype, alignment and, on AMD, buffers under 2 GiB
        key = tuple([None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
        if torch.version.hip:
            key += tuple(
                [None if t is None else (t.dtype, t.untyped_storage().nbytes() < 2**31) for t in tensors]
            )
        run = self._compiled.get(key)
        if run is not None:
            run(*tensors, *self._scalars, *self._rest)
            return
        compiled = self._kernel[self._grid](*tensors, *self._scalars, **self._constants)
        if not interpreted():
            names = self._kernel.arg_names[len(tensors) + len(self._scalars) :]
            self._rest = tuple(self._constants[name] for name in names)
            self._compiled[key] = compiled[(*self._grid, 1, 1)[:3]]
