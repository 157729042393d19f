"""Tuned tables, measurements on scratch copies, the cache file of auto-tuning, agreement between ranks."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

import turbo_ops
from turbo_ops import tuning
from turbo_ops.dispatch import REGISTRY
from turbo_ops.distributed import agree, agreed
from turbo_ops.tuning import __main__ as command

ROOT = Path(turbo_ops.__file__).parents[1]
GPU = torch.device("cuda", 0)


@pytest.fixture
def norm(environment):
    """rms_norm_fwd with a `blaslt` backend that only these tests know, and arguments for it."""
    op = REGISTRY["rms_norm_fwd"]
    environment.setattr(op, "_backends", dict(op._backends))
    op.backend("blaslt")(op.reference)
    return op, (torch.randn(5, 64), torch.ones(64), 1e-6, 0.0, False)


def write_table(folder: Path, table: dict) -> None:
    (folder / f"{turbo_ops.arch.arch(torch.device('cpu'))}.json").write_text(json.dumps(table))


def test_key_rounds_extents_up_to_powers_of_two() -> None:
    x = torch.empty(8192, 6144, dtype=torch.bfloat16, device="meta")
    assert tuning.key((x, None, torch.float32, 0.5, True)) == "bfloat16[8192x8192] None float32 0.5 True"
    assert tuning.key((x.t(),)) == "bfloat16[8192x8192]'"
    assert tuning.key((torch.empty(0, 1, 3),)) == "float32[0x1x4]"
    scale = torch.empty(3, dtype=torch.float8_e8m0fnu)
    assert tuning.key((scale,)) == "float8_e8m0fnu[4]"


def test_table_is_looked_up_by_op_and_key(norm, environment, tmp_path) -> None:
    op, args = norm
    environment.setattr(tuning, "TABLES", tmp_path)
    write_table(tmp_path, {op.name: {tuning.key(args): "blaslt"}})
    tuning.reset()
    device = torch.device("cpu")
    assert tuning.choose(op, args, device) == "blaslt"
    assert tuning.choose(op, (torch.randn(7, 64), *args[1:]), device) == "blaslt", "7 rows round up as 5 do"
    assert tuning.choose(op, (torch.randn(9, 64), *args[1:]), device) is None
    assert tuning.choose(REGISTRY["rms_norm_bwd"], args, device) is None


def test_table_is_of_one_arch(norm, environment, tmp_path) -> None:
    op, args = norm
    environment.setattr(tuning, "TABLES", tmp_path)
    (tmp_path / "gfx950.json").write_text(json.dumps({op.name: {tuning.key(args): "blaslt"}}))
    turbo_ops.reset()
    assert tuning.choose(op, args, torch.device("cpu")) is None
    environment.setenv("TURBO_ARCH", "gfx950")
    turbo_ops.reset()
    assert tuning.choose(op, args, torch.device("cpu")) == "blaslt"


def test_reviewed_tables_name_known_ops_and_backends() -> None:
    for path in tuning.TABLES.glob("*.json"):
        for name, entries in json.loads(path.read_text()).items():
            assert set(entries.values()) <= {*REGISTRY[name].order, "reference"}, path


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0).view(3, 8)[:, 2:6],
        torch.arange(4.0).expand(3, 4),
        torch.empty(0, 4),
        torch.ones(1, 1).expand(5, 1),
    ],
    ids=["contiguous", "transposed", "sliced", "expanded", "empty", "column"],
)
def test_copy_keeps_values_and_strides(tensor: Tensor) -> None:
    twin = tuning.copy(tensor)
    assert torch.equal(twin, tensor)
    assert twin.stride() == tensor.stride()
    assert not twin.numel() or twin.data_ptr() != tensor.data_ptr()


def test_measure_never_writes_to_an_output_in_use() -> None:
    op = REGISTRY["gemm_accumulate_"]
    out, a, b = torch.ones(4, 5), torch.randn(4, 8), torch.randn(5, 8)
    times = tuning.measure(op, (out, a, b, None, None, True), ("reference",), repeats=3)
    assert times.keys() == {"reference"}
    assert times["reference"] > 0
    assert torch.equal(out, torch.ones(4, 5))


def test_measure_leaves_out_who_refuses(norm, environment) -> None:
    op, args = norm
    op.backend("blaslt", refuses=lambda *_: "not today")(op.reference)
    assert tuning.measure(op, args, ("blaslt", "reference"), repeats=2).keys() == {"reference"}


@pytest.fixture
def auto(norm, environment, tmp_path):
    """Auto-tuning on, of an op that has two backends here; `measured` counts how often it measures.

    Only CUDA devices are tuned: the device is passed by hand, the tensors are on the CPU.
    """
    op, args = norm
    measured = []

    def measure(op, args, names):
        measured.append(names)
        return {"triton": 2.0, "blaslt": 1.0}

    environment.setenv("TURBO_AUTO_TUNE", "1")
    environment.setenv("TURBO_CACHE_DIR", str(tmp_path))
    environment.setattr(tuning, "TABLES", tmp_path / "none")
    environment.setattr(tuning, "measure", measure)
    environment.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # raises in a CPU build
    tuning.reset()
    return op, args, measured


def test_auto_tuning_measures_once_and_persists(auto, tmp_path) -> None:
    op, args, measured = auto
    assert tuning.choose(op, args, GPU) == "blaslt"
    assert tuning.choose(op, args, GPU) == "blaslt"
    assert measured == [op.order]
    (cache,) = tmp_path.glob("*.json")
    assert cache == tuning.cache_file(turbo_ops.arch.arch(GPU))
    assert torch.__version__ in cache.name
    assert json.loads(cache.read_text()) == {op.name: {tuning.key(args): "blaslt"}}


def test_auto_tuning_is_off_by_default_and_on_a_cpu(auto, environment) -> None:
    op, args, measured = auto
    assert tuning.choose(op, args, torch.device("cpu")) is None
    environment.delenv("TURBO_AUTO_TUNE")
    tuning.reset()
    assert tuning.choose(op, args, GPU) is None
    assert measured == []


def test_auto_tuning_leaves_a_reviewed_entry_alone(auto, environment, tmp_path) -> None:
    op, args, measured = auto
    environment.setattr(tuning, "TABLES", tmp_path)
    (tmp_path / f"{turbo_ops.arch.arch(GPU)}.json").write_text(
        json.dumps({op.name: {tuning.key(args): "triton"}})
    )
    tuning.reset()
    assert tuning.choose(op, args, GPU) == "triton"
    assert measured == []


def test_auto_tuning_waits_while_a_graph_is_captured(auto, environment) -> None:
    op, args, measured = auto
    environment.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.choose(op, args, GPU) is None
    assert measured == []


def test_auto_tuning_remembers_that_nobody_accepts(auto, environment) -> None:
    op, args, _ = auto
    measured = []
    environment.setattr(tuning, "measure", lambda *rest: measured.append(rest) or {})
    assert tuning.choose(op, args, GPU) is None
    assert tuning.choose(op, args, GPU) is None
    assert len(measured) == 1


def test_cache_file_merges_what_others_wrote(tmp_path) -> None:
    path = tmp_path / "new folder" / "cache.json"

    def write(number: int) -> None:
        with tuning._locked(path) as table:
            seen = dict(table)
            table[f"op{number}"] = {"key": "triton"}
            assert seen.items() <= table.items()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(path.read_text()) == {f"op{number}": {"key": "triton"} for number in range(16)}


def test_cache_file_survives_an_exception(tmp_path) -> None:
    path = tmp_path / "cache.json"
    with tuning._locked(path) as table:
        table["op"] = {"key": "triton"}
    with pytest.raises(KeyError), tuning._locked(path) as table:
        table.pop("op that is not there")
    assert json.loads(path.read_text()) == {"op": {"key": "triton"}}


def test_table_keeps_only_winners_that_beat_the_default(environment, capsys) -> None:
    op = REGISTRY["rms_norm_fwd"]
    for slower, kept in ((1.1, True), (1.01, False)):
        environment.setattr(tuning, "measure", lambda *_, ms=slower: {"native": ms, "triton": 1.0})
        entries = command.tuned_entries(op.name, "test", torch.device("cpu"))
        assert set(entries.values()) == ({"triton"} if kept else set())
    assert "native 1.0100 ms  triton 1.0000 ms" in capsys.readouterr().out


def test_command_writes_a_table(tmp_path) -> None:
    """Without the interpreter: timing it says nothing and takes minutes."""
    output = tmp_path / "table.json"
    output.write_text(json.dumps({"gemm": {"kept": "triton"}, "rms_norm_fwd": {"stale": "triton"}}))
    arguments = ["--size", "test", "--op", "rms_norm_fwd", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "turbo_ops.tuning", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"wrote {output}"
    table = json.loads(output.read_text())
    assert table["gemm"] == {"kept": "triton"}
    assert "stale" not in table.get("rms_norm_fwd", {})


def test_command_that_measures_nothing_changes_nothing(environment, tmp_path, capsys) -> None:
    output = tmp_path / "table.json"
    output.write_text(json.dumps({"gemm": {"kept": "triton"}}))
    environment.setattr(tuning, "measure", lambda *_: {})
    assert command.main(["--op", "gemm", "--size", "test", "--output", str(output)]) == 1
    assert json.loads(output.read_text()) == {"gemm": {"kept": "triton"}}
    assert "nothing was measured" in capsys.readouterr().out


def test_command_refuses_a_folder_as_output(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        command.main(["--output", str(tmp_path)])
    assert f"--output {tmp_path}: " in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["TURBO_AUTO_TUNE", "TURBO_CHECK_CACHE"])
def test_a_switch_is_0_or_1(environment, variable: str) -> None:
    environment.setenv(variable, "yes")
    with pytest.raises(ValueError, match=f"{variable}='yes': use 0 or 1"):
        turbo_ops.reset()


def test_one_process_agrees_with_itself() -> None:
    assert agreed("anything") is None
    assert agree("anything", "triton") == "triton"


def agree_as(rank: int, store: str, folder: str) -> None:
    """Two ranks propose different backends for one key; for another only rank 0 asks, waiting for nobody."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    answers = [agree("both", ("triton", "blaslt")[rank]), agree("both", "native")]
    if rank == 0:
        answers += [agreed("alone"), agree("alone", "triton"), agreed("alone")]
    Path(folder, str(rank)).write_text(json.dumps(answers))
    dist.destroy_process_group()


def test_ranks_agree_and_nobody_waits(tmp_path) -> None:
    multiprocessing.spawn(agree_as, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert len({*first[:2], *second}) == 1
    assert first[0] in ("triton", "blaslt")
    assert first[2:] == [None, "triton", "triton"]
