"""One op, many backends: the contract, the choice, and the reasons for it."""

import contextlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from turbo_ops import arch, policy, tuning, weight_cache

REGISTRY: dict[str, "Op"] = {}
LIBRARY = torch.library.Library("turbo_ops", "DEF")
CACHE_LIMIT = 4096  # choices an op remembers: keys hold shapes, and ragged batches make new ones for ever


class UnsupportedError(NotImplementedError):
    """No backend accepts these inputs; the message says why, backend by backend."""


@dataclass(frozen=True)
class Backend:
    """One way to run an op. `refuses(*args)` gives the reason as a sentence, or None to accept.

    A planned backend has `plan(*args)`: called once for all arguments of a kind, it gives what runs them.
    """

    name: str
    run: Callable
    refuses: Callable[..., str | None] = lambda *args: None
    plan: Callable[..., Callable] | None = None

    def prepared(self, args: tuple) -> Callable:
        """What to call with `args`, and with every other arguments of their kind."""
        return self.plan(*args) if self.plan else self.run


class Op:
    """A contract (name, schema, reference, fake) and the backends that fulfil it, best first.

    `reference` is the plain-torch truth. A backend lives in `backend_<name>.py` beside it, is imported on
    first use and attaches with `@op.backend(name, refuses=...)`; its schema must be the contract's.
    """

    def __init__(
        self,
        reference: Callable,
        order: tuple[str, ...],
        mutates: tuple[str, ...],
        prefers: Callable[..., str | None] = lambda *args: None,
        fake: Callable | None = None,
    ):
        self.name = reference.__name__
        self.family = reference.__module__.split(".")[-2]
        self.reference = reference
        self.order = order
        self.prefers = prefers
        self.fake = fake or reference
        self.schema = torch.library.infer_schema(reference, mutates_args=mutates)
        self.mutates = mutates
        self.__doc__ = reference.__doc__
        self._parameters = _parameters(reference)
        self._defaults = tuple(p.default for p in self._parameters.values())
        self._backends = {"reference": Backend("reference", reference)}
        self._missing: dict[str, str] = {}
        self._chosen: dict[tuple, tuple[Callable, int | None]] = {}
        self._warned = False
        # what torch.library.custom_op does, less 7 of its 10 us a call
        LIBRARY.define(self.name + self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(self.name, self._run_completed, "CompositeExplicitAutograd")
        torch.library.register_fake(f"turbo_ops::{self.name}", self.fake, lib=LIBRARY)
        self.torch_op = getattr(torch.ops.turbo_ops, self.name).default
        REGISTRY[self.name] = self

    def __repr__(self) -> str:
        return f"Op({self.name}{self.schema}, order={(*self.order, 'reference')})"

    def backend(
        self, name: str, *, refuses: Callable[..., str | None] = lambda *args: None, planned: bool = False
    ) -> Callable:
        """Attach the decorated function as backend `name`; TypeError where its schema is another.

        planned: the function takes the op's arguments and returns the callable that runs them.
        """

        def attach(function: Callable) -> Callable:
            if planned and [*_parameters(function).values()] != [*self._parameters.values()]:
                raise TypeError(f"{self.name}/{name} plans {inspect.signature(function)}, not {self.schema}")
            schema = (
                self.schema if planned else torch.library.infer_schema(function, mutates_args=self.mutates)
            )
            if schema != self.schema:
                raise TypeError(f"{self.name}/{name} is {schema}, the contract is {self.schema}")
            run = (lambda *args: function(*args)(*args)) if planned else function
            self._backends[name] = Backend(name, run, refuses, function if planned else None)
            return function

        return attach

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) < len(self._parameters):
            args = self._complete(args, kwargs)
        # Only a compiler needs the torch.library boundary, and it costs 20-40 us a call.
        return self.torch_op(*args) if torch.compiler.is_compiling() else self._run(*args)

    def _complete(self, args: tuple, kwargs: dict) -> tuple:
        rest = list(self._parameters.values())[len(args) :]
        missing = [p.name for p in rest if p.name not in kwargs and p.default is p.empty]
        unknown = kwargs.keys() - {p.name for p in rest}
        if missing or unknown:
            raise TypeError(
                f"{self.name}: missing {missing}, unknown or repeated {sorted(unknown)}; it is {self.schema}"
            )
        return (*args, *(kwargs.get(p.name, p.default) for p in rest))

    def _run(self, *args: Any) -> Any:
        run, index = self._choice(args)
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return run(*args)
        return run(*args)

    def _run_completed(self, *args: Any) -> Any:
        # torch's dispatcher drops trailing arguments that equal their defaults
        return self._run(*args, *self._defaults[len(args) :])

    def choose(self, *args: object) -> Backend:
        """The pinned backend, the tuned, preferred or first that accepts; else UnsupportedError."""
        return self._decide(args, self._device(args))

    def _choice(self, args: tuple) -> tuple[Callable, int | None]:
        traits = [kind_of(arg) if isinstance(arg, Tensor) else arg for arg in args]
        if policy.FORCED:
            traits += policy.FORCED.get(self.name), policy.FORCED.get(self.family)
        key = tuple(traits)
        choice = self._chosen.get(key)
        if choice is None:
            if torch.jit.is_tracing():  # shapes are tensors there: no key is ever found again
                raise UnsupportedError(
                    f"{self.name} has no torch.jit.trace: use torch.compile or torch.export"
                )
            if len(self._chosen) >= CACHE_LIMIT:
                self._chosen.clear()
            device = self._device(args)
            backend = self._decide(args, device)
            if device.type == "meta" or any(isinstance(arg, FakeTensor) for arg in args):
                return self.fake, None  # shapes alone; of a fake one the key is a real one's
            guarded = device.type == "cuda" and torch.cuda.device_count() > 1  # with one GPU it is current
            choice = backend.prepared(args), device.index if guarded else None
            self._chosen[key] = choice
        return choice

    def bind(self, args: tuple) -> Callable:
        """What runs these arguments, for a caller that knows when the next ones are of the same kind."""
        run, index = self._choice(args)
        return run if index is None else lambda *rest: self._run(*rest)

    def _device(self, args: tuple) -> torch.device:
        devices = {arg.device for arg in args if isinstance(arg, Tensor)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"{self.name}: tensors are on several devices: {names}")
        return devices.pop() if devices else torch.device("cpu")

    def _decide(self, args: tuple, device: torch.device) -> Backend:
        for origin, pins in (("force()", policy.FORCED), ("TURBO_{}_BACKEND", policy.ENVIRONMENT)):
            found = policy.pin(pins, (self.name, self.family), args)
            if found:
                name, pinned = found
                reason = self.refusal(pinned, args)
                if reason is None:
                    return self._backends[pinned]
                origin = origin.format(name.strip("_").upper())
                raise UnsupportedError(
                    f"{self.name} is pinned to {pinned} by {origin}, which refuses: {reason}"
                )
        first = tuning.choose(self, args, device) or self.prefers(*args)
        reasons: list[str] = []
        for name in (*([first] if first else []), *self.order, "reference"):
            reason = self.refusal(name, args)
            if reason is None:
                if name == "reference" and device.type == "cuda":
                    self._warn_once(reasons)
                return self._backends[name]
            reasons.append(f"  {name}: {reason}")
        raise UnsupportedError("\n".join([f"no backend for {self.name}:", *reasons]))

    def _warn_once(self, reasons: list[str]) -> None:
        if not self._warned:
            self._warned = True
            text = "\n".join([f"{self.name} runs on the slow reference on a GPU tensor, because:", *reasons])
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def refusal(self, name: str, args: tuple) -> str | None:
        """Why backend `name` does not take `args`; None where it does."""
        backend = self.load(name)
        return backend.refuses(*args) if backend else self._missing[name]

    def load(self, name: str) -> Backend | None:
        """Import `backend_<name>.py` beside the contract on first use; None where that cannot be."""
        if name not in self._backends and name not in self._missing:
            module = f"{self.reference.__module__.rpartition('.')[0]}.backend_{name}"
            self._missing[name] = f"there is no {name} backend for {self.name}"
            try:
                importlib.import_module(module)
            except ImportError as error:
                if getattr(error, "name", None) != module:
                    self._missing[name] = str(error)
        return self._backends.get(name)

    def reset(self) -> None:
        """Forget choices, failed imports and the warning."""
        self._chosen.clear()
        self._missing.clear()
        self._warned = False


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


def op(
    *order: str,
    mutates: tuple[str, ...] = (),
    prefers: Callable[..., str | None] = lambda *args: None,
    fake: Callable | None = None,
) -> Callable[[Callable], Op]:
    """`@op("native", "triton")` makes a plain-torch function the contract of an op; best backend first.

    prefers(*args): the backend that is better than the first in `order` for these arguments, or None.
    fake: the shapes of a reference that depends on its tensors' values.
    """
    return lambda reference: Op(reference, order, mutates, prefers, fake)


def refuse_second_derivative(name: str) -> None:
    """RuntimeError in a backward of which a graph is wanted: what it saved would count as constant."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"turbo_ops.{name} is differentiable once: create_graph=True would be wrong")


def keeps_graph() -> bool:
    """In a backward: whether another one may follow over the same graph (retain_graph)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


class Bound(dict):
    """The ops of a caller whose arguments are of one kind at every call: a choice costs 1 to 3 us."""

    def __call__(self, slot: Hashable, contract: Op, *args: Any) -> Any:
        run = self.get(slot)
        if run is None:
            run = self[slot] = contract.bind(args)
        return run(*args)

    def within(self, kind: Hashable) -> "Bound":
        """Ops that depend on a further kind of tensor, too."""
        found = self.get(kind)
        if found is None:
            found = self[kind] = Bound()
        return found


def directly(slot: Hashable, contract: Op, *args: Any) -> Any:
    """In place of a `Bound`, where each call is on its own."""
    return contract(*args)


Runner = Callable[..., Any]  # Bound or directly
_BOUND = Bound()


def kind_of(x: Tensor) -> tuple:
    """What a choice and a plan depend on; of an address, whether a row can start at a multiple of 16."""
    return x.dtype, x.shape, x.stride(), x.device, x.storage_offset() & 15


def runner(kind: tuple, outer: Runner = _BOUND) -> Runner:
    """The one `Bound` of a kind; `directly` where a backend is forced or a compiler looks on."""
    if policy.FORCED or torch.compiler.is_compiling() or not isinstance(outer, Bound):
        return directly
    if len(outer) >= CACHE_LIMIT:
        outer.clear()
    return outer.within(kind)


def _known() -> set[str]:
    return {name for contract in REGISTRY.values() for name in (contract.name, contract.family)}


@contextlib.contextmanager
def force(**backends: str) -> Iterator[None]:
    """`with force(gemm="triton"): ...` or `force(gemm="fp8:triton,other:blaslt")`, by op or family name.

    A pinned backend that refuses raises UnsupportedError; it never falls back. A captured CUDA graph keeps
    the backends that it was captured with.
    """
    with policy.force(_known(), backends):
        yield


def reset() -> None:
    """Read the environment again; forget choices, tuned tables, failed imports and casts of weights."""
    arch.reset()
    tuning.reset()
    weight_cache.reset()
    policy.read_environment(_known())
    _BOUND.clear()
    for contract in REGISTRY.values():
        contract.reset()


def explain(name: str | Op, *args: object, **kwargs: object) -> dict[str, str | None]:
    """Print what each backend of an op says to these arguments; return {backend: reason, None = accepts}."""
    contract = REGISTRY.get(name) if isinstance(name, str) else name
    if contract is None:
        raise ValueError(f"explain({name!r}): no such op; known: {', '.join(sorted(REGISTRY))}")
    args = contract._complete(args, kwargs)
    answers = {backend: contract.refusal(backend, args) for backend in (*contract.order, "reference")}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            contract.reference(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        chosen = contract.choose(*args).name
    except (ValueError, TypeError) as error:
        answers["reference"] = chosen = str(error)
    except UnsupportedError as error:
        chosen = f"none: {error}"
    print(f"{contract.name} -> {chosen}")
    for backend, reason in answers.items():
        print(f"  {backend}: {reason or 'accepts'}")
    return answers
