"""transformers' Trainer and accelerate, patched by a line."""

import copy
from pathlib import Path

import pytest
import torch
from models import build, reference_on_cpu
from torch import nn

import turbo_nn

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from turbo_nn.trainer import read_settings  # noqa: E402


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


@pytest.fixture(scope="module")
def data() -> list[dict]:
    ids = torch.randint(1, 100, (16, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: Path, cls: type = transformers.TrainingArguments, **options):
    fixed = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-2, "seed": 3}
    sizes = {"per_device_train_batch_size": 2, "max_steps": 4}
    cpu = {"use_cpu": not torch.cuda.is_available()}
    return cls(str(folder), **{"save_strategy": "no"} | fixed | sizes | cpu | options)


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_one_line_patches_the_trainers_model(tmp_path: Path, device: torch.device, data: list) -> None:
    plain = transformers.Trainer(build("llama", device), arguments(tmp_path), train_dataset=data)
    plain.train()
    callback = turbo_nn.TurboCallback("fp8_rowwise")
    model = build("llama", device)
    ours = transformers.Trainer(
        model, arguments(tmp_path), train_dataset=data, eval_dataset=data[:4], callbacks=[callback]
    )
    assert isinstance(model, turbo_nn.CausalLM)
    assert isinstance(model.model.layers[0].mlp.up_proj, turbo_nn.Linear)
    assert {v.recipe for v in callback.report.patched if v.rule == "linear"} == {"fp8_rowwise"}
    ours.train()
    assert losses(ours) == pytest.approx(losses(plain), rel=0.02)
    assert losses(ours)[-1] < losses(ours)[0]
    logits = ours.predict(data[:4]).predictions
    assert logits.shape[:2] == (4, 12)


def test_resumed_it_is_the_uninterrupted_run(tmp_path: Path, device: torch.device, data: list) -> None:
    start = build("llama", device)

    def run(folder: Path, steps: int, resume: str | None = None):
        model = copy.deepcopy(start)
        options = {
            "save_strategy": "steps",
            "save_steps": 2,
            "max_steps": steps,
            "lr_scheduler_type": "constant",
        }
        trainer = transformers.Trainer(
            model,
            arguments(folder, **options),
            train_dataset=data,
            callbacks=[turbo_nn.TurboCallback("fp8_delayed", convert_small=True)],
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 2)
    assert (tmp_path / "cut/checkpoint-2/turbo_nn.pt").exists()
    resumed = run(tmp_path / "cut", 4, str(tmp_path / "cut/checkpoint-2"))
    for (name, ours), right in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert ours.equal(right), name
    histories = turbo_nn.recipe_state(resumed.model)
    assert histories
    assert all(h.equal(turbo_nn.recipe_state(whole.model)[fqn]) for fqn, h in histories.items())
    (tmp_path / "cut/checkpoint-2/turbo_nn.pt").unlink()
    with pytest.warns(RuntimeWarning, match=r"turbo_nn.pt is not there: delayed scaling begins anew"):
        run(tmp_path / "cut", 4, str(tmp_path / "cut/checkpoint-2"))


def test_a_model_of_model_init_is_patched(tmp_path: Path, device: torch.device, data: list) -> None:
    made: list[nn.Module] = []

    def model_init() -> nn.Module:
        made.append(build("llama", device))
        return made[-1]

    trainer = transformers.Trainer(
        args=arguments(tmp_path, max_steps=1),
        model_init=model_init,
        train_dataset=data,
        callbacks=[turbo_nn.TurboCallback("bf16")],
    )
    trainer.train()
    assert len(made) == 2
    assert isinstance(made[-1], turbo_nn.CausalLM)


@pytest.mark.parametrize(
    ("options", "kept"), [({}, True), ({"keeps_logits": False}, False)], ids=["trl", "told"]
)
def test_logits_stay_for_those_who_read_them(
    options: dict, kept: bool, tmp_path: Path, device: torch.device, data: list
) -> None:
    config = type("SFTConfig", (transformers.TrainingArguments,), {"__module__": "trl.trainer.sft_config"})
    model = build("llama", device)
    callback = turbo_nn.TurboCallback("bf16", **options)
    transformers.Trainer(model, arguments(tmp_path, config), train_dataset=data, callbacks=[callback])
    ids = data[0]["input_ids"][None].to(device)
    assert (model.train()(input_ids=ids, labels=ids).logits is not None) == kept


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
num_processes: 1
use_cpu: true
fp8_config:
  recipe: fp8_delayed
  skip: lm_head
"""


def test_accelerate_reads_it_from_its_file(tmp_path: Path, device: torch.device) -> None:
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    accelerator = accelerate.Accelerator(cpu=device.type == "cpu")
    model = build("llama", torch.device("cpu"))
    report = turbo_nn.patch_for(accelerator, model, tmp_path / "accelerate.yaml")
    assert next(model.parameters()).device.type == accelerator.device.type
    assert {v.recipe for v in report.patched if v.rule == "linear"} <= {"fp8_delayed"}
    assert next(v for v in report if v.fqn == "lm_head").reason
    ids = torch.ones(1, 4, dtype=torch.int64, device=accelerator.device)
    model(input_ids=ids, labels=ids).loss.backward()
    accelerator.save_state(str(tmp_path / "state"))
    assert any("custom_checkpoint" in path.name for path in (tmp_path / "state").iterdir())
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(tmp_path / "accelerate.yaml")).fp8_config["recipe"] == "fp8_delayed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: bf16\npolicy: {'*': bf16}", "give either recipe or policy"),
        ("skip: lm_head", "give either recipe or policy"),
        ("recipe: bf16\nskips: lm_head", "skips: use recipe, policy, only"),
        ("compute_environment: LOCAL_MACHINE", "must map recipe, policy.*under fp8_config"),
        ("- recipe", "must map recipe, policy"),
        ("recipe: null", "recipe: None is no name"),
        ("recipe: fp9", "turbo.yaml: recipe: 'fp9': use one of bf16"),
        ("recipe: bf16\nconvert_small: 'no'", "convert_small: 'no' is no true or false"),
        ("recipe: bf16\n1: 2", "1: use recipe"),
    ],
)
def test_bad_settings_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "turbo.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(path)


def test_an_unpatched_model_is_patched_when_it_trains_again(
    tmp_path: Path, device: torch.device, data: list
) -> None:
    model = build("llama", device)
    callback = turbo_nn.TurboCallback("fp8_rowwise")
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=data, callbacks=[callback])
    turbo_nn.unpatch(model)
    trainer.train()
    assert isinstance(model, turbo_nn.CausalLM)


def test_the_callbacks_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="fp9"):
        turbo_nn.TurboCallback("fp9")
    with pytest.raises(TypeError, match="sikp"):
        turbo_nn.TurboCallback("bf16", sikp="*")
