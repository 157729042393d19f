"""Which backend was measured fastest: `tuned/<arch>.json`, and with TURBO_AUTO_TUNE=1 what this machine saw.

`python -m turbo_ops.tuning` writes the table, which is reviewed like code. Without a matching entry the
contract's own order holds. Auto-tuning is off by default: it costs seconds at first use of a shape.
"""

import contextlib
import fcntl
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from turbo_ops import policy
from turbo_ops.arch import arch
from turbo_ops.distributed import agree, agreed

if TYPE_CHECKING:
    from turbo_ops.dispatch import Op

TABLES = Path(__file__).parents[1] / "tuned"
_auto = False


def choose(op: "Op", args: tuple, device: torch.device) -> str | None:
    """The backend that the tuned table, or auto-tuning, prefers for these arguments."""
    name, entry = arch(device), key(args)
    tuned = _table(name).get(op.name, {}).get(entry)
    if tuned is None and _auto and device.type == "cuda":
        tuned = _auto_tuned(op, args, name, entry)
    return tuned


def key(args: tuple) -> str:
    """Arguments as a table key: extents rounded up to a power of two, `'` behind a transposed tensor."""
    return " ".join(_word(arg) for arg in args)


def _word(arg: object) -> str:
    if isinstance(arg, Tensor):
        extents = "x".join(str(1 << (n - 1).bit_length() if n else 0) for n in arg.shape)
        transposed = "'" if arg.ndim == 2 and arg.stride(1) != 1 and arg.stride(0) == 1 else ""
        return f"{str(arg.dtype).removeprefix('torch.')}[{extents}]{transposed}"
    return str(arg).removeprefix("torch.")


def measure(op: "Op", args: tuple, names: tuple[str, ...], repeats: int = 20) -> dict[str, float]:
    """Median ms of each named backend that accepts `args`, on scratch copies: nothing in use is written."""
    times = {}
    for name in names:
        backend = op.load(name)
        if backend is not None and op.refusal(name, args) is None:
            scratch = tuple(copy(arg) for arg in args)
            times[name] = median_ms(functools.partial(backend.prepared(scratch), *scratch), args, repeats)
    return times


def copy(arg: object) -> object:
    """A tensor of the same values and strides; anything else as it is."""
    if not isinstance(arg, Tensor):
        return arg
    once = [
        1 if extent > 1 and step == 0 else extent
        for extent, step in zip(arg.shape, arg.stride(), strict=True)
    ]
    source = arg.as_strided(once, arg.stride())  # an expanded axis is stored once
    fresh = torch.empty_strided(once, arg.stride(), dtype=arg.dtype, device=arg.device)
    return fresh.copy_(source).expand(arg.shape)


def median_ms(run: Callable[[], object], args: tuple, repeats: int = 20) -> float:
    """Median ms of `repeats` runs after 3 warm-ups; device time by events where an argument is on a GPU."""
    on_gpu = any(isinstance(arg, Tensor) and arg.is_cuda for arg in args)
    for _ in range(3):
        run()
    samples = []
    for _ in range(repeats):
        if on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            samples.append((time.perf_counter() - began) * 1e3)
    return statistics.median(samples)


def reset() -> None:
    """Read the tables and the environment again."""
    global _auto
    _auto = policy.flag("TURBO_AUTO_TUNE", False)
    _table.cache_clear()


@functools.lru_cache(maxsize=16)
def _table(name: str) -> dict[str, dict[str, str]]:
    path = TABLES / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _auto_tuned(op: "Op", args: tuple, name: str, entry: str) -> str | None:
    if torch.cuda.is_current_stream_capturing() or any(isinstance(arg, FakeTensor) for arg in args):
        return None
    full = f"{name} {op.name} {entry}"
    choice = agreed(full)
    if choice is None:
        with _locked(cache_file(name)) as table:
            choice = table.setdefault(op.name, {}).get(entry)
            if choice is None:
                times = measure(op, args, op.order)
                choice = min(times, key=times.__getitem__) if times else "reference"
                table[op.name][entry] = choice
        choice = agree(full, choice)
    return None if choice == "reference" else choice


def cache_file(name: str) -> Path:
    """Where auto-tuning keeps results: TURBO_CACHE_DIR or the user's cache; a file per arch and torch."""
    root = os.environ.get("TURBO_CACHE_DIR") or Path(
        os.environ.get("XDG_CACHE_HOME", "~/.cache"), "turbo_ops"
    )
    return Path(root).expanduser() / f"{name}-torch{torch.__version__}.json"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[dict[str, dict[str, str]]]:
    """The table in `path`, written back on exit; processes of one machine take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        table = json.loads(text) if text else {}
        yield table
        file.seek(0)
        file.truncate()
        file.write(json.dumps(table, indent=1, sort_keys=True))
