"""The precision log: its numbers against a cast written out here, its rows, and what it must not disturb."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from models import Toy, patch, reference_on_cpu, tokens
from numerics import snr_db
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import turbo_nn
import turbo_ops
from turbo_nn import precision
from turbo_ops import Cast
from turbo_ops.arch import fp8_dtype

OPERANDS = ("input", "weight", "grad_output")


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


class Block(nn.Module):
    """[T, 96] -> [T, 96]; reentrant: how the inside is checkpointed, None for not at all."""

    def __init__(self, device, recipe: str = "fp8_blockwise", reentrant: bool | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.up = turbo_nn.Linear(96, 64, device=device, recipe=recipe)
        self.down = turbo_nn.Linear(64, 96, device=device, recipe=recipe)
        self.reentrant = reentrant

    def inside(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


def train(model: nn.Module, steps: int, device) -> list[Tensor]:
    """Gradients and parameters after some steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(256, 96, device=device, requires_grad=True)).square().mean().backward()
        optimizer.step()
    return [tensor for p in model.parameters() for tensor in (p.detach(), p.grad)]


def keys(file: Path) -> list[tuple]:
    return [(row["step"], row["layer"], row["operand"]) for row in precision.read(file)]


def every_operand(steps: tuple, layers: tuple = ("up", "down")) -> list[tuple]:
    return sorted((step, layer, name) for step in steps for layer in layers for name in OPERANDS)


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("recipe", ["fp8_blockwise", "fp8_delayed"])
def test_each_sampled_step_once_and_no_bit_changes(recipe, reentrant, device, tmp_path: Path) -> None:
    plain = train(Block(device, recipe, reentrant), 5, device)
    model, file = Block(device, recipe, reentrant), tmp_path / "new" / "precision.jsonl"
    with turbo_nn.precision_log(model, every=2, path=file):
        logged = train(model, 5, device)
    assert all(torch.equal(a, b) for a, b in zip(plain, logged, strict=True))
    assert sorted(keys(file)) == every_operand((0, 2, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    train(model, 3, device)
    assert len(keys(file)) == 18, "closed"


def test_what_counts_as_a_step(device, tmp_path: Path) -> None:
    model, file = Block(device), tmp_path / "precision.jsonl"
    x = torch.randn(8, 96, device=device)
    log = turbo_nn.precision_log(model, every=2, path=file)
    with torch.no_grad():
        model(x)
    first, second = model(x), model(x)
    model.eval()(x)
    (first.sum() + second.sum()).backward()  # the first step's gradients come after the second began
    model.train()(x=x)  # ends before its backward
    log.close()
    late = keys(file)
    assert sorted(late[:6]) == every_operand((0,))
    assert sorted(late[6:]) == [(2, layer, name) for layer in ("down", "up") for name in ("input", "weight")]
    log.close()


def test_a_layer_called_by_keyword(device, tmp_path: Path) -> None:
    layer, file = turbo_nn.Linear(96, 8, device=device, recipe="mxfp8"), tmp_path / "precision.jsonl"
    with turbo_nn.precision_log(layer, path=file):
        layer(x=torch.full((4, 96), 3.0, device=device)).sum().backward()
    rows = precision.read(file)
    assert [(row["layer"], row["operand"], row["amax"]) for row in rows][::2] == [
        ("", "input", 3.0),
        ("", "grad_output", 1.0),
    ]
    assert rows[0]["snr_db"] == pytest.approx(200.0), "3 is a value of E4M3"


def by_hand(x: Tensor, name: str, block: tuple[int, int], e8m0: bool = False) -> Tensor:
    """x [R, C] cast and back: one loop over blocks, in double but for the rounding."""
    dtype = fp8_dtype(name, x.device)
    limit, result = torch.finfo(dtype).max, torch.empty_like(x)
    r, c = (extent or whole for extent, whole in zip(block, x.shape, strict=True))
    for i in range(0, x.shape[0], r):
        for j in range(0, x.shape[1], c):
            part = x[i : i + r, j : j + c]
            scale = part.abs().max().double() / limit
            scale = torch.exp2(scale.log2().ceil()) if e8m0 else scale
            result[i : i + r, j : j + c] = (part / scale).float().to(dtype).double() * scale
    return result


CASTS = {  # of an input: along its rows, and the transpose's along its own
    "fp8_tensorwise": (("e4m3", (0, 0)), ("e4m3", (0, 0))),
    "fp8_rowwise": (("e4m3", (1, 0)), ("e4m3", (1, 0))),
    "fp8_blockwise": (("e4m3", (1, 128)), ("e4m3", (1, 128))),
    "mxfp8": (("e4m3", (1, 32), True), ("e4m3", (1, 32), True)),
}


def rough(device) -> Tensor:
    """[200, 300] of many magnitudes: whole rows near 1e-6, an outlier."""
    x = torch.randn(200, 300, device=device) * torch.logspace(-2, 2, 200, device=device)[:, None]
    x[::2] *= 1e-6
    x[17, 3] = 1000.0
    x[5, 5:50] = 0.0
    return x


@pytest.mark.parametrize("recipe", list(CASTS))
def test_numbers_are_those_of_a_cast_by_hand(recipe: str, device, tmp_path: Path) -> None:
    layer, x = turbo_nn.Linear(300, 8, device=device, recipe=recipe), rough(device)
    file = tmp_path / "precision.jsonl"
    with turbo_nn.precision_log(layer, path=file):
        layer(x).sum().backward()
    row = precision.read(file)[0]
    assert (row["recipe"], row["dtype"], row["amax"]) == (recipe, "e4m3", 1000.0)
    assert (row["nonfinite"], row["overflow"]) == (0.0, 0.0)
    expected = {}
    for name, (straight, across) in CASTS.items():
        cast = by_hand(x.double(), *straight)
        both = snr_db(cast, x), snr_db(by_hand(x.t().double(), *across), x.t())
        expected[name] = min(both)
        if name == recipe:
            lost = ((cast == 0) & (x != 0)).sum() / (x != 0).sum()
            assert (row["snr_db"], row["snr_t_db"]) == pytest.approx(both, abs=0.02)
            assert row["underflow"] == pytest.approx(lost.item(), abs=2e-4)
            assert (row["underflow"] > 0.4) == (recipe == "fp8_tensorwise"), "every other row vanishes"
    expected["fp8_rowwise_hp_wgrad"] = snr_db(by_hand(x.double(), "e4m3", (1, 0)), x)
    assert row["what_if"] == pytest.approx(expected, abs=0.02)


def test_operands_and_their_dtypes(device, tmp_path: Path) -> None:
    file = tmp_path / "precision.jsonl"
    layer = turbo_nn.Linear(96, 64, device=device, recipe="fp8_tensorwise")
    x, grad = torch.randn(32, 96, device=device), torch.randn(32, 64, device=device)
    with turbo_nn.precision_log(layer, path=file):
        (layer(x) * grad).sum().backward()
    tensors = {"input": x, "weight": layer.weight.detach(), "grad_output": grad}
    rows = {row["operand"]: row for row in precision.read(file)}
    assert {name: row["dtype"] for name, row in rows.items()} == {
        "input": "e4m3",
        "weight": "e4m3",
        "grad_output": "e5m2",
    }
    for name, tensor in tensors.items():
        assert rows[name]["amax"] == tensor.abs().max().item()
        cast = by_hand(tensor.double(), rows[name]["dtype"], (0, 0))
        assert rows[name]["snr_db"] == pytest.approx(snr_db(cast, tensor), abs=0.02)
    squares = by_hand(layer.weight.detach().double(), "e4m3", (128, 128))
    assert rows["weight"]["what_if"]["fp8_blockwise"] == pytest.approx(
        snr_db(squares, layer.weight), abs=0.02
    )


def test_a_layer_without_casts(device, tmp_path: Path) -> None:
    file = tmp_path / "precision.jsonl"
    layer, x = turbo_nn.Linear(96, 64, device=device), torch.randn(4, 96, device=device)
    x[0, :24] = float("inf")
    with turbo_nn.precision_log(layer, path=file):
        layer(x).sum().backward()
    row = precision.read(file)[0]
    assert [row[name] for name in ("recipe", "dtype", "snr_db", "snr_t_db", "underflow")] == ["bf16"] + [
        None
    ] * 4
    assert (row["amax"], row["nonfinite"]) == (None, 1 / 16)


def test_a_delayed_scale_overflows(device, tmp_path: Path) -> None:
    """Step 0 knows nothing and looks at its own amax; step 1 is cast by what step 0 saw."""
    file = tmp_path / "precision.jsonl"
    layer = turbo_nn.Linear(32, 64, device=device, recipe="fp8_delayed")
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    x = torch.linspace(-2, 2, 128 * 32, device=device).view(128, 32)
    with turbo_nn.precision_log(layer, every=1, path=file):
        for scale in (0.5, 1.0, 0.01):
            layer(x * scale).sum().backward()
            optimizer.step()
    before, after, small = (row for row in precision.read(file) if row["operand"] == "input")
    assert before["overflow"] == 0.0
    assert before["snr_db"] > 25
    assert after["overflow"] == (x.abs() > 1).float().mean().item() == 0.5
    cast = by_hand(x.clamp(-1, 1).double(), "e4m3", (0, 0))
    assert after["snr_db"] == pytest.approx(snr_db(cast, x), abs=0.02)
    beside = torch.cat([0.01 * x, x[-1:]])  # what step 1 saw is the scale of step 2
    cast = by_hand(beside.double(), "e4m3", (0, 0))[:-1]
    assert small["snr_db"] == pytest.approx(snr_db(cast, 0.01 * x), abs=0.02)


def places(x: Tensor) -> tuple[list[int], list[int]]:
    """The rows and columns of a tensor like x that a sample has."""
    index = torch.arange(x.numel(), device=x.device, dtype=torch.float32).view_as(x)  # exact below 2^24
    values = precision.sampled(index).values.long()
    return (values[:, 0] // x.shape[1]).tolist(), (values[0] % x.shape[1]).tolist()


@pytest.mark.parametrize("shape", [(4096, 1024), (300, 8192), (1000, 5000), (7, 30)], ids=str)
def test_a_large_tensor_is_sampled_in_whole_blocks(shape: tuple, device) -> None:
    x = torch.randn(shape, device=device)
    x[-1, -1] = 100.0
    sample, (rows, columns) = precision.sampled(x), places(x)
    assert sample.amax.item() == 100.0, "of the whole tensor"
    assert sample.values.numel() <= precision.SAMPLE
    assert torch.equal(sample.values, x[rows][:, columns])
    assert torch.equal(sample.bordered[:-1, -1], x[rows].abs().amax(1))
    assert torch.equal(sample.bordered[-1, :-1], x[:, columns].abs().amax(0))
    for found, extent in zip((rows, columns), shape, strict=True):
        if len(found) == extent:
            assert found == list(range(extent))
            continue
        firsts = found[::128]
        assert found == [first + i for first in firsts for i in range(128)]
        assert all(first % 128 == 0 for first in firsts)
        assert [first * len(firsts) // extent for first in firsts] == list(range(len(firsts))), "one a part"


@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 128), (128, 128)], ids=str)
def test_a_sample_is_cast_as_within_the_whole(block: tuple, device) -> None:
    """The scale of a whole row or column knows of outliers outside the sample."""
    x = torch.randn(2048, 2304, device=device)
    rows, columns = places(x)
    outside = next(i for i in range(x.shape[0]) if i not in rows), min({*range(x.shape[1])} - {*columns})
    x[outside[0], ::5] = x[::7, outside[1]] = 300.0
    sample = precision.sampled(x)
    assert sample.values.max() < 300.0
    for across in (False, True):
        whole = by_hand((x.t() if across else x).double(), "e4m3", block)
        whole = (whole.t() if across else whole)[rows][:, columns]
        differs = precision._cast(sample, Cast("e4m3", block), across, None) - whole.float()
        assert (differs.abs() > 1e-5 * whole.abs()).sum() <= 2, "a tie in double may round apart in fp32"


def measured(x: Tensor, recipe: str) -> dict[str, float]:
    casts = precision.OPERANDS[0].casts(turbo_nn.RECIPES[recipe])
    return dict(zip(precision.NUMBERS, precision.measure(x, 0, casts, None).tolist(), strict=False))


def test_tiny_gradients_have_an_snr(device) -> None:
    x = 1e-25 * torch.randn(128, 64, device=device)
    assert measured(x, "fp8_rowwise")["snr_db"] == pytest.approx(31.5, abs=1.0)
    nothing = measured(0 * x, "fp8_rowwise")
    assert math.isnan(nothing["snr_db"])
    assert nothing["underflow"] == 0.0


def test_a_past_counts_when_the_layer_uses_it(device) -> None:
    """Rows of a history fill before the host learns of it; until then a cast looks for its own amax."""
    casts = precision.OPERANDS[0].casts(turbo_nn.RECIPES["fp8_delayed"])
    history = turbo_ops.new_history(16, device)
    history[0, 3] = 2.0
    assert precision._past(0, casts, history) is None
    turbo_ops.restore_history(history, history.clone())
    assert precision._past(0, casts, history).item() == 2.0
    history[0, 3] = 0.0
    assert precision._past(0, casts, history).item() == torch.finfo(fp8_dtype("e4m3", device)).max


def test_a_checkpoint_of_the_whole_model_is_one_step(device, tmp_path: Path) -> None:
    model, file = Block(device), tmp_path / "precision.jsonl"
    with turbo_nn.precision_log(model, every=2, path=file):
        for _ in range(3):
            checkpoint(model, torch.randn(8, 96, device=device), use_reentrant=False).sum().backward()
    assert sorted(keys(file)) == every_operand((0, 2))


def test_a_patched_model_and_autocast(device, tmp_path: Path) -> None:
    file, model = tmp_path / "precision.jsonl", Toy().to(device)
    patch(model, {"head": "bf16", "*": "fp8_blockwise"})
    with turbo_nn.precision_log(model, path=file), torch.autocast(device.type, torch.bfloat16):
        model(tokens(device)).float().square().mean().backward()
    layers = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
    assert sorted(keys(file)) == every_operand((0,), layers)


class Counter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_nothing_runs_between_samples(device, tmp_path: Path) -> None:
    model, x = Block(device), torch.randn(8, 96, device=device)

    def calls() -> int:
        with Counter() as counter:
            model(x).sum().backward()
        return counter.calls

    alone = [calls() for _ in range(3)][-1]  # the casts of weights are kept by now
    with turbo_nn.precision_log(model, every=10, path=tmp_path / "log.jsonl"):
        sampled = calls()
        model(x)  # writes what was
        assert calls() == alone < sampled


def test_the_device_is_asked_once_a_step(device, tmp_path: Path, monkeypatch) -> None:
    asked = []
    to_list = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: asked.append(tensor.shape) or to_list(tensor))
    for name in ("item", "__bool__", "__float__", "__int__", "cpu"):
        monkeypatch.setattr(Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits for the device"))
    with turbo_nn.precision_log(model := Block(device), every=1, path=tmp_path / "log.jsonl"):
        for _ in range(2):
            model(torch.randn(8, 96, device=device)).sum().backward()
    assert asked == [(6, len(precision.NUMBERS) + len(precision.WHAT_IF))] * 2


def test_a_compiled_model_is_told(device, tmp_path: Path) -> None:
    model = Block(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        pytest.warns(UserWarning, match="has no row: .* the model is compiled"),
        turbo_nn.precision_log(model, path=tmp_path / "log.jsonl"),
    ):
        compiled(torch.randn(8, 96, device=device)).sum().backward()


def test_what_is_refused(device, tmp_path: Path) -> None:
    for every in (0, -1, 0.5):
        with pytest.raises(ValueError, match=rf"every={every}: use a number of steps, at least 1"):
            turbo_nn.precision_log(Block(device), every=every)
    with pytest.raises(ValueError, match=r"model=Linear has no turbo_nn.Linear: patch it first"):
        turbo_nn.precision_log(nn.Linear(2, 2))
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "log.jsonl"):
        with pytest.raises(ValueError, match=rf"path='{path}' cannot be written \(.*\): give another"):
            turbo_nn.precision_log(Block(device), path=path)


def test_the_heat_map_is_a_picture(device, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "precision.jsonl"
    with turbo_nn.precision_log(model := Block(device), every=1, path=file):
        train(model, 3, device)
    picture = turbo_nn.heat_map(file, tmp_path / "map.png")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0] |= {"snr_db": 12.0, "snr_t_db": 11.0}
    kept = [row for row in rows if row["operand"] == "input" and row["step"] != 1]
    grid = precision._grid(kept, ["up", "down"], [0, 1, 2])
    assert grid[0][0] == 11.0
    assert grid[1][1] != grid[1][1], "nothing there"
    assert grid[1][2] == min(kept[-1]["snr_db"], kept[-1]["snr_t_db"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'turbo_nn\[recipes\]'"):
        turbo_nn.heat_map(file, tmp_path / "map.png")
