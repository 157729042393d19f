"""Memory checks of Triton's CPU interpreter: accesses out of bounds, and stores that race."""

from collections.abc import Iterator

import numpy as np
from triton.runtime import interpreter as stock


class CheckedMemory:
    """Stands in for the interpreter's memory module while a kernel runs.

    Each unmasked lane must lie inside the storage of some kernel argument, else IndexError; no address may be
    plainly stored to by two programs of one launch, else RuntimeError.
    """

    def __init__(self, memory: object):
        self.memory = memory
        self.bounds: tuple[np.ndarray, np.ndarray] | None = None  # first and one past the last byte, sorted
        self.stores: list[tuple[np.ndarray, np.ndarray]] = []  # addresses, and the program of each

    def __getattr__(self, name: str) -> object:
        return getattr(self.memory, name)

    def load(self, pointers, mask, other, kind):
        self.inside("load", pointers, mask, kind.itemsize)
        return self.memory.load(pointers, mask, other, kind)

    def store(self, pointers, values, mask):
        addresses = self.inside("store", pointers, mask, values.itemsize)
        self.stores.append((addresses, np.full(addresses.shape, program())))
        return self.memory.store(pointers, values, mask)

    def atomic_rmw(self, operation, pointers, values, mask, sem):
        self.inside("atomic", pointers, mask, values.itemsize)
        return self.memory.atomic_rmw(operation, pointers, values, mask, sem)

    def atomic_cas(self, pointers, expected, values, sem):
        self.inside("atomic", pointers, np.ones(pointers.shape, bool), values.itemsize)
        return self.memory.atomic_cas(pointers, expected, values, sem)

    def inside(self, what: str, pointers: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
        """The addresses of the unmasked lanes, all of them within bounds."""
        addresses = np.ascontiguousarray(pointers)[np.broadcast_to(mask, pointers.shape).astype(bool)]
        addresses = addresses.astype(np.uint64).ravel()
        if self.bounds is not None:
            first, past = self.bounds
            storage = np.searchsorted(first, addresses, side="right") - 1
            outside = (storage < 0) | (addresses + np.uint64(size) > past[np.maximum(storage, 0)])
            if outside.any():
                raise IndexError(
                    f"out-of-bounds {what}: {int(outside.sum())} of {outside.size} lanes in program "
                    f"{stock.interpreter_builder.grid_idx}, first lane {int(outside.argmax())}"
                )
        return addresses

    def begin(self, arguments: object) -> None:
        sizes: dict[int, int] = {0: 0}
        for storage in storages(arguments):
            sizes[storage.data_ptr()] = max(storage.nbytes(), sizes.get(storage.data_ptr(), 0))
        first = np.array(sorted(sizes), np.uint64)
        self.bounds = first, first + np.array([sizes[int(address)] for address in first], np.uint64)
        self.stores = []

    def end(self) -> None:
        self.bounds, stores, self.stores = None, self.stores, []
        if not stores:
            return
        addresses, programs = (np.concatenate(column) for column in zip(*stores, strict=True))
        order = np.lexsort((programs, addresses))
        addresses, programs = addresses[order], programs[order]
        clash = (addresses[1:] == addresses[:-1]) & (programs[1:] != programs[:-1])
        if clash.any():
            where = int(clash.argmax())
            raise RuntimeError(
                f"store race: {int(clash.sum())} addresses are written by more than one program, "
                f"e.g. by programs {programs[where]} and {programs[where + 1]}"
            )


def program() -> int:
    """The number of the running program within its grid."""
    (x, y, z), (_, height, depth) = stock.interpreter_builder.grid_idx, stock.interpreter_builder.grid_dim
    return (x * height + y) * depth + z


def storages(argument: object) -> Iterator:
    """The storages of every tensor in a kernel's arguments, descriptors and tuples included."""
    if isinstance(argument, (tuple, list)):
        for item in argument:
            yield from storages(item)
    elif hasattr(argument, "untyped_storage"):
        yield argument.untyped_storage()
    elif hasattr(argument, "base"):
        yield from storages(argument.base)


def install() -> None:
    """Check every launch of this process from now on."""
    memory = stock._interpreter = CheckedMemory(stock._interpreter)
    prepare, launch = stock.GridExecutor._init_args_hst, stock.GridExecutor.__call__

    def checked_prepare(self, args, kwargs):
        on_host = prepare(self, args, kwargs)
        memory.begin([on_host[0], list(on_host[1].values())])
        return on_host

    def checked_launch(self, *args, **kwargs):
        try:
            with np.errstate(all="ignore"):  # a GPU makes its NaN and inf silently
                launch(self, *args, **kwargs)
        except BaseException:
            memory.bounds, memory.stores = None, []
            raise
        memory.end()

    stock.GridExecutor._init_args_hst, stock.GridExecutor.__call__ = checked_prepare, checked_launch
