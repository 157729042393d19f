"""Two contracts of the toy family."""

import torch
from torch import Tensor

from turbo_ops.dispatch import op


@op("native", "triton", "blaslt")
def toy_scale(x: Tensor, factor: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """x times factor, as dtype."""
    return (x.float() * factor).to(dtype)


@op("triton", mutates=("out",))
def toy_add_(out: Tensor, x: Tensor) -> None:
    """out += x."""
    out.add_(x)
