"""Between the linear layers: act(gate) * up, rotations, and the head fused with its loss, beside peers."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import turbo_nn
import turbo_ops
from benchmarks import peers
from benchmarks.layers import LEAST_BF16_SNR, least_snr, snr_of
from benchmarks.session import Session, Variant

SWIGLU = {"bench": (8192, 14336), "test": (16, 64)}
ROPE = {"bench": (2, 4096, 32, 8, 128), "test": (2, 8, 4, 2, 16)}  # batch, positions, heads, key heads, width
LOSS = {"bench": (8192, 4096, 128256), "test": (16, 32, 300)}  # tokens, width, classes
COMPARED = 4096  # rows of a gradient: a copy of all would count as memory of the next variant
HEADS = ("bf16", "fp8_tensorwise", "fp8_blockwise")


@dataclass
class Case:
    """Leaves to differentiate, the results' gradients, what a step moves or computes, and what is right."""

    leaves: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    rate: dict
    given: tuple[Tensor, ...] = ()  # what a peer is built from
    expected: tuple[Tensor, ...] | None = None  # of the first variant
    in_graph: bool = True  # also timed in a CUDA graph
    restore: Callable[[], object] = lambda: None  # leaves that a variant wrote over


def measure_swiglu(session: Session) -> None:
    """Step of silu(gate) * up, and the most memory that it takes."""
    shape = SWIGLU[session.size]
    variants = [
        Variant("torch", lambda: peers.Calls(lambda gate, up: F.silu(gate) * up), LEAST_BF16_SNR),
        Variant("turbo_ops.swiglu", lambda: peers.Calls(turbo_ops.swiglu), LEAST_BF16_SNR),
        Variant("turbo_ops.swiglu consume", lambda: peers.Calls(consuming), LEAST_BF16_SNR),
        *peers.variants(session, "swiglu", LEAST_BF16_SNR),
    ]
    leaves = _drawn(session, shape, shape)

    def restore() -> None:
        for leaf, fresh in zip(leaves, _drawn(session, shape, shape, learn=False), strict=True):
            leaf.data.copy_(fresh)

    moved = 2 * 8 * leaves[0].numel()  # gate, up read, y written; grad_y, gate, up read, two written
    case = Case(leaves, (torch.randn_like(leaves[0]),), {"of": "copy", "bytes_moved": moved}, restore=restore)
    measure = functools.partial(_measure, session, case)
    session.compare("swiglu", "{}x{} step".format(*shape), variants, measure)


def consuming(gate: Tensor, up: Tensor) -> Tensor:
    """With the gradients written over gate and up, as in `turbo_nn.GatedMLP` and as Liger does."""
    return turbo_ops.swiglu(gate, up, consume=True)


def measure_rope(session: Session) -> None:
    """Step of the rotation of queries and keys, as a projection leaves them: [B, S, H, D] transposed."""
    batch, length, heads, key_heads, width = ROPE[session.size]
    halves = _drawn(session, (1, length, width // 2), (1, length, width // 2), learn=False)
    cos, sin = (torch.cat((half, half), -1) for half in halves)  # as all models have them; Liger reads one
    q, k = _drawn(session, *((batch, length, h, width) for h in (heads, key_heads)), learn=False)
    leaves = q.transpose(1, 2).requires_grad_(), k.transpose(1, 2).requires_grad_()
    variants = [
        Variant("torch", lambda: peers.Calls(functools.partial(_rotated, cos, sin)), LEAST_BF16_SNR),
        Variant(
            "turbo_ops.rope", lambda: peers.Calls(lambda q, k: turbo_ops.rope(q, k, cos, sin)), LEAST_BF16_SNR
        ),
        *peers.variants(session, "rope", LEAST_BF16_SNR),
    ]
    moved = 2 * 2 * 2 * (q.numel() + k.numel())  # bf16, read and written, forward and backward
    grads = tuple(torch.randn_like(leaf) for leaf in leaves)
    case = Case(leaves, grads, {"of": "copy", "bytes_moved": moved}, (cos, sin))
    name = f"{batch}x{length}x({heads}+{key_heads})x{width} step"
    session.compare("rope", name, variants, functools.partial(_measure, session, case))


def _rotated(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers' Llama."""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def measure_loss(session: Session) -> None:
    """Step of hidden @ weight.T and its mean cross-entropy, and the most memory that it takes."""
    tokens, width, classes = LOSS[session.size]
    leaves = _drawn(session, (tokens, width), (classes, width))
    with torch.no_grad():
        leaves[1].mul_(width**-0.5)
    labels = torch.randint(classes, (tokens,), device=session.device)
    variants = [*_losses(labels), *peers.variants(session, "loss", LEAST_BF16_SNR)]
    rate = {"of": "bf16", "flops": 6 * tokens * width * classes}
    case = Case(leaves, (torch.ones((), device=session.device),), rate, (labels,), in_graph=False)
    measure = functools.partial(_measure, session, case)
    session.compare("loss", f"{tokens}x{width}x{classes} step", variants, measure)


def _losses(labels: Tensor) -> Iterator[Variant]:
    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    def fused(recipe: turbo_nn.Recipe, hidden: Tensor, weight: Tensor) -> Tensor:
        return turbo_ops.linear_cross_entropy(hidden, weight, labels, recipe=recipe)

    yield Variant("torch", lambda: peers.Calls(plain), LEAST_BF16_SNR)
    for name in HEADS:
        recipe = turbo_nn.RECIPES[name]
        build = functools.partial(peers.Calls, functools.partial(fused, recipe))
        yield Variant(f"linear_cross_entropy {name}", build, least_snr(recipe) - 3 * recipe.casts)


def _drawn(session: Session, *shapes: tuple[int, ...], learn: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(s, device=session.device).bfloat16().requires_grad_(learn) for s in shapes)


def _measure(session: Session, case: Case, variant: Variant) -> dict:
    """Right first: the result and both gradients by SNR against the first variant's."""
    module = variant.build(*case.given) if variant.peer else variant.build()

    def step() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Results and gradients; a leaf's own `.grad` would be a copy of one that was written over it."""
        outputs = module(*case.leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs, torch.autograd.grad(outputs, case.leaves, case.grads)

    case.restore()
    outputs, grads = step()
    ours = torch.cat([y.detach().flatten() for y in outputs]), *(grad[:COMPARED].clone() for grad in grads)
    case.expected = case.expected or ours
    found = snr_of(ours, case.expected, variant.least_snr)
    del ours, outputs, grads
    ms = session.ms(step)
    found |= session.rate(ms, **case.rate)
    if case.in_graph:
        found["device_ms"] = session.device_ms(step)
    found["peak_gib"] = session.peak_gib(step)
    return {"ms": ms, **found}
