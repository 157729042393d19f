"""benchmarks/: a short run, no number for a wrong result, and a report that states what was measured."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from turbo_ops.dispatch import REGISTRY, Backend

ROOT = Path(__file__).parents[1]
NUMBERS = ("ms", "us", "tflops", "gbps", "share", "speedup", "baseline_ms", "cost", "peak_gib")


@pytest.fixture(autouse=True)
def _root_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """JSON and printed text of a short run of everything."""
    output = tmp_path_factory.mktemp("bench") / "result.json"
    options = [
        "--size",
        "test",
        "--quick",
        "--model",
        "--peers",
        "--backend",
        "triton",
        "reference",
        "--output",
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bench.py"), *options, str(output)],
        env=os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        cwd=output.parent,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text()), done.stdout


@pytest.fixture
def session():
    return importlib.import_module("benchmarks.session").Session(torch.device("cpu"), "test", quick=True)


def test_machine_and_ceilings_are_stated(run) -> None:
    result, text = run
    assert set(result) == {"machine", "ceilings", "rows"}
    assert {"gpu", "arch", "torch", "triton", "cuda", "hip", "driver", "commit", "date"} <= set(
        result["machine"]
    )
    assert result["ceilings"]["copy"] > 0
    assert result["ceilings"]["bf16"] > 0
    assert torch.__version__ in text
    assert str(ROOT) not in json.dumps(result), "a path of this machine is in the result"


def test_every_op_backend_and_layer_has_a_row(run) -> None:
    rows = run[0]["rows"]
    seen = {(row["name"], row["variant"]) for row in rows if row["level"] == "op"}
    assert {name for name, _ in seen} == set(REGISTRY)
    for op in REGISTRY.values():
        assert {"reference", *({"triton"} & set(op.order))} == {by for name, by in seen if name == op.name}
    recipes = importlib.import_module("turbo_nn").RECIPES
    for level in ("linear", "host"):
        measured = [row["variant"] for row in rows if row["level"] == level and row["status"] == "ok"]
        kept = [
            f"{name}, weight cast once for 4" for name in ("fp8_tensorwise", "fp8_delayed", "fp8_blockwise")
        ]
        modes = ["nn.Linear bf16", "fp8_tensorwise", "fp8_tensorwise"]
        compiled = [f"{name} compiled{', CUDA graphs' * (i == 2)}" for i, name in enumerate(modes)]
        extra = [*compiled, *kept] if level == "linear" else []
        assert measured == ["nn.Linear bf16", *recipes, *extra]
    assert {
        "ceiling",
        "rms_norm",
        "swiglu",
        "loss",
        "grouped",
        "moe",
        "dispatch",
        "model",
        "peer",
        "part",
    } <= {row["level"] for row in rows}


def test_rows_are_flat_and_say_what_they_are(run) -> None:
    for row in run[0]["rows"]:
        assert {"level", "name", "case", "variant", "status", "reason"} <= set(row)
        assert all(isinstance(value, str | int | float | None) for value in row.values()), row
        assert row["status"] in ("ok", "refused"), row
        assert (row["reason"] is None) == (row["status"] == "ok"), row
        if row["status"] != "ok":
            assert not set(NUMBERS) & set(row), row
        elif row["level"] in ("op", "linear", "rms_norm", "model", "host"):
            assert row["ms"] > 0, row
            assert row["speedup"] > 0, row
            assert row["baseline"], row


def test_a_refusal_is_printed_with_its_reason(run) -> None:
    result, text = run
    refused = [row for row in result["rows"] if row["level"] == "op" and row["variant"] == "triton"]
    assert refused
    for row in refused:
        assert row["status"] == "refused"
        assert "needs a GPU" in row["reason"]
    assert "needs a GPU" in text


def _wrong_by_a_scale(a: Tensor, b: Tensor, *rest: object) -> Tensor:
    return REGISTRY["gemm"].reference(a, b, *rest) * 1.1


def _one_bit_off(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    data, scale = REGISTRY["quantize"].reference(x, *rest)
    if data.numel():
        data.view(torch.uint8)[-1, -1] ^= 1
    return data, scale


def _writes_nothing(a: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.full_like(a, torch.nan), torch.full((a.shape[0],), torch.nan)


def _breaks(*args: object) -> Tensor:
    raise RuntimeError(f"an illegal access in {ROOT}/kernel.py")


@pytest.mark.parametrize(
    ("name", "backend", "status"),
    [
        ("gemm", _wrong_by_a_scale, "wrong"),
        ("quantize", _one_bit_off, "wrong"),
        ("rms_norm_fwd", _writes_nothing, "wrong"),
        ("gemm", _breaks, "failed"),
        ("gemm_accumulate_", lambda *args: None, "wrong"),
    ],
)
def test_no_number_for_a_wrong_backend(monkeypatch, session, name: str, backend, status: str) -> None:
    op = REGISTRY[name]
    monkeypatch.setitem(op._backends, "triton", Backend("triton", backend))
    op.reset()
    importlib.import_module("benchmarks.ops").measure_ops(session, [name], ["triton", "reference"])
    op.reset()
    by = {variant: [row for row in session.rows if row["variant"] == variant] for variant in op.order}
    assert {row["status"] for row in by["triton"]} == {status}
    assert not [row for row in by["triton"] if set(NUMBERS) & set(row)]
    assert all(row["reason"] and str(ROOT) not in row["reason"] for row in by["triton"])
    others = [row for row in session.rows if row["variant"] == "reference"]
    assert len(others) == len(by["triton"])
    assert {row["status"] for row in others} == {"ok"}, "one backend's error must not cost another its number"


def test_no_number_for_a_wrong_layer(session) -> None:
    layers = importlib.import_module("benchmarks.layers")
    variant = importlib.import_module("benchmarks.session").Variant
    base = layers.plain_linear(session, 8, (32, 16))
    other = nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    made = [variant("right", lambda: base.module, 40.0), variant("wrong", lambda: other, 20.0)]
    rows = session.compare("linear", "8x32x16", made, lambda v: layers._measure_linear(session, base, v))
    assert [row["status"] for row in rows] == ["ok", "wrong"]
    assert not set(NUMBERS) & set(rows[1])
    assert "SNR" in rows[1]["reason"]


def test_a_missing_baseline_leaves_no_ratio(session) -> None:
    variant = importlib.import_module("benchmarks.session").Variant

    def measure(which) -> dict:
        if which.name == "baseline":
            raise RuntimeError("out of memory")
        return {"ms": 1.0}

    made = [variant("baseline", nn.Identity, 0.0), variant("ours", nn.Identity, 0.0)]
    rows = session.compare("linear", "x", made, measure)
    assert [row["status"] for row in rows] == ["failed", "ok"]
    assert rows[1]["speedup"] is None


def _report(*arguments: object) -> int:
    return importlib.import_module("benchmarks.report").main([str(argument) for argument in arguments])


def test_report_states_results_and_targets(tmp_path: Path, run) -> None:
    folder, page = tmp_path / "results" / "h200", tmp_path / "performance.md"
    folder.mkdir(parents=True)
    result = json.loads(json.dumps(run[0]))
    result["machine"]["arch"] = "sm90"
    for row in result["rows"]:
        row.update({"us": 9.0} if row["level"] == "dispatch" else {})
        if row["level"] == "host":
            row["cost"] = 7.5 if row["variant"] == "fp8_blockwise" else 2.25
    (folder / "ops.json").write_text(json.dumps(result))
    (folder / "curve.json").write_text('{"steps": [1, 2]}')
    arguments = ("--results", folder.parent, "--output", page)
    assert _report(*arguments, "--check") == 1
    assert _report(*arguments) == 0
    assert _report(*arguments, "--check") == 0
    text = page.read_text()
    assert "| host cost of fp8_tensorwise | <= 2.50x | 2.25x | met |" in text
    assert "| host cost of fp8_blockwise | <= 2.50x | 7.50x | MISSED |" in text
    assert "| dispatch of an op | <= 10.0 us | 9.00 us | met |" in text
    assert text.count("From `benchmarks/results/h200/ops.json`") == text.count("\n### ")
    assert "curve.json" not in text
    page.write_text(text.replace("2.25x", "2.15x"))
    assert _report(*arguments, "--check") == 1


def test_report_without_results(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    assert _report("--results", tmp_path / "none", "--output", page) == 0
    assert "no results yet" in page.read_text()
