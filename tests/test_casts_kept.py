"""Casts that are kept, of weights until they change and of activations while they live; main_grad."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from numerics import snr_db
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import turbo_nn
import turbo_ops
from turbo_ops import weight_cache
from turbo_ops.dispatch import Op

RECIPE = turbo_nn.RECIPES["fp8_blockwise"]


@pytest.fixture(autouse=True)
def reference(environment):
    turbo_ops.reset()
    with turbo_ops.force(quantize="reference", gemm="reference"):
        yield


@pytest.fixture
def casts(monkeypatch) -> list[tuple]:
    """Shapes of the tensors that were cast."""
    seen, run = [], Op._run

    def spy(op: Op, *args: object):
        if op.name.startswith("quantize"):
            seen.append(tuple(args[0].shape))
        return run(op, *args)

    monkeypatch.setattr(Op, "_run", spy)
    return seen


def layer(recipe: str = "fp8_blockwise", width: int = 48) -> turbo_nn.Linear:
    torch.manual_seed(1)
    return turbo_nn.Linear(width, 32, recipe=recipe)


def outcome(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients, bit for bit comparable."""
    x = x.detach().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))]


def uncached(module: nn.Module, x: Tensor) -> list[Tensor]:
    turbo_ops.weights_changed()
    return outcome(module, x)


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def _step(optimizer: type, **options: object) -> Callable:
    def change(module: nn.Linear) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer(module.parameters(), lr=0.5, **options).step()

    return change


def _data(module: nn.Linear) -> None:
    """A to B to A: the second new tensor may land where the first was."""
    for _ in range(2):
        module.weight.data = module.weight.data * 1.5


CHANGES = {
    "SGD": _step(torch.optim.SGD, foreach=False),
    "SGD foreach": _step(torch.optim.SGD, foreach=True),
    "SGD fused": _step(torch.optim.SGD, fused=True),
    "AdamW": _step(torch.optim.AdamW, foreach=False),
    "AdamW foreach": _step(torch.optim.AdamW, foreach=True),
    "AdamW fused": _step(torch.optim.AdamW, fused=True),
    "Adafactor": _step(torch.optim.Adafactor),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "load_state_dict, assigned": lambda m: m.load_state_dict(
        {k: v * 2 for k, v in m.state_dict().items()}, assign=True
    ),
    "copy_": lambda m: torch.no_grad()(m.weight.copy_)(m.weight * 2),
    "new data": _data,
    "another parameter": lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach() * 2)),
    "dtype and back": lambda m: m.bfloat16().float(),
    "data written, and said": lambda m: (m.weight.data.mul_(2), turbo_nn.weights_changed(m)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changed_is_cast_again(change: str) -> None:
    module, x = layer(), torch.randn(8, 48)
    before = [outcome(module, x) for _ in range(3)]  # the third finds the casts of the second
    assert same(before[1], before[0])
    assert same(before[2], before[0])
    before = before[2]
    CHANGES[change](module)
    after = outcome(module, x)
    assert not torch.equal(after[0], before[0])
    assert same(after, uncached(module, x))


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8"])
def test_a_weight_is_cast_once_a_step(recipe: str, casts) -> None:
    """From the second micro-batch on: the first one cannot know that others come."""
    module, counts = layer(recipe), []
    for micro_batches in (3, 3, 1, 1, 2):
        casts.clear()
        for _ in range(micro_batches):
            outcome(module, torch.randn(8, 48))
        counts.append(casts.count((32, 48)))
        _step(torch.optim.SGD)(module)
    assert counts == [2, 1, 1, 1, 2]


def test_one_forward_a_step_keeps_nothing() -> None:
    module = layer()
    for _ in range(2):
        outcome(module, torch.randn(8, 48))
        (entry,) = weight_cache._ENTRIES.values()
        assert entry.casts is None
        assert entry.storage is None
        _step(torch.optim.SGD)(module)


def test_forwards_without_gradients_do_not_look(casts) -> None:
    module, x = layer(), torch.randn(8, 48)
    outcome(module, x)
    outcome(module, x)
    module.weight.data.mul_(2)  # nothing that torch counts
    with torch.no_grad():
        unseen = module(x)
    assert torch.equal(unseen, uncached(module, x)[0])


def test_a_frozen_weight_keeps_one_orientation(casts) -> None:
    module = layer().requires_grad_(False)
    x = torch.randn(8, 48, requires_grad=True)
    for _ in range(3):
        module(x).sum().backward()
    (entry,) = weight_cache._ENTRIES.values()
    assert entry.casts[1] is None
    assert casts.count((32, 48)) == 2
    assert casts.count((48, 32)) == 3, "backward casts the other from the weight"


def test_the_check_finds_a_hidden_write(environment) -> None:
    environment.setenv("TURBO_CHECK_CACHE", "1")
    turbo_ops.reset()
    module, x = layer(), torch.randn(8, 48)
    outcome(module, x)
    outcome(module, x)
    module.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match=r"is stale.*turbo_nn.weights_changed\(model\)"):
        outcome(module, x)


def test_the_cache_can_be_off(environment, casts) -> None:
    environment.setenv("TURBO_WEIGHT_CACHE", "0")
    turbo_ops.reset()
    module = layer()
    for _ in range(4):
        outcome(module, torch.randn(8, 48))
    assert casts.count((32, 48)) == 4
    environment.setenv("TURBO_WEIGHT_CACHE", "no")
    with pytest.raises(ValueError, match="TURBO_WEIGHT_CACHE='no': use 0 or 1"):
        turbo_ops.reset()
    environment.delenv("TURBO_WEIGHT_CACHE")


def test_casts_die_with_their_weight() -> None:
    module = layer()
    for _ in range(2):
        outcome(module, torch.randn(8, 48))
    (entry,) = weight_cache._ENTRIES.values()
    data = weakref.ref(entry.casts[0].data)
    del entry, module
    gc.collect()
    assert not weight_cache._ENTRIES
    assert data() is None


def test_casts_are_in_no_pickle_and_no_copy() -> None:
    module = layer()
    plain = len(pickle.dumps(module))
    for _ in range(2):
        outcome(module, torch.randn(8, 48))
    assert len(pickle.dumps(module)) == plain
    assert not vars(copy.deepcopy(module).weight)


def test_a_lora_merge_between_steps() -> None:
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(48, 32))
    turbo_nn.patch(base, "fp8_blockwise")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    x = torch.randn(8, 48)
    for _ in range(2):
        model(x).sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    model.merge_adapter()
    merged = model(x)
    turbo_ops.weights_changed()
    assert torch.equal(merged, model(x))


class Attention(nn.Module):
    """Three layers on one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.q, self.k, self.v = layer(), layer(), layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.q(x) * self.k(x) + self.v(x)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_a_shared_activation_is_cast_once(reentrant: bool | None, casts) -> None:
    model = Attention()
    x = torch.randn(2, 5, 48, requires_grad=True)

    def run(shared: bool) -> list[Tensor]:
        if not shared:
            model.norm.register_forward_hook(lambda module, args, y: y)
            for name in ("q", "k", "v"):  # each sees a tensor of its own
                getattr(model, name).register_forward_pre_hook(lambda module, args: (args[0] + 0,))
        y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        model.zero_grad(set_to_none=True)
        x.grad = None
        y.square().sum().backward()
        return [y, x.grad, *(parameter.grad for parameter in model.parameters())]

    together = run(shared=True)
    activations = casts.count((10, 48))
    # once a forward that records, recomputed ones included; the reentrant kind's first forward does not
    assert activations == {None: 1, False: 2, True: 3 + 1}[reentrant]
    apart = run(shared=False)
    assert casts.count((10, 48)) - activations == (3 if reentrant is None else 6)
    assert torch.equal(together[0], apart[0])
    for ours, theirs in zip(together[1:], apart[1:], strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=1e-6
        )  # x's three gradients add up in any order


def test_an_activation_written_in_between_is_cast_again(casts) -> None:
    first, second = layer(), layer()
    x = torch.randn(8, 48, requires_grad=True) * 1.0
    alone = second(x.detach() * 2)
    first(x)
    x.mul_(2)
    assert torch.equal(second(x), alone)


def test_casts_of_an_activation_die_with_it() -> None:
    module = layer()
    x = torch.randn(8, 48, requires_grad=True) * 1.0
    y = module(x)
    data = weakref.ref(x._turbo_casts[1].data)
    del x
    gc.collect()
    assert data() is None
    y.sum().backward()


def test_a_callers_buffer_is_not_trusted(casts) -> None:
    """A leaf may be written by what torch does not count: a graph's replay, a loader's thread."""
    module, x = layer(), torch.randn(8, 48, requires_grad=True)
    module(x)
    module(x)
    assert casts.count((8, 48)) == 2


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensorwise", "fp8_rowwise_hp_wgrad", "fp8_blockwise"])
def test_wgrad_sums_into_main_grad(recipe: str) -> None:
    module = turbo_nn.Linear(48, 32, dtype=torch.bfloat16, recipe=recipe)
    expected = torch.zeros(32, 48)
    module.weight.main_grad = torch.zeros(32, 48)
    for _ in range(3):
        x = torch.randn(8, 48, dtype=torch.bfloat16)
        module(x).sum().backward()
        expected += torch.ones(32, 8) @ x.float()
    assert module.weight.grad is None
    assert snr_db(module.weight.main_grad, expected) > 25
    module.weight.grad_added_to_main_grad, hooks = False, []
    module.weight.register_post_accumulate_grad_hook(lambda parameter: hooks.append(parameter.grad.shape))
    module(x).sum().backward()
    assert module.weight.grad_added_to_main_grad
    assert hooks == [(32, 48)], "Megatron's hooks run on a placeholder"


@pytest.mark.parametrize(
    "main_grad", [torch.zeros(3), torch.zeros(32, 48, dtype=torch.int32)], ids=["shape", "type"]
)
def test_a_main_grad_that_cannot_hold_the_sum_is_refused(main_grad: Tensor) -> None:
    module = layer()
    module.weight.main_grad = main_grad
    with pytest.raises(ValueError, match=r"main_grad \(.*\) of torch.* must have the weight's \(32, 48\)"):
        module(torch.randn(8, 48)).sum().backward()
