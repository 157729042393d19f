"""Launch a kernel at one shape: compiled on first use, then run without the JIT's look at every argument.

On an H200's host the JIT's launch takes 18 us, `compiled[grid]` 10 and this 6; a linear step makes 3 to 9.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from turbo_ops.device.target import interpreted

PLAIN_LAUNCHERS = ("3.6.",)  # Triton versions whose launcher takes what `_runner` passes


class Launch:
    """`kernel[grid](*tensors, *scalars, **constants)` for one grid, set of scalars, device and dtypes.

    A tensor that is absent (None) must always be.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], scalars: tuple, **constants: object):
        self._kernel, self._grid, self._scalars, self._constants = kernel, grid, scalars, constants
        self._compiled: dict[object, Callable] = {}
        self._aligned: Callable | None = None  # what runs where every address is a multiple of 16

    def __call__(self, *tensors: Tensor | None) -> None:
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        if self._aligned is not None:
            bits = 0
            for pointer in pointers:
                bits |= pointer or 0
            if not bits & 15:
                self._aligned(*pointers)
                return
        # what Triton specialises addresses on: multiples of 16 and, on AMD, buffers under 2 GiB
        key: object = tuple([p is not None and p & 15 == 0 for p in pointers])
        if torch.version.hip:
            key = key, tuple([t is not None and t.untyped_storage().nbytes() < 2**31 for t in tensors])
        run = self._compiled.get(key)
        if run is not None:
            run(*pointers)
            return
        compiled = self._kernel[self._grid](*tensors, *self._scalars, **self._constants)
        if not interpreted():
            names = self._kernel.arg_names[len(tensors) + len(self._scalars) :]
            rest = *self._scalars, *(self._constants[name] for name in names)
            device = next(t.device.index for t in tensors if t is not None)
            self._compiled[key] = _runner(compiled, (*self._grid, 1, 1)[:3], rest, device)
            if not torch.version.hip and not any(p and p & 15 for p in pointers):
                self._aligned = self._compiled[key]


def _runner(compiled: Any, grid: tuple, rest: tuple, device: int) -> Callable:
    """What runs a compiled kernel on addresses; profilers that hook into launches are served too."""
    slow = compiled[grid]
    if not triton.__version__.startswith(PLAIN_LAUNCHERS):
        return lambda *pointers: slow(*pointers, *rest)
    launch, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    runtime, stream = triton.knobs.runtime, torch._C._cuda_getCurrentRawStream
    enter, leave = runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls

    def run(*pointers: int | None) -> None:
        if enter or leave:
            slow(*pointers, *rest)
        else:
            launch(*grid, stream(device), function, metadata, None, None, None, *pointers, *rest)

    return run
