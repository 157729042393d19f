"""A step of a layer is captured as it is, and a replay sees new inputs and new weights."""

import pytest
import torch

import turbo_nn
import turbo_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")


@pytest.mark.parametrize("recipe", [*turbo_nn.RECIPES])
def test_a_replay_equals_eager(recipe: str, device: torch.device) -> None:
    layer = turbo_nn.Linear(512, 256, bias=False, device=device, dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(384, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(384, 256, device=device, dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, [x, layer.weight], grad)]

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
        layer.weight.mul_(1.5)
    graph.replay()
    replayed = [result.clone() for result in captured]
    for ours, theirs in zip(replayed, step(), strict=True):
        assert torch.equal(ours, theirs)
