"""Layer level: turbo_nn.Linear and RMSNorm beside torch's, on the same tensors."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from numerics import SNR_FLOOR, TOLERANCE, snr_db
from torch import Tensor, nn

import turbo_nn
import turbo_ops
from benchmarks import peers
from benchmarks.machine import measure_ceilings
from benchmarks.session import Session, Variant, WrongError
from benchmarks.tables import SNR_CAP
from turbo_ops import Recipe
from turbo_ops.arch import arch
from turbo_ops.dispatch import REGISTRY

TOKENS = {"bench": 8192, "test": 64}
# in, out; the first four are Llama-3-8B's, the others are for the rule that leaves small layers alone
LINEARS = {
    "bench": {
        "qkv": (4096, 6144),
        "o": (4096, 4096),
        "gate_up": (4096, 28672),
        "down": (14336, 4096),
        "small": (576, 576),
        "small up": (576, 1536),
        "1k": (1024, 1024),
        "1k up": (1024, 4096),
        "2k": (2048, 2048),
        "2k up": (2048, 8192),
    },
    "test": {"small": (64, 128), "wide": (128, 256)},
}
MICRO_BATCHES = 4
COMPILED = "fp8_tensorwise"
STEP_MS = 120  # to measure a step for
KEPT = (
    "fp8_tensorwise",
    "fp8_delayed",
    "fp8_blockwise",
)  # recipes measured with the cast of the weight kept, too
IN_FULL = ("qkv", "o", "gate_up", "down")  # with peers, of which a compiled one takes 10 s a shape
NORMS = {"bench": [(8192, 4096), (8192, 8192)], "test": [(64, 256)]}
NATIVE_MX = ("gfx950", "sm100")
LEAST_BF16_SNR = -20 * math.log10(TOLERANCE[torch.bfloat16])
LEAST_PEER_SNR = SNR_FLOOR["e5m2"]  # most cast grad_output to E5M2
EPS = 1e-6

Results = tuple[Tensor, ...]  # y, dx, dw


class Layer:
    """A module, its input and its output gradient; a step is forward and backward from dropped gradients.

    A step casts its weight anew, as the first micro-batch after the optimizer does; `steps` has more of them.
    """

    def __init__(self, module: nn.Module, x: Tensor, grad_y: Tensor):
        self.module, self.x, self.grad_y = module, x, grad_y
        self.weight = next(module.parameters())
        self.leaves = x, self.weight

    def forward(self) -> None:
        with torch.no_grad():
            self.module(self.x)

    def step(self) -> None:
        turbo_ops.weights_changed()
        self.module(self.x).backward(self.grad_y)

    def dropped_step(self) -> None:
        self.x.grad = self.weight.grad = None
        self.step()

    def steps(self, micro_batches: int) -> None:
        turbo_ops.weights_changed()
        for _ in range(micro_batches):
            self.x.grad = self.weight.grad = None
            self.module(self.x).backward(self.grad_y)

    def results(self) -> Results:
        self.x.grad = self.weight.grad = None
        y = self.module(self.x)
        y.backward(self.grad_y)
        found = y.detach(), self.x.grad, self.weight.grad
        self.x.grad = self.weight.grad = None
        return found


def tensors(session: Session, tokens: int, extents: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """x [tokens, in] that wants a gradient, and grad_y [tokens, out], the same in every run."""
    torch.manual_seed(0)
    x, grad_y = (torch.randn(tokens, width, device=session.device).bfloat16() for width in extents)
    return x.requires_grad_(), grad_y


def plain_linear(session: Session, tokens: int, extents: tuple[int, int]) -> Layer:
    """nn.Linear in bf16: the baseline, whose weight and tensors all variants share."""
    x, grad_y = tensors(session, tokens, extents)
    return Layer(nn.Linear(*extents, bias=False, device=session.device, dtype=torch.bfloat16), x, grad_y)


def linear_variants(base: Layer, emulated_mx: bool) -> Iterator[Variant]:
    """nn.Linear, then turbo_nn.Linear by every named recipe."""
    yield Variant("nn.Linear bf16", lambda: base.module, LEAST_BF16_SNR)
    for name, recipe in turbo_nn.RECIPES.items():
        if name != "mxfp8" or emulated_mx or arch(base.x.device) in NATIVE_MX:
            yield Variant(name, functools.partial(_twin, base.weight, name), least_snr(recipe))


def _twin(weight: nn.Parameter, recipe: str) -> nn.Module:
    out, width = weight.shape
    twin = turbo_nn.Linear(width, out, bias=False, device="meta", dtype=weight.dtype, recipe=recipe)
    twin.weight = weight
    return twin


def _compiled_variants(base: Layer) -> Iterator[Variant]:
    """torch.compile's own cost of a call is nn.Linear's; CUDA graphs take the host out of it."""
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    yield Variant("nn.Linear bf16 compiled", lambda: compiled(base.module), LEAST_BF16_SNR)
    for mode in (None, "reduce-overhead"):
        name = f"{COMPILED} compiled{', CUDA graphs' if mode else ''}"
        build = functools.partial(_twin, base.weight, COMPILED)
        yield Variant(
            name, lambda b=build, m=mode: compiled(b(), mode=m), least_snr(turbo_nn.RECIPES[COMPILED])
        )


def least_snr(recipe: Recipe) -> float:
    """What y, dx and dw must keep against bf16, by the least precise type in the recipe."""
    gemms = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    casts = {cast.dtype for gemm in gemms for cast in (gemm.lhs, gemm.rhs) if cast}
    return min((SNR_FLOOR[dtype] for dtype in casts), default=LEAST_BF16_SNR)


def snr_of(actual: Results, expected: Results, floor: float) -> dict[str, float]:
    """SNR of y, dx and dw; WrongError where one is below `floor`."""
    names = ("snr_y_db", "snr_dx_db", "snr_dw_db")
    pairs = zip(actual, expected, strict=True)
    found = {name: min(snr_db(*pair), SNR_CAP) for name, pair in zip(names, pairs, strict=True)}
    if not all(snr >= floor for snr in found.values()):
        values = ", ".join(f"{snr:.1f}" for snr in found.values())
        raise WrongError(f"SNR of y, dx, dw is {values} dB, at least {floor:.0f} is right")
    return found


def checked_linear(base: Layer, variant: Variant) -> tuple[Layer, dict[str, float]]:
    """The variant's layer, and its SNR against nn.Linear."""
    layer = Layer(variant.build(base.module) if variant.peer else variant.build(), base.x, base.grad_y)
    for _ in range(2):  # delayed scaling needs a history
        layer.dropped_step()
        turbo_ops.delayed.step()
    return layer, snr_of(layer.results(), base.results(), variant.least_snr)


def measure_linear(session: Session) -> None:
    """Step of every shape by every recipe."""
    found = peers.variants(session, "linear", LEAST_PEER_SNR)
    shapes = list(LINEARS[session.size].items())
    for index, (name, extents) in enumerate(shapes[:1] if session.quick else shapes):
        case = f"{name} {extents[0]}->{extents[1]}"
        some = found if name in IN_FULL or session.size == "test" else None
        run = functools.partial(_measure_shape, session, case, extents, some, emulated_mx=index == 0)
        session.part("linear", case, run)


def _measure_shape(
    session: Session, case: str, extents: tuple[int, int], peers: list[Variant] | None, *, emulated_mx: bool
) -> None:
    """With peers, also with the weight's cast kept; None: the recipes alone."""
    measure_ceilings(session, only="fp8")  # the power limit moves it within a run
    base = plain_linear(session, TOKENS[session.size], extents)
    variants = [*linear_variants(base, emulated_mx), *(peers or [])]
    if emulated_mx:  # the first shape: neither is worth its time again
        variants += _compiled_variants(base)
    if peers is not None:
        kept = (dataclasses.replace(v, micro_batches=MICRO_BATCHES) for v in variants if v.name in KEPT)
        variants += [
            dataclasses.replace(v, name=f"{v.name}, weight cast once for {MICRO_BATCHES}") for v in kept
        ]
    session.compare("linear", case, variants, functools.partial(_measure_linear, session, base))


def _measure_linear(session: Session, base: Layer, variant: Variant) -> dict:
    layer, found = checked_linear(base, variant)
    if variant.micro_batches == 1:
        ms = session.ms(layer.step, drop=layer.leaves, for_ms=STEP_MS)
    else:
        ms = session.ms(lambda: layer.steps(variant.micro_batches), for_ms=STEP_MS) / variant.micro_batches
    tokens, (out, width) = base.x.shape[0], base.weight.shape
    found |= session.rate(ms, "fp8", flops=6 * tokens * out * width)
    if isinstance(layer.module, turbo_nn.Linear):
        found["backend"] = turbo_ops.linear_backends(layer.weight, layer.module.recipe, tokens)
    found["peak_gib"] = session.peak_gib(layer.dropped_step)
    base.x.grad = layer.weight.grad = None
    return {"ms": ms, **found}


def measure_norms(session: Session) -> None:
    """Forward and step of RMSNorm: torch's, turbo_nn's as dispatched and on each backend."""
    found = peers.variants(session, "rms_norm", LEAST_BF16_SNR)
    for rows, width in NORMS[session.size]:
        x, grad_y = tensors(session, rows, (width, width))
        weight = torch.randn(width, device=session.device).bfloat16()
        options = {"eps": EPS, "device": session.device, "dtype": torch.bfloat16}
        plain, ours = (functools.partial(cls, width, **options) for cls in (nn.RMSNorm, turbo_nn.RMSNorm))
        variants = [
            Variant("torch.nn.RMSNorm", plain, LEAST_BF16_SNR),
            Variant("turbo_nn.RMSNorm", ours, LEAST_BF16_SNR),
            *(Variant(name, ours, LEAST_BF16_SNR, pin=name) for name in REGISTRY["rms_norm_fwd"].order),
            *found,
        ]
        for part in ("forward", "step"):
            measure = functools.partial(_measure_norm, session, (x, grad_y, weight), part)
            session.compare("rms_norm", f"{rows}x{width} {part}", variants, measure)


def _measure_norm(
    session: Session, given: tuple[Tensor, Tensor, Tensor], part: str, variant: Variant
) -> dict:
    x, grad_y, weight = given
    expected = _norm_in_fp32(x, grad_y, weight)
    grad_y = grad_y.clone() if variant.peer else grad_y  # Liger writes its own gradient over it
    layer = Layer(variant.build(x, EPS) if variant.peer else variant.build(), x, grad_y)
    with torch.no_grad():
        layer.weight.copy_(weight)
    pinned = turbo_ops.force(rms_norm=variant.pin) if variant.pin else contextlib.nullcontext()
    with pinned:
        found = snr_of(layer.results(), expected, variant.least_snr)
        run, leaves = (layer.forward, ()) if part == "forward" else (layer.step, layer.leaves)
        ms = session.ms(run, drop=leaves)
        found["device_ms"] = session.device_ms(functools.partial(_fresh, run, leaves))
    # x read and y written; then grad_y and x read, dx written
    moved = x.numel() * x.element_size() * (2 if part == "forward" else 5)
    if isinstance(layer.module, turbo_nn.RMSNorm):
        found["backend"] = variant.pin or turbo_ops.rms_norm_backend(weight)
    return {"ms": ms, **found, **session.rate(ms, "copy", bytes_moved=moved)}


def _fresh(run: Callable[[], object], leaves: tuple[Tensor, ...]) -> None:
    for leaf in leaves:
        leaf.grad = None
    run()


def _norm_in_fp32(x: Tensor, grad_y: Tensor, weight: Tensor) -> Results:
    leaves = x.detach().float().requires_grad_(), weight.float().requires_grad_()
    y = F.rms_norm(leaves[0], weight.shape, leaves[1], EPS)
    return (y.detach(), *torch.autograd.grad(y, leaves, grad_y.float()))
