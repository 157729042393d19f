"""One run: its device, its clocks, its rows. Whatever goes wrong in a row becomes that row's reason."""

import functools
import importlib.util
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from turbo_ops import UnsupportedError, tuning

ROOT = Path(__file__).parents[1]
FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")  # results are committed: no paths of a machine in them
REASON_LIMIT = 300  # characters of an error that a row keeps: compilers print pages
GIB = 2**30


class WrongError(Exception):
    """A result is not the reference's: its backend gets no number."""


@dataclass(frozen=True)
class Variant:
    """A way to run a layer. least_snr: dB that its results must keep. pin: a backend of the op to force."""

    name: str
    build: Callable[..., nn.Module]
    least_snr: float
    pin: str | None = None
    peer: bool = False  # built from the layer that it stands in for
    micro_batches: int = 1  # forward and backward passes between two changes of the weight


@dataclass
class Session:
    """rows: flat dicts with level, name, case, variant, status (ok, refused, wrong, failed) and reason."""

    device: torch.device
    size: str = "bench"
    quick: bool = False
    peers: str | None = None  # a word in the names of those to measure, None for none
    rows: list[dict] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    baselines: dict[tuple, float] = field(default_factory=dict)
    after_part: Callable[[], None] = lambda: None  # saves: what a time limit cuts off costs only the rest

    def measure(self, row: dict, run: Callable[[], dict]) -> dict:
        """Append `row` with what `run` measured, or with the reason why it did not."""
        row = {"name": "", "case": "", "variant": "", **row, "status": "ok", "reason": None}
        try:
            row |= run()
        except (UnsupportedError, ImportError) as refusal:
            row |= {"status": "refused", "reason": _sentence(refusal)}
        except WrongError as difference:
            row |= {"status": "wrong", "reason": _sentence(difference)}
        except (
            Exception
        ) as error:  # a row must not cost the others: kernels, compilers and peers raise anything
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {_sentence(error)}"}
            _forget()
        if row["status"] in ("wrong", "failed"):
            print(
                f"{row['status']}: {row['name']} {row['case']} {row['variant']}: {row['reason']}", flush=True
            )
        self.rows.append(row)
        return row

    def part(self, name: str, case: str, run: Callable[[], None]) -> None:
        """Run what measures several rows; what fails outside of them is a row, too."""

        def timed() -> dict:
            began = time.perf_counter()
            run()
            return {"seconds": time.perf_counter() - began}

        row = self.measure({"level": "part", "name": name, "case": case}, timed)
        if row["status"] == "ok":
            print(f"{f'{name} {case}'.strip()}: {row['seconds']:.1f} s", flush=True)
        self.after_part()

    def compare(
        self, level: str, case: str, variants: Iterable[Variant], measure: Callable[[Variant], dict]
    ) -> list[dict]:
        """A row for each variant; the first is the baseline of all."""
        rows: list[dict] = []
        for variant in variants:
            row = {"level": level, "name": level, "case": case, "variant": variant.name}
            rows.append(self.measure(row, functools.partial(measure, variant)))
            if rows[-1]["status"] == "ok":
                rows[-1] |= against(rows[-1]["ms"], rows[0]["variant"], rows[0].get("ms"))
        return rows

    def ms(self, run: Callable[[], object], drop: Iterable[Tensor] = (), for_ms: float = 40) -> float:
        """Median ms; on a GPU device time, L2 flushed before each run where triton is there.

        drop: leaves whose gradients are dropped before each run. for_ms: how long to measure, a third of it
        before to warm up.
        """
        drop, few = tuple(drop), 3

        def fresh() -> object:
            for tensor in drop:
                tensor.grad = None
            return run()

        here = (torch.empty(0, device=self.device),)
        if self.device.type != "cuda" or importlib.util.find_spec("triton") is None:
            return tuning.median_ms(fresh, here, few if self.quick else 20)
        from triton.testing import do_bench

        slow = 10 * tuning.median_ms(fresh, here, few)  # 10 samples of what is slow
        rep = max(10 if self.quick else for_ms, slow)
        return do_bench(run, warmup=rep / 3, rep=rep, grad_to_none=drop or None, return_mode="median")

    def device_ms(self, step: Callable[[], object], steps: int = 10) -> float | None:
        """Median ms of a step in a CUDA graph of some: without what the host takes to launch it.

        Steps follow one another without a flush of the L2 cache: take one that moves more than it holds.
        """
        if self.device.type != "cuda":
            return None
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(steps):
                step()
        ms = self.ms(graph.replay) / steps
        graph.reset()
        return ms

    def host_us(self, runs: Sequence[Callable[[], object]], calls: int = 60) -> list[list[float]]:
        """Wall time of a call in us, for each of `runs` in each round; the device is waited for after each.

        They take turns: a virtual machine's clock drifts by a factor of 2 within seconds, and not in a round.
        """
        calls, rounds = (calls // 10, 2) if self.quick else (calls, 25)
        times: list[list[float]] = [[] for _ in runs]
        for index in range(rounds + 1):
            for run, taken in zip(runs, times, strict=True):
                self.synchronize()
                began = time.perf_counter()
                for _ in range(calls):
                    run()
                self.synchronize()
                if index:
                    taken.append((time.perf_counter() - began) / calls * 1e6)
        return times

    def peak_gib(self, run: Callable[[], object]) -> float | None:
        """The most memory that was allocated during one run, what was there before included."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) / GIB

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rate(
        self, ms: float, of: str | None, *, flops: float | None = None, bytes_moved: float = 0.0
    ) -> dict:
        """TFLOP/s or GB/s of a time, and its share of the ceiling that this run measured for `of`."""
        rate = bytes_moved / ms / 1e6 if flops is None else flops / ms / 1e9
        ceiling = self.ceilings.get(of or "")
        return {
            "gbps" if flops is None else "tflops": rate,
            "of": of,
            "share": rate / ceiling if ceiling else None,
        }


def against(ms: float, baseline: str, baseline_ms: float | None) -> dict:
    """How many times faster than the baseline of the same run."""
    return {
        "baseline": baseline,
        "baseline_ms": baseline_ms,
        "speedup": baseline_ms / ms if baseline_ms else None,
    }


def _sentence(error: BaseException) -> str:
    text = FOLDERS.sub("", " ".join(str(error).split()))
    return text if len(text) <= REASON_LIMIT else f"{text[:REASON_LIMIT]}..."


def _forget() -> None:
    """An out-of-memory error leaves cached blocks that the next row needs; a fault leaves no device."""
    if torch.cuda.is_available():
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            print(f"the device is unusable from here on: {_sentence(error)}", flush=True)


def seeded(make: Callable) -> Callable:
    """Draw the same values in every run: the power limit makes a GPU's clock depend on them."""

    @functools.wraps(make)
    def draw(*args: object, **kwargs: object) -> object:
        torch.manual_seed(0)
        return make(*args, **kwargs)

    return draw
