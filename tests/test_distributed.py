"""Patched models on several ranks: FSDP2 with more ranks than rows, DistributedDataParallel."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import turbo_nn
import turbo_ops
from turbo_ops import weight_cache
from turbo_ops.arch import FP8_DTYPES

RANKS = 2


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))


def _train(model: nn.Module, rank: int | None, steps: int = 3) -> None:
    """SGD on the mean over two batches: both here, or one on each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for _ in range(steps):
        batches = [torch.randn(8, 32) for _ in range(RANKS)]
        for batch in batches if rank is None else [batches[rank]]:
            loss = model(batch).square().mean()
            (loss / RANKS if rank is None else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _keeps_no_weights(model: nn.Module) -> None:
    """FSDP frees a weight after its forward: casts that stayed would be the whole model on each rank."""
    saved: list[tuple] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append((t.dtype, t.numel())) or t, lambda t: t
    ):
        for _ in range(2):
            loss = model(torch.randn(8, 32)).square().mean()
    loss.backward()
    assert not any(entry.casts for entry in weight_cache._ENTRIES.values())
    fp8 = [size for dtype, size in saved if dtype in FP8_DTYPES]
    assert sorted(set(fp8)) == [8 * 16, 8 * 32], "inputs alone, not the 16x32 of a weight"


def _rank(rank: int, store: str, kind: str, recipe: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    turbo_ops.reduce_amax_over(dist.group.WORLD)  # each rank sees a batch, the lone model both
    with turbo_ops.force(quantize="reference", gemm="reference"):
        alone = _model()
        turbo_nn.patch(alone, recipe)
        together = copy.deepcopy(alone)
        _train(alone, None)
        if kind == "fsdp":
            mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
            for layer in (together[0], together[2]):
                fully_shard(layer, mesh=mesh)
            _train(fully_shard(together, mesh=mesh), rank)
            _keeps_no_weights(together)
        else:
            _train(nn.parallel.DistributedDataParallel(together), rank)
        for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(_full(ours), theirs, rtol=1e-4, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_blockwise", "fp8_delayed"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_sharded_model_trains_as_one(kind: str, recipe: str, tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path / "store"), kind, recipe), nprocs=RANKS)
