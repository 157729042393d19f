"""A step of a layer is captured as it is, and a replay sees new inputs and new weights."""

import pytest
import torch
from torch import nn

import turbo_nn
import turbo_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")


WITHOUT_EXPERTS = ("fp8_delayed", "mxfp8")


@pytest.mark.parametrize("recipe", [*turbo_nn.RECIPES])
def test_a_replay_equals_eager(recipe: str, device: torch.device) -> None:
    layer = turbo_nn.Linear(512, 256, bias=False, device=device, dtype=torch.bfloat16, recipe=recipe)
    replays_as_eager(layer, layer.weight, device)


@pytest.mark.parametrize("recipe", [name for name in turbo_nn.RECIPES if name not in WITHOUT_EXPERTS])
def test_a_mixture_of_experts_routes_anew_in_a_replay(recipe: str, device: torch.device) -> None:
    """Other tokens go to other experts: nothing of where groups end is on the host."""
    moe = turbo_nn.MoE(512, 128, 8, 2, device, torch.bfloat16, recipe=recipe)
    replays_as_eager(moe, moe.experts.gate_up_proj, device)


def replays_as_eager(layer: nn.Module, weight: nn.Parameter, device: torch.device) -> None:
    x = torch.randn(384, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(layer(x))

    def step() -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, [x, weight], grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # the third finds casts that are kept
            step()
        turbo_ops.delayed.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        weight.mul_(1.5)
    graph.replay()
    replayed = [result.clone() for result in captured]
    for ours, theirs in zip(replayed, step(), strict=True):
        assert torch.equal(ours, theirs)
