"""What the host pays: an eager step so small that the device does not count, and one dispatch."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.layers import LEAST_PEER_SNR, Layer, checked_linear, linear_variants, plain_linear
from benchmarks.session import Session, Variant
from turbo_ops.dispatch import REGISTRY, op

SHAPE = (32, 256, 256)  # tokens, in, out


def measure_host(session: Session) -> None:
    """`us` of a step by every recipe and `cost`, how many times nn.Linear's; `us` of a dispatch."""
    base = plain_linear(session, SHAPE[0], SHAPE[1:])
    found = peers.variants(session, "linear", LEAST_PEER_SNR, say=False)
    variants = [*linear_variants(base, emulated_mx=True), *found]
    case = "step {}x{}x{}".format(*SHAPE)
    for row in session.compare("host", case, variants, functools.partial(_measure_step, session, base)):
        row["cost"] = 1 / row["speedup"] if row.get("speedup") else None
    row = {
        "level": "dispatch",
        "name": "dispatch",
        "case": "4 tensors, 7 arguments",
        "variant": "choose, run",
    }
    session.measure(row, lambda: {"us": session.host_us(returns_at_once(session.device), 3000)})


def _measure_step(session: Session, base: Layer, variant: Variant) -> dict:
    layer, found = checked_linear(base, variant)
    us = session.host_us(layer.dropped_step)
    return {"us": us, "ms": us / 1e3, **found}


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
