"""Op level: every listed backend on the cases that tests and tuning use, checked before it is timed."""

import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from numerics import SNR_FLOOR, assert_close, snr_db, strides, tolerance
from torch import Tensor

import turbo_ops
from benchmarks.session import Session, WrongError, against, seeded
from benchmarks.tables import SNR_CAP
from turbo_ops.arch import FP8_DTYPES
from turbo_ops.cases import cases
from turbo_ops.dispatch import REGISTRY, Op
from turbo_ops.tuning import copy

QUICK_CASES = 2


def measure_ops(session: Session, names: Iterable[str], backends: Iterable[str]) -> None:
    """A row for each op of `names`, case and backend; backends empty: those that the contract lists."""
    chosen = tuple(backends)
    for op in (REGISTRY[name] for name in names):
        found = list(cases(op, session.size, session.device).items())
        every = max(1, len(found) // QUICK_CASES) if session.quick else 1
        for case, make in found[::every][: QUICK_CASES if session.quick else None]:
            inputs = Case(session, op, make)
            for backend in (*op.order, "reference"):
                if backend in (chosen or op.order):
                    row = {"level": "op", "name": op.name, "case": case, "variant": backend}
                    session.measure(row, functools.partial(inputs.measure, backend))


class Case:
    """Arguments of an op, its reference's outputs and torch's time: drawn once for all backends."""

    def __init__(self, session: Session, op: Op, make: Callable[[], tuple]):
        self.session, self.op, self._make = session, op, seeded(make)

    @functools.cached_property
    def args(self) -> tuple:
        return self._make()

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return outputs(self.op, self.op.reference, self.args)

    @functools.cached_property
    def baseline(self) -> tuple[str, float]:
        label, prepare = BASELINES.get(self.op.name, ("copy of the same bytes", same_bytes))
        if self.op.family != "gemm":
            return label, self.session.ms(prepare(self.args, self.tensors))
        # torch's product of one M, N, K is measured once for all scales and precisions
        key, known = (label, *(arg.shape for arg in self.args[:2])), self.session.baselines
        if key not in known:
            known[key] = self.session.ms(prepare(self.args, self.tensors))
        return label, known[key]

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (*self.args, *self.expected) if isinstance(t, Tensor)]

    def measure(self, backend: str) -> dict:
        with turbo_ops.force(**{self.op.name: backend}):
            self.op.choose(*self.args)  # a refusal costs no reference
            poison_next(self.expected)
            actual = outputs(self.op, self.op, self.args)
            found = {"snr_db": check(self.op, self.args, actual, self.expected)}
            del actual
            args = tuple(copy(arg) for arg in self.args) if self.op.mutates else self.args
            ms = self.session.ms(functools.partial(self.op, *args))
        return {"ms": ms, **found, **self.rate(ms), **against(ms, *self.baseline)}

    def rate(self, ms: float) -> dict:
        if self.op.family == "gemm":
            a, b = self.args[len(self.op.mutates) :][:2]
            of = "fp8" if a.dtype in FP8_DTYPES else "bf16" if a.dtype == torch.bfloat16 else None
            return self.session.rate(ms, of, flops=2 * a.shape[0] * b.shape[0] * a.shape[1])
        moved = sum(t.numel() * t.element_size() for t in self.tensors)
        return self.session.rate(ms, "copy", bytes_moved=moved)


def outputs(op: Op, run: Callable, args: tuple) -> tuple[Tensor, ...]:
    """What `run` returns, then what it mutates, on scratch copies where it mutates."""
    scratch = tuple(copy(arg) for arg in args) if op.mutates else args
    result = run(*scratch)
    returned = result if isinstance(result, tuple) else () if result is None else (result,)
    mutated = (arg for name, arg in zip(op._parameters, scratch, strict=True) if name in op.mutates)
    return (*returned, *mutated)


def poison_next(expected: tuple[Tensor, ...]) -> None:
    """Fill the blocks that the allocator hands out next: a backend that writes nothing must not pass."""
    blocks = [
        torch.full((t.untyped_storage().nbytes(),), 0xFF, dtype=torch.uint8, device=t.device)
        for t in expected
    ]
    del blocks  # all at once, after the last: each output gets one


def check(op: Op, args: tuple, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float | None:
    """WrongError where the results are not the contract's; the least SNR in dB of a GEMM."""
    if len(actual) != len(expected):
        raise WrongError(f"{len(actual)} outputs, the contract has {len(expected)}")
    if op.family == "gemm":
        return min(_gemm_snr(op, args, *pair) for pair in zip(actual, expected, strict=True))
    for index, (ours, truth) in enumerate(zip(actual, expected, strict=True)):
        try:
            assert_close(ours, truth, tolerance(op.name, op.family, truth, args), f"output {index}")
        except AssertionError as difference:
            raise WrongError(str(difference)) from difference
    return None


def _gemm_snr(op: Op, args: tuple, actual: Tensor, expected: Tensor) -> float:
    """SNR over the whole product: on long K, fast accumulation leaves single elements past any tolerance."""
    layouts = [(t.dtype, tuple(t.shape), strides(t)) for t in (actual, expected)]
    if layouts[0] != layouts[1]:
        raise WrongError(f"dtype, shape, strides are {layouts[0]}, the contract's {layouts[1]}")
    fp8 = any(isinstance(arg, Tensor) and arg.dtype in FP8_DTYPES for arg in args)
    floor = SNR_FLOOR["e4m3"] if fp8 else -20 * math.log10(tolerance(op.name, op.family, expected, args))
    snr = snr_db(actual, expected)
    if not snr >= floor:
        raise WrongError(f"SNR {snr:.1f} dB against the reference, at least {floor:.0f} dB is right")
    return min(snr, SNR_CAP)


@seeded
def bf16(*shapes: torch.Size, device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, device=device).bfloat16() for shape in shapes]


def mm(args: tuple, tensors: list[Tensor]) -> Callable[[], object]:
    a, b = bf16(args[0].shape, args[1].shape, device=args[0].device)
    return lambda: torch.mm(a, b.t())


def addmm(args: tuple, tensors: list[Tensor]) -> Callable[[], object]:
    out, a, b = bf16(*(arg.shape for arg in args[:3]), device=args[0].device)
    return lambda: out.addmm_(a, b.t())


def rms_norm(args: tuple, tensors: list[Tensor]) -> Callable[[], object]:
    x, weight, eps = args[:3]
    return lambda: F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_backward(args: tuple, tensors: list[Tensor]) -> Callable[[], object]:
    grad_y, x, weight = args[:3]
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = F.rms_norm(leaves[0], weight.shape, leaves[1], 1e-6)
    return lambda: torch.autograd.grad(y, leaves, grad_y, retain_graph=True)


@seeded
def same_bytes(args: tuple, tensors: list[Tensor]) -> Callable[[], object]:
    """A copy that reads half of the op's bytes and writes the other half."""
    half = sum(t.numel() * t.element_size() for t in tensors) // 2
    source = torch.randint(256, (half,), dtype=torch.uint8, device=tensors[0].device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# What torch itself does for the same job: (arguments, all tensors in and out) -> the call to time
BASELINES: dict[str, tuple[str, Callable]] = {
    "gemm": ("torch.mm bf16", mm),
    "gemm_accumulate_": ("Tensor.addmm_ bf16", addmm),
    "rms_norm_fwd": ("F.rms_norm", rms_norm),
    "rms_norm_bwd": ("F.rms_norm's backward", rms_norm_backward),
}
