"""The precision log against numbers worked out here, and what the doctor makes of it."""

import json
from pathlib import Path

import pytest
import torch
from numerics import snr_db
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import turbo_nn
import turbo_ops
from turbo_nn import doctor, precision


@pytest.fixture(autouse=True)
def reference(device: torch.device):
    with turbo_ops.force(**({} if device.type == "cuda" else {"quantize": "reference", "gemm": "reference"})):
        yield


class Block(nn.Module):
    def __init__(self, device, recipe: str = "fp8_blockwise", again: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.up = turbo_nn.Linear(96, 64, device=device, recipe=recipe)
        self.down = turbo_nn.Linear(64, 96, device=device, recipe=recipe)
        self.again = again

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)


def train(model: nn.Module, steps: int, device) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(256, 96, device=device)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpoint"])
def test_sampled_steps_and_no_others(again: bool, device, tmp_path: Path) -> None:
    model, file = Block(device, again=again), tmp_path / "log" / "precision.jsonl"
    plain = train(model, 5, device)
    with turbo_nn.precision_log(model, every=2, path=file):
        logged = train(model, 5, device)
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 96, device=device))
    assert all(torch.equal(a, b) for a, b in zip(plain, logged, strict=True)), "gradients do not change"
    rows = precision.read(file)
    operands = [(step, layer) for step in (0, 2, 4) for layer in ("up", "down")]
    expected = {(*key, name) for key in operands for name in ("input", "weight", "grad_output")}
    found = [(row["step"], row["layer"], row["operand"]) for row in rows]
    assert sorted(found) == sorted(expected), "each once, recomputed forwards included"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_numbers_are_right(device, tmp_path: Path) -> None:
    model, file = Block(device), tmp_path / "precision.jsonl"
    x = torch.randn(256, 96, device=device)
    x[::2] *= 1e-6  # block scales keep these; one scale for all makes zeros of them
    x[1, 1] = 40.0
    with turbo_nn.precision_log(model, every=1, path=file):
        model(x).square().mean().backward()
    row = next(row for row in precision.read(file) if (row["layer"], row["operand"]) == ("up", "input"))
    assert row["recipe"] == "fp8_blockwise"
    assert row["amax"] == 40.0
    assert (row["nonfinite"], row["overflow"]) == (0.0, 0.0)
    tile = turbo_ops.Cast("e4m3", (1, 128))
    cast = turbo_ops.dequantize(*turbo_ops.cast(x, tile), torch.float32)
    assert row["snr_db"] == pytest.approx(snr_db(cast, x), abs=0.01)
    cast = turbo_ops.dequantize(*turbo_ops.cast(x.t(), tile), torch.float32)
    assert row["snr_t_db"] == pytest.approx(snr_db(cast, x.t()), abs=0.01)
    assert row["underflow"] == pytest.approx(((x != 0) & (cast.t() == 0)).float().mean().item(), abs=0.5)
    assert row["underflow"] < 0.01
    whole = turbo_ops.dequantize(*turbo_ops.cast(x, turbo_ops.Cast("e4m3", (0, 0))), torch.float32)
    assert row["what_if"]["fp8_tensorwise"] == pytest.approx(snr_db(whole, x), abs=0.01)
    tensorwise = precision.measure(x, (turbo_ops.Cast("e4m3", (0, 0)),) * 2, None)
    assert tensorwise[2].item() == pytest.approx(0.5, abs=0.01), "the small half underflows"


def test_a_delayed_scale_overflows(device) -> None:
    x = torch.linspace(-2, 2, 128 * 32, device=device).view(128, 32)
    cast = turbo_ops.Cast("e4m3", (0, 0), history=4)
    numbers = dict(zip(precision.NUMBERS, precision.measure(x, (cast, cast), x.new_tensor(1.0)), strict=True))
    assert numbers["overflow"].item() == pytest.approx(0.5, abs=0.01)
    assert numbers["snr_db"].item() < 10
    unknown = dict(zip(precision.NUMBERS, precision.measure(x, (cast, cast), x.new_zeros(())), strict=True))
    assert unknown["overflow"].item() == 0.0
    assert unknown["snr_db"].item() > 25


def test_a_large_tensor_is_sampled_in_blocks(device) -> None:
    x = torch.randn(4096, 1024, device=device)
    x[3000, 5] = 100.0
    sample, amax = precision.sampled(x)
    assert amax.item() == 100.0, "of the whole tensor"
    assert sample.shape == (256, 1024)
    assert torch.equal(sample[:128], x[:128])
    assert torch.equal(sample[128:], x[2048:2176])


def test_what_is_refused(device, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every=0: use a number of steps, at least 1"):
        turbo_nn.precision_log(Block(device), every=0)
    with pytest.raises(ValueError, match=r"no turbo_nn.Linear: call turbo_nn.patch\(model, recipe\) first"):
        turbo_nn.precision_log(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"path='/dev/null/x' cannot be written"):
        turbo_nn.precision_log(Block(device), path="/dev/null/x")


def test_the_heat_map_is_a_picture(device, tmp_path: Path) -> None:
    file = tmp_path / "precision.jsonl"
    with turbo_nn.precision_log(model := Block(device), every=1, path=file):
        train(model, 3, device)
    picture = turbo_nn.heat_map(file, tmp_path / "map.png")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def row(layer: str, operand: str = "input", **numbers: float) -> dict:
    plain = {
        "amax": 1.0,
        "nonfinite": 0.0,
        "underflow": 0.0,
        "overflow": 0.0,
        "snr_db": 30.0,
        "snr_t_db": 30.0,
    }
    facts = {"step": 0, "layer": layer, "operand": operand, "recipe": "fp8_tensorwise"}
    return facts | plain | numbers | {"what_if": {"fp8_rowwise": 28.0, "fp8_blockwise": 29.5}}


def test_the_doctor_names_layers_for_bf16(tmp_path: Path, capsys) -> None:
    rows = [
        row("a.up"),
        row("a.down", "grad_output", snr_db=21.0, snr_t_db=21.0),
        row("b.up", snr_db=18.0),
        row("b.down", underflow=0.2),
        row("c.up", "weight", overflow=0.01),
    ]
    file = tmp_path / "precision.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert doctor.main(["--log", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.index("b.up input: SNR 18.0 dB, under 25; fp8_blockwise would give 29.5 dB") == 0
    assert "b.down input: underflow 20.00%" in text
    assert "c.up weight: overflow 1.00%" in text
    assert "a." not in text
    policy = text.split("before the other rules:\n")[1]
    assert set(policy.split("\n")[:-1]) == {'"b.up": bf16', '"b.down": bf16', '"c.up": bf16'}
    file.write_text(json.dumps(row("a.up")) + "\n")
    assert doctor.main(["--log", str(file)]) == 0
    assert "nothing needs bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("", "an empty precision log"),
        ("{}\n", ":1: not a row"),
        ("no json\n", ":1: not a row"),
    ],
    ids=["missing", "empty", "another file", "text"],
)
def test_the_doctor_refuses_what_is_no_log(text: str | None, message: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "precision.jsonl"
    if text is not None:
        file.write_text(text)
    assert doctor.main(["--log", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_doctor_explains_the_machine(capsys, environment) -> None:
    environment.setenv("TURBO_CHECK_CACHE", "0")
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__.split("+")[0] or found["versions"]["torch"]
    assert found["environment"]["TURBO_CHECK_CACHE"] == "0"
    assert found["backends"]["gemm bf16"]["reference"] is None
    if not torch.cuda.is_available():
        assert found["backends"]["gemm bf16"]["blaslt"] == "needs a GPU, the tensors are on cpu"
    assert doctor.main([]) == 0
    assert "gemm blockwise" in capsys.readouterr().out


def test_the_log_is_cheap_between_samples(device, tmp_path: Path) -> None:
    """A hook that has nothing to do does nothing: no op runs for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    model, counts = Block(device), []
    x = torch.randn(8, 96, device=device)
    model(x).sum().backward()
    turbo_ops.reset()
    with Counter() as counter:
        model(x).sum().backward()
        counts.append(counter.calls)
    with turbo_nn.precision_log(model, every=10, path=tmp_path / "log.jsonl"):
        model(x).sum().backward()  # sampled
        model(x)  # writes what was
        turbo_ops.reset()  # of the weight cache
        with Counter() as counter:
            model(x).sum().backward()
            counts.append(counter.calls)
    assert counts[0] == counts[1] > 0
