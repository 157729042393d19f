"""What the host pays: an eager step so small that the device does not count, and one dispatch."""

import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.layers import LEAST_PEER_SNR, Layer, checked_linear, linear_variants, plain_linear
from benchmarks.session import Session, Variant, against
from turbo_ops.dispatch import REGISTRY, op

SHAPE = (32, 256, 256)  # tokens, in, out


def measure_host(session: Session) -> None:
    """`us` of a step by every recipe and `cost`, the median over the rounds of its ratio to nn.Linear's."""
    base = plain_linear(session, SHAPE[0], SHAPE[1:])
    found = peers.variants(session, "linear", LEAST_PEER_SNR, say=False)
    eager = [peer for peer in found if "compiled" not in peer.name]
    variants = [*linear_variants(base, emulated_mx=True), *eager]
    case = "step {}x{}x{}".format(*SHAPE)
    layers: dict[str, Layer] = {}
    rows = session.compare("host", case, variants, functools.partial(_check, base, layers))
    times = dict(zip(layers, session.host_us([layer.dropped_step for layer in layers.values()]), strict=True))
    plain = times.get(variants[0].name)
    for row in rows:
        taken = times.get(row["variant"])
        if taken and plain:
            us = statistics.median(taken)
            costs = [ours / theirs for ours, theirs in zip(taken, plain, strict=True)]
            row |= {"us": us, "ms": us / 1e3, "cost": statistics.median(costs)}
            row |= against(row["ms"], variants[0].name, statistics.median(plain) / 1e3)
    row = {
        "level": "dispatch",
        "name": "dispatch",
        "case": "4 tensors, 7 arguments",
        "variant": "choose, run",
    }
    call = returns_at_once(session.device)
    session.measure(row, lambda: {"us": statistics.median(session.host_us([call], 600)[0])})


def _check(base: Layer, layers: dict[str, Layer], variant: Variant) -> dict:
    layers[variant.name], found = checked_linear(base, variant)
    return {"ms": float("inf"), **found}


def returns_at_once(device: torch.device) -> Callable[[], object]:
    """A call of an op with gemm's signature, whose backend does nothing."""
    tensors = [torch.zeros(16, 16, device=device) for _ in range(4)]

    def nothing(
        a: Tensor,
        b: Tensor,
        a_scale: Tensor | None = None,
        b_scale: Tensor | None = None,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        fast_accum: bool = True,
    ) -> Tensor:
        return a

    nothing.__module__ = "benchmarks.dispatch.op"  # an op's family is the folder of its module
    contract = op("triton")(nothing)
    del REGISTRY[contract.name]
    contract.backend("triton")(nothing)
    return lambda: contract(*tensors, None, torch.bfloat16, True)
