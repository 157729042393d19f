"""recipes/finetune.py as a person runs it: end to end, resumed, and with every kind of bad input."""

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
for needed in ("accelerate", "peft", "matplotlib", "tensorboard"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))
import options  # noqa: E402


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[str, str]:
    """(folder of a config, text file): two layers, bytes as tokens, sentences that can be learnt."""
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    ).save_pretrained(folder / "model")  # fmt: skip
    words = random.Random(0)
    lines = (
        f"the {words.choice(['quick', 'slow', 'red'])} fox and {words.randint(0, 99)} more"
        for _ in range(2000)
    )
    (folder / "text.txt").write_text("\n".join(lines))
    return str(folder / "model"), str(folder / "text.txt")


def finetune(*words: object) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    env.pop("TRITON_INTERPRET", None)  # these tests are about the script, on the backends that a person gets
    command = [sys.executable, str(ROOT / "recipes/finetune.py"), *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def small(tiny: tuple[str, str], output: Path, *words: object) -> subprocess.CompletedProcess:
    model, text = tiny
    fixed = ("--model", model, "--random-init", "--data", text, "--seq-len", 64, "--batch-size", 4)
    return finetune(*fixed, "--convert-small", "--deterministic", "--output", output, *words)


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> Path:
    """Eight steps in one go."""
    output = tmp_path_factory.mktemp("whole")
    done = small(tiny, output, "--steps", 8, "--eval-every", 4, "--save-every", 4, "--lr", 3e-3)
    assert done.returncode == 0, done.stderr
    assert "25 layers patched and 1 left" in done.stdout
    return output


def test_what_is_written(whole: Path) -> None:
    rows = metrics(whole)
    train, held_out = [r for r in rows if "loss" in r], [r for r in rows if "eval_loss" in r]
    assert [r["step"] for r in train] == list(range(1, 9))
    assert [r["step"] for r in held_out] == [4, 8]
    for name in ("learning_rate", "gradient_norm", "tokens_per_second", "seconds", "peak_memory_gib"):
        assert all(r[name] > 0 for r in train)
    assert train[-1]["loss"] < train[0]["loss"] - 0.3
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole / "tensorboard").iterdir())
    assert len(json.loads((whole / "report.json").read_text())) == 26


def test_result_needs_no_turbo_nn(whole: Path) -> None:
    script = (
        "import sys, transformers; m = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "assert not {'turbo_nn', 'turbo_ops'} & sys.modules.keys(); print(type(m.model.norm).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script, whole / "model"], capture_output=True, text=True)
    assert done.stdout.strip() == "LlamaRMSNorm", done.stderr
    assert list((whole / "model").glob("*.safetensors"))


def test_resumed_run_is_bit_for_bit_the_whole_one(whole: Path, tiny, tmp_path) -> None:
    options = ("--steps", 8, "--eval-every", 4, "--lr", 3e-3, "--resume", whole / "checkpoint-4")
    done = small(tiny, tmp_path, *options)
    assert done.returncode == 0, done.stderr
    exact = ("step", "loss", "eval_loss", "gradient_norm", "learning_rate")
    rows, expected = ([{k: r[k] for k in exact if k in r} for r in metrics(p)] for p in (tmp_path, whole))
    assert rows == [r for r in expected if r["step"] > 4]
    safetensors = pytest.importorskip("safetensors.torch")
    ours, theirs = (safetensors.load_file(p / "model/model.safetensors") for p in (tmp_path, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_resumed_run_has_its_amax_history(tiny, tmp_path) -> None:
    words = ("--recipe", "fp8_delayed", "--steps", 4, "--lr", 3e-3)
    for name, more in (
        ("whole", ("--save-every", 2)),
        ("again", ("--resume", tmp_path / "whole/checkpoint-2")),
    ):
        done = small(tiny, tmp_path / name, *words, *more)
        assert done.returncode == 0, done.stderr
    again, whole = ([r["loss"] for r in metrics(tmp_path / n) if "loss" in r] for n in ("again", "whole"))
    assert again == whole[2:]


OTHER_RUNS = {
    "seed and rate": (("--seed", 1, "--lr", 1e-3), "--lr 0.003, not 0.001; --seed 0, not 1"),
    "steps": (("--steps", 9), "--steps 8, not 9: give the same"),
    "recipe": (("--recipe", "none"), "--recipe fp8_blockwise, not none"),
    "data": (("--data", "{other}"), "--data sha256 "),
    "finished": (("--resume", "{whole}/checkpoint-8"), "is at step 8, the last of --steps 8"),
    "damaged": (("--resume", "{damaged}"), "step.json is damaged"),
}


@pytest.mark.parametrize("what", list(OTHER_RUNS), ids=lambda name: name.replace(" ", "-"))
def test_resume_refuses_another_run(what: str, whole: Path, tiny, tmp_path) -> None:
    """Before the model is loaded, and before anything of the earlier run is overwritten."""
    (tmp_path / "other.txt").write_text("another text " * 5000)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/step.json").write_text('{"step": 4')
    paths = {"other": tmp_path / "other.txt", "whole": whole, "damaged": tmp_path / "damaged"}
    words, message = OTHER_RUNS[what]
    given = [str(word).format(**paths) for word in words]
    options = ("--steps", 8, "--eval-every", 4, "--lr", 3e-3, "--resume", whole / "checkpoint-4")
    done = small(tiny, tmp_path / "out", *options, *given)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


def test_lora_policy_and_config(tiny, tmp_path) -> None:
    policy, config = tmp_path / "policy.yaml", tmp_path / "options.yaml"
    policy.write_text('"head": bf16\n"*": fp8_rowwise\n')
    config.write_text(f"steps: 2\nlora: 4\npolicy: {policy}\nlr: 0.5\n")
    done = small(tiny, tmp_path / "out", "--config", config, "--lr", 1e-3)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads((tmp_path / "out/report.json").read_text())
    assert {v["recipe"] for v in verdicts} == {"fp8_rowwise", None}
    assert sum("LoRA" in (v["reason"] or "") for v in verdicts) == 28
    assert max(r["learning_rate"] for r in metrics(tmp_path / "out") if "loss" in r) <= 1e-3
    assert (tmp_path / "out/adapter/adapter_model.safetensors").exists()
    names = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/model").state_dict()
    assert not [name for name in names if "lora" in name]


def test_gradient_accumulation_is_a_larger_batch(tiny, tmp_path) -> None:
    """The same eight sequences a step, in one part or in two: the same loss to rounding."""
    runs = {"one": ("--batch-size", 8), "two": ("--batch-size", 4, "--grad-accum", 2)}
    for name, words in runs.items():
        done = small(tiny, tmp_path / name, "--recipe", "none", "--steps", 2, "--dtype", "fp32", *words)
        assert done.returncode == 0, done.stderr
    one, two = (next(r["loss"] for r in metrics(tmp_path / name)) for name in runs)
    assert one == pytest.approx(two, rel=1e-5)


BAD = {
    "unknown option": (("--stepz", 3), "unrecognized arguments: --stepz"),
    "unknown recipe": (("--recipe", "fp9"), "--recipe fp9: use one of none, bf16, fp8_tensorwise"),
    "no data": (("--data", "/nowhere.txt"), "--data /nowhere.txt: no such file"),
    "short text": (("--seq-len", 50000), "give a longer text, or a smaller --seq-len or --batch-size"),
    "no policy": (("--policy", "/nowhere.yaml"), "/nowhere.yaml"),
    "no model": (("--model", "/nowhere"), "--model /nowhere"),
    "no checkpoint": (("--resume", "/nowhere"), "--resume /nowhere: no checkpoint there"),
    "no steps": (("--steps", 0), "--steps 0: must be at least 1"),
    "no config": (("--config", "/nowhere.yaml"), "--config /nowhere.yaml"),
    "one token": (("--seq-len", 1), "--seq-len 1: must be at least 2"),
    "file as output": (("--output", __file__), "is a file, give a folder"),
}


@pytest.mark.parametrize("words", list(BAD), ids=lambda name: name.replace(" ", "-"))
def test_bad_input_is_one_line(words: str, tiny, tmp_path) -> None:
    given, message = BAD[words]
    done = small(tiny, tmp_path, "--steps", 1, *given)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert message in done.stderr


def test_bad_config_and_a_model_that_cannot(tiny, tmp_path) -> None:
    config = tmp_path / "options.yaml"
    for text, message in {
        "stepz: 3": "unknown option 'stepz'",
        "steps: 3.9": "steps: 3.9 is no int",
        "steps: true": "steps: True is no int",
        "steps:": "steps: None is no int",
        "lora: 'no'": "lora: 'no' is no int",
        "convert-small: 'no'": "convert-small: 'no' is no bool",
        "lr: fast": "lr: 'fast' is no float",
        "steps: 3\nsteps: 4": f"{config}:2: 'steps' is there twice",
        "steps:\t3\n\tlr: 1": "indent with spaces",
    }.items():
        config.write_text(f"{text}\n")
        with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
            options.parse(["--config", str(config), "--model", "m", "--data", "d"])
        assert message in said.getvalue()
        assert len(said.getvalue().splitlines()) == 1
    config.write_text("lr: 1e-3\nconvert-small: true\n")
    found = options.parse(["--config", str(config), "--model", "m", "--data", "d"])
    assert (found.lr, found.convert_small) == (1e-3, True)
    shape = {"vocab_size": 512, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
    transformers.GPT2Config(**shape).save_pretrained(tmp_path / "gpt2")
    done = small((str(tmp_path / "gpt2"), tiny[1]), tmp_path / "out", "--steps", 1)
    assert done.returncode == 2
    assert "no layer of this model can take it" in done.stderr


def test_corpus_gives_each_rank_its_own_rows_and_each_epoch_all_of_them() -> None:
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); from corpus import Corpus\n"
        "c = Corpus.cut(list(range(1000)), 10, 4)\n"
        "rows = [c.batch(0, step, 2, rank, 2) for step in range(len(c.train) // 4) for rank in (0, 1)]\n"
        "seen = torch.cat(rows)[:, 0].tolist()\n"
        "assert len(set(seen)) == len(seen) == len(c.train) // 4 * 4\n"
        "assert torch.equal(c.batch(0, 3, 4), torch.cat([c.batch(0, 3, 2, 0, 2), c.batch(0, 3, 2, 1, 2)]))\n"
        "assert not torch.equal(c.batch(0, 0, 4), c.batch(1, 0, 4))\n"
        "assert not set(seen) & set(c.held_out[:, 0].tolist())\n"
    )
    subprocess.run([sys.executable, "-c", script, ROOT / "recipes"], check=True)
