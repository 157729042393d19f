"""Takes everything but empty tensors."""

import torch
from torch import Tensor

from toy.backend_triton import CALLS
from toy.op import toy_scale


def refuses(x: Tensor, factor: float, dtype: torch.dtype) -> str | None:
    return None if x.numel() else "x is empty"


@toy_scale.backend("blaslt", refuses=refuses)
def _(x: Tensor, factor: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    CALLS.append("blaslt")
    return (x.float() * factor).to(dtype)
