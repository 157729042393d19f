"""Delayed scaling: which amax gives a scale, when a history moves on, what is saved of it."""

import copy
import io

import pytest
import torch
import torch.multiprocessing as mp
from numerics import snr_db
from torch import nn
from torch.utils.checkpoint import checkpoint

import turbo_nn
import turbo_ops
from turbo_ops import delayed

RECIPE = turbo_nn.RECIPES["fp8_delayed"]
LIMIT = 448.0


@pytest.fixture(autouse=True)
def reference(device: torch.device):
    pins = {} if device.type == "cuda" else {"quantize": "reference", "gemm": "reference"}
    with turbo_ops.force(**pins):
        yield


def layer(device: torch.device) -> turbo_nn.Linear:
    return turbo_nn.Linear(64, 32, bias=False, device=device, recipe="fp8_delayed")


def train(module: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    y = module(x)
    y.square().mean().backward()
    if optimizer:
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


def test_the_first_step_is_tensorwise(device) -> None:
    module, x = layer(device), torch.randn(16, 64, device=device)
    twin = copy.deepcopy(module)
    twin.recipe = turbo_nn.RECIPES["fp8_tensorwise"]
    assert torch.equal(train(module, x), train(twin, x))
    assert torch.equal(module.weight.grad, twin.weight.grad)
    history = module.amax_history
    assert history[:2, 0].tolist() == [x.abs().max().item(), module.weight.abs().max().item()]
    assert history[2, 0] > 0
    assert not history[:, 1:].any()


def test_the_largest_of_sixteen_steps_gives_the_scale(device) -> None:
    module = layer(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    sizes = [1.0, 5.0, 2.0, *[1.0] * 16]
    for step, size in enumerate(sizes):
        x = torch.full((16, 64), size, device=device)
        window = max([*sizes[:step]][-16:], default=0.0)
        assert module.amax_history[0, 1:].max() == window
        train(module, x, optimizer)
    assert module.amax_history[0, 1:].max() == 1.0, "5.0 is 17 steps ago"


def test_the_scale_is_of_the_past_and_what_is_larger_saturates(device) -> None:
    history = turbo_ops.new_history(4, device)
    history[1, 2], history.known = 2.0, frozenset((1,))
    x = torch.tensor([[1.0, -2.0, 3.0, float("inf")]], device=device)
    how = turbo_ops.Cast("e4m3", (0, 0), history=4)
    data, scale = turbo_ops.cast(x, how, turbo_ops.casting.AmaxRow(history, 1))
    assert scale.item() == pytest.approx(2.0 / LIMIT)
    assert data.float()[0, :3].tolist() == [LIMIT / 2, -LIMIT, LIMIT]
    assert data.float()[0, 3].isnan(), "not finite is seen"
    assert history[1, 0].isnan()


def test_what_is_not_finite_never_becomes_a_scale(device) -> None:
    module = layer(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    train(module, torch.ones(16, 64, device=device), optimizer)
    x = torch.ones(16, 64, device=device)
    x[3, 4] = float("nan")
    assert module(x)[3].isnan().all()
    module.zero_grad()
    optimizer.step()
    assert module.amax_history.isfinite().all()
    assert train(module, torch.ones(16, 64, device=device)).isfinite().all()


def test_each_row_begins_when_something_was_noted_in_it(device) -> None:
    """A forward alone teaches nothing about gradients; their first cast goes by their own amax."""
    module, x = layer(device), torch.randn(16, 64, device=device)
    with torch.no_grad():
        module(x)
    delayed.step()
    assert module.amax_history.known == {0, 1}
    twin = copy.deepcopy(module)
    twin.recipe = turbo_nn.RECIPES["fp8_tensorwise"]
    train(module, x)
    train(twin, x)
    assert torch.equal(module.weight.grad, twin.weight.grad)
    delayed.step()
    assert module.amax_history.known == {0, 1, 2}


def test_micro_batches_of_a_step_have_one_scale(device) -> None:
    module = layer(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    train(module, torch.ones(16, 64, device=device), optimizer)
    x = torch.randn(16, 64, device=device)
    first = train(module, x)
    train(module, 100 * x)
    assert torch.equal(train(module, x), first)
    assert module.amax_history[0, 0] == (100 * x).abs().max()


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpoint", "reentrant"])
def test_a_recomputed_forward_has_the_scales_of_the_first(reentrant: bool, device) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(layer(device), nn.ReLU(), turbo_nn.Linear(32, 8, device=device, recipe=RECIPE))
    again = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, again)]
    for _ in range(4):
        x = torch.randn(16, 64, device=device, requires_grad=True)
        plain(x).square().mean().backward()
        checkpoint(again, x, use_reentrant=reentrant).square().mean().backward()
        for ours, theirs in zip(plain.parameters(), again.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_it_trains_as_tensorwise_does(device) -> None:
    losses = {}
    for recipe in ("fp8_tensorwise", "fp8_delayed"):
        torch.manual_seed(0)
        target = torch.randn(32, 64).to(device)
        model = turbo_nn.Linear(64, 32, bias=False, device=device, recipe=recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(200):
            x = torch.randn(64, 64).to(device)
            loss = (model(x) - x @ target.t()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[recipe] = loss.item()
    assert losses["fp8_tensorwise"] < 0.2, "of 64 at the start"
    assert losses["fp8_delayed"] < 1.5 * losses["fp8_tensorwise"]


def test_another_optimizers_step_moves_nothing(device) -> None:
    module, other = layer(device), nn.Linear(2, 2, device=device)
    train(module, torch.randn(16, 64, device=device), torch.optim.SGD(module.parameters(), lr=0.0))
    before = module.amax_history.clone()
    train(other, torch.randn(3, 2, device=device), torch.optim.SGD(other.parameters(), lr=0.1))
    assert torch.equal(module.amax_history, before)


def test_state_is_saved_and_restored(device) -> None:
    model = nn.Sequential(layer(device), nn.ReLU(), nn.Linear(32, 4, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, torch.randn(16, 64, device=device), optimizer)
    assert set(model.state_dict()) == {"0.weight", "2.weight", "2.bias"}
    file = io.BytesIO()
    torch.save(turbo_nn.RecipeState(model).state_dict(), file)
    file.seek(0)
    twin = nn.Sequential(layer(device), nn.ReLU(), nn.Linear(32, 4, device=device))
    twin.load_state_dict(model.state_dict())
    turbo_nn.RecipeState(twin).load_state_dict(torch.load(file))
    x = torch.randn(16, 64, device=device)
    assert torch.equal(train(twin, x), train(model, x))
    with pytest.raises(ValueError, match=r"'2' is no turbo_nn.Linear, the state \(3, 17\): patch the model"):
        turbo_nn.load_recipe_state(model, {"2": torch.zeros(3, 17)})
    with pytest.raises(ValueError, match=r"'0' has a recipe with a history of 16 steps, the state \(3, 5\)"):
        turbo_nn.load_recipe_state(model, {"0": torch.zeros(3, 5)})


def test_histories_follow_copies_and_end_with_unpatch(device) -> None:
    model = nn.Sequential(nn.Linear(64, 32, device=device))
    turbo_nn.patch(model, "fp8_delayed", convert_small=True)
    x = torch.randn(16, 64, device=device)
    train(model, x, torch.optim.SGD(model.parameters(), lr=0.0))
    twin = copy.deepcopy(model)
    train(twin, x, torch.optim.SGD(twin.parameters(), lr=0.0))
    assert (twin[0].amax_history[0, 1:3] > 0).all()
    assert model[0].amax_history[0, 2] == 0
    turbo_nn.unpatch(model)
    assert "amax_history" not in vars(model[0])


def test_histories_follow_a_move_and_keep_fp32(device) -> None:
    model = turbo_nn.Linear(64, 32, device="meta", recipe="fp8_delayed")
    delayed.step()  # somebody else's optimizer
    assert model.amax_history.is_meta
    model = model.to_empty(device=device)
    nn.init.normal_(model.weight)
    x = torch.randn(16, 64, device=device)
    train(model, x, torch.optim.SGD(model.parameters(), lr=0.0))
    before = model.amax_history
    model.bfloat16()
    assert model.amax_history is before
    assert before.dtype == torch.float32
    assert before[0, 1] == x.abs().max()


def test_a_recipe_that_is_set_later_gets_a_history(device) -> None:
    module = turbo_nn.Linear(64, 32, device=device, recipe="fp8_blockwise")
    module.recipe = RECIPE
    train(module, torch.randn(16, 64, device=device))
    assert module.amax_history.shape == (3, 17)


def test_a_cast_without_its_history_is_refused(device) -> None:
    x, weight = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match=r"a history of 16 steps needs one: use turbo_nn.Linear"):
        turbo_ops.linear(x, weight, None, RECIPE)
    with pytest.raises(ValueError, match=r"Cast: history 4 with block \(1, 0\)"):
        turbo_ops.Cast("e4m3", (1, 0), history=4)
    with pytest.raises(ValueError, match=r"Cast.history=-1"):
        turbo_ops.Cast("e4m3", (0, 0), history=-1)


def test_compiled_it_casts_forward_by_the_history(device) -> None:
    """Gradients go by their own amax there: a compiled backward cannot write what forward was given."""
    eager = layer(device)
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for module, run in ((eager, eager), (compiled, call)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        torch.manual_seed(5)
        for _ in range(3):
            y = run(torch.randn(16, 64, device=device))
            y.square().mean().backward()
            optimizer.step()
        module.y = y
    assert torch.equal(compiled.y, eager.y)
    assert snr_db(compiled.weight.grad, eager.weight.grad) > 20
    assert torch.equal(compiled.amax_history[:2], eager.amax_history[:2])
    assert not compiled.amax_history[2].any()


def _rank(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    turbo_ops.reduce_amax_over(torch.distributed.group.WORLD)
    history = turbo_ops.new_history(4, torch.device("cpu"))
    history[0, 0] = 1.0 + rank
    history[1, 0] = float("nan") if rank else 3.0
    delayed.step()
    assert history[0, 1] == 2.0, "the largest of both ranks"
    assert history[1, 1] == 0.0, "NaN on one rank is NaN on both, and dropped"
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_amax_is_reduced_over_the_group(tmp_path) -> None:
    mp.spawn(_rank, (str(tmp_path / "store"),), nprocs=2)
