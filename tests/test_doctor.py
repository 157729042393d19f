"""The doctor: what it says of this machine, and of precision logs, those that a real run wrote too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from models import Toy, patch, reference_on_cpu, tokens

import turbo_nn
import turbo_ops
from turbo_nn import doctor
from turbo_ops.dispatch import REGISTRY


def row(layer: str, operand: str = "input", step: int = 0, **other: object) -> dict:
    facts = {"step": step, "layer": layer, "operand": operand, "recipe": "fp8_tensorwise"}
    shares = {"nonfinite": 0.0, "underflow": 0.0, "overflow": 0.0}
    numbers = {"amax": 1.0, **shares, "snr_db": 30.0, "snr_t_db": 30.0}
    what_if = {"fp8_rowwise": 28.0, "fp8_blockwise": 29.5}
    dtype = "e5m2" if operand == "grad_output" else "e4m3"
    return facts | {"dtype": dtype} | numbers | {"what_if": what_if} | other


@pytest.fixture
def log(tmp_path: Path):
    def write(*rows: dict) -> str:
        file = tmp_path / "precision.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return str(file)

    return write


def test_layers_for_bf16_worst_first(log, capsys) -> None:
    file = log(
        row("a.up"),
        row("a.down", "grad_output", snr_db=21.0, snr_t_db=21.0),
        row("b.up", snr_t_db=18.0),
        row("b.down", underflow=0.2),
        row("c.up", "weight", overflow=0.01, snr_db=24.0),
        row("c.down", "grad_output", snr_db=21.0, dtype="e4m3"),
        *(row("d", step=step, snr_db=30.0 if step else 3.0) for step in range(3)),
    )
    assert doctor.main(["--log", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "b.up input: SNR 18.0 dB, under 25; fp8_blockwise would give 29.5 dB",
        "c.down grad_output: SNR 21.0 dB, under 25; fp8_blockwise would give 29.5 dB",
        "c.up weight: SNR 24.0 dB, under 25; overflow 1.00%, over 0.1%; fp8_blockwise would give 29.5 dB",
        "b.down input: underflow 20.00%, over 5.0%",
    ], "E5M2 keeps 21 dB, E4M3 must keep more, and one bad sample of three is none"
    rules = yaml.safe_load("\n".join(lines[4:]))
    assert rules == dict.fromkeys(("b.up", "b.down", "c.up", "c.down"), "bf16") | {"*": "fp8_tensorwise"}
    assert list(rules)[-1] == "*", "the first rule that matches wins"
    assert doctor.main(["--log", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == rules
    assert found["findings"][0]["snr_db"] == 18.0


def test_other_recipes_stay_what_they_are(log, capsys) -> None:
    healthy = [row(f"h.{i}") for i in range(2)]
    sick = [row("sick", snr_db=5.0, recipe="mxfp8"), row("own", recipe="custom")]
    assert doctor.main(["--log", log(*healthy, *sick)]) == 0
    text = capsys.readouterr().out
    rules = yaml.safe_load(text[text.index("# policy") :])
    assert rules == {"sick": "bf16", "own": "custom", "*": "fp8_tensorwise"}
    assert "# custom: put the name of your own recipe" in text


def test_all_is_well(log, capsys) -> None:
    assert doctor.main(["--log", log(row("a"), row("b"))]) == 0
    assert capsys.readouterr().out == "all 2 layers keep their precision: nothing needs bf16\n"


def test_what_is_not_finite_is_said_and_not_given_bf16(log, capsys) -> None:
    bad = row("a", step=7, amax=None, snr_db=None, snr_t_db=None, nonfinite=0.1)
    assert doctor.main(["--log", log(row("a"), bad)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a input: NaN or inf, which no recipe mends, at step 7"
    assert lines[1].endswith("nothing needs bf16")


def test_a_real_log_names_the_bad_layer_and_its_policy_mends_it(tmp_path, capsys, device) -> None:
    def model_with_outliers() -> Toy:
        torch.manual_seed(0)
        model = Toy().to(device)
        with torch.no_grad():
            model.layers[1].up.weight.mul_(1e-5)[0, 0] = 100.0  # one weight takes the scale of all
        return model

    model, file, yaml_file = model_with_outliers(), tmp_path / "log.jsonl", tmp_path / "policy.yaml"
    with reference_on_cpu(device):
        patch(model, "fp8_tensorwise")
        with turbo_nn.precision_log(model, every=1, path=file):
            for _ in range(2):
                model(tokens(device)).float().square().mean().backward()
    assert doctor.main(["--log", str(file)]) == 0
    text = capsys.readouterr().out
    assert "layers.1.up weight: underflow" in text
    assert "layers.0." not in text
    yaml_file.write_text(text[text.index("# policy") :])
    again = model_with_outliers()
    patch(again, str(yaml_file))
    assert not isinstance(again.layers[1].up, turbo_nn.Linear)
    assert again.layers[0].up.recipe == turbo_nn.RECIPES["fp8_tensorwise"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory: '{file}'"),
        (b"", "{file}:1: an empty precision log"),
        (b"{}\n", "{file}:1: not a row"),
        (b'{"step": 1, "lo', "{file}:1: not a row"),
        (b"\xff\xfe\n", "{file}:1: not a row"),
        (b"[1]\n", "{file}:1: not a row"),
        (json.dumps(row("a")).encode() + b"\n\n", "{file}:2: not a row"),
        (json.dumps(row("a", snr_db="12")).encode(), "{file}:1: not a row"),
        (json.dumps(row("a", what_if=3)).encode(), "{file}:1: not a row"),
    ],
    ids=["missing", "empty", "other", "cut", "binary", "list", "blank", "text", "number"],
)
def test_what_is_no_log_is_refused_in_a_line(content, message: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "precision.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert doctor.main(["--log", str(file)]) == 2
    said = capsys.readouterr()
    assert message.format(file=file) in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_every_op_is_answered_for(capsys, environment, device) -> None:
    environment.setenv("TURBO_CHECK_CACHE", "0")
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["pins"]["TURBO_CHECK_CACHE"] == "0"
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["ops"].keys() == REGISTRY.keys()
    for name, said in found["ops"].items():
        answered = {backend for backend in said["runs"] if not backend.startswith("nothing")}
        assert answered | said["refuses"].keys() <= {*REGISTRY[name].order, "reference"}
        assert "reference" not in said["refuses"]
        assert all(reason and reason != "None" for each in said["refuses"].values() for reason in each)
    if device.type == "cpu":
        assert list(found["ops"]["gemm"]["refuses"]["blaslt"]) == ["needs a GPU, the tensors are on cpu"]
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name}: " in text for name in REGISTRY)
    assert "TURBO_CHECK_CACHE=0" in text


def test_a_missing_library_and_a_pin_that_refuses(capsys, monkeypatch, device) -> None:
    monkeypatch.setattr(doctor.native, "reason", lambda: "the native library is not built")
    with turbo_ops.force(swiglu="fp8:native,other:blaslt"):
        assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "native library: the native library is not built\n" in text
    assert (
        "swiglu_fwd: nothing: swiglu_fwd is pinned to blaslt by force(), which refuses: there is no" in text
    )


def test_the_command_line() -> None:
    environment = {**os.environ, "TURBO_ARCH": "gfx1"}
    command = [sys.executable, "-m", "turbo_nn.doctor"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 2
    assert done.stderr.startswith("doctor: TURBO_ARCH='gfx1' is unknown: use one of gfx942")
    help_text = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=root).stdout
    assert "--log FILE" in help_text
    assert "deserve bf16" in help_text
