"""The only file that talks to other ranks. Nothing here runs inside a contract."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


def agree(key: str, choice: str) -> str:
    """The value that the first rank proposed for `key`; `choice` itself where there is one process.

    A compare-and-set on the process group's store, not a collective: ranks may ask in any order, or never.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return choice
    store = distributed_c10d._get_default_store()
    return store.compare_set(f"turbo_ops/{key}", "", choice).decode()


def agreed(key: str) -> str | None:
    """What the ranks agreed on for `key` so far, if anything."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = distributed_c10d._get_default_store()
    return store.get(f"turbo_ops/{key}").decode() if store.check([f"turbo_ops/{key}"]) else None


def all_reduce_max(values: Tensor, group: Any) -> Tensor:
    """The largest value of any rank, NaN above all."""
    bits = values.view(torch.int32)  # magnitudes order like their bits; collectives may drop NaN
    dist.all_reduce(bits, dist.ReduceOp.MAX, group)
    return bits.view(torch.float32)
