"""Takes even rows only."""

import torch
from torch import Tensor

from toy.op import toy_add_, toy_scale

CALLS: list[str] = []


def refuses(x: Tensor, factor: float, dtype: torch.dtype) -> str | None:
    return f"rows must be even, there are {x.shape[0]}" if x.shape[0] % 2 else None


@toy_scale.backend("triton", refuses=refuses)
def _(x: Tensor, factor: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    CALLS.append("triton")
    return (x.float() * factor).to(dtype)


@toy_add_.backend("triton")
def _(out: Tensor, x: Tensor) -> None:
    CALLS.append("triton")
    out.add_(x)
