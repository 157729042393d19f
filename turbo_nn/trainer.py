"""Patching inside of training loops that others wrote: transformers' Trainer, and accelerate by its YAML."""

import inspect
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from turbo_nn.causal_lm import CausalLM
from turbo_nn.patch import is_patched, patch
from turbo_nn.recipe_state import RecipeState, load_recipe_state, recipe_state
from turbo_nn.recipes import RECIPES, RecipeLike, as_policy, read_yaml
from turbo_nn.report import Report

STATE = "turbo_nn.pt"  # in a checkpoint's folder: amax histories
SETTINGS = ("recipe", "policy", "only", "skip", "convert_small", "strict")


class TurboCallback(TrainerCallback):
    """`Trainer(model, args, ..., callbacks=[turbo_nn.TurboCallback("fp8_blockwise")])` and nothing else.

    The model is patched when the trainer is made, and one of `model_init` when training begins; `report` says
    what was done. Amax histories of delayed scaling go into each checkpoint's folder and come back from it.
    recipe and options: of `patch`; ValueError or TypeError where they are none. keeps_logits: whether the
    model makes logits in training, which its loss does not need; None: where TRL's trainers read them. The
    trainer moves a model that it shards (FSDP, DeepSpeed) later: it is patched where it is, and on a CPU size
    leaves no layer out.
    """

    report: Report | None = None

    def __init__(self, recipe: RecipeLike, *, keeps_logits: bool | None = None, **options: Any):
        as_policy(recipe)  # what is wrong is said here, not when a trainer is made
        inspect.signature(patch).bind(None, recipe, **options)
        self.recipe, self.options, self.keeps_logits = recipe, options, keeps_logits
        self.patched: nn.Module | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._patch(args, state, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not is_patched(model) or self.patched is not model:
            self._patch(args, state, model)
        if state.global_step and recipe_state(model):
            path = _checkpoint(args, state) / STATE
            if path.exists():
                load_recipe_state(model, torch.load(path, weights_only=True))
            else:
                text = f"{path} is not there: delayed scaling begins anew"
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        histories = recipe_state(model)
        if histories and state.is_world_process_zero:
            torch.save(histories, _checkpoint(args, state) / STATE)

    def _patch(self, args: Any, state: Any, model: nn.Module) -> None:
        self.report, self.patched = patch(model, self.recipe, **self.options), model
        reads = type(args).__module__.startswith("trl.") and not getattr(args, "use_liger_kernel", False)
        for module in model.modules():
            if isinstance(module, CausalLM):
                module.keeps_logits = reads if self.keeps_logits is None else self.keeps_logits
        if state.is_world_process_zero:
            print(self.report)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def patch_for(accelerator: Any, model: nn.Module, config: str | os.PathLike) -> Report:
    """Patch `model` as a YAML file says, before `accelerator.prepare(model, ...)`.

    Amax histories of delayed scaling join the accelerator's checkpoints.
    config: a mapping of `recipe` (a name) or `policy` (a mapping, or a file's path), and, where wanted, of
    `only`, `skip`, `convert_small` and `strict` as `patch` takes them. In the file of `accelerate launch` the
    same keys stand under its `fp8_config`, with `mixed_precision: bf16`. The model is moved to the
    accelerator's device first, if that is what prepare would do. ValueError for other keys.
    """
    settings = read_settings(config)
    if accelerator.device_placement and accelerator.distributed_type not in ("FSDP", "DEEPSPEED"):
        model.to(accelerator.device)
    recipe = settings.pop("recipe", None) or settings.pop("policy")
    report = patch(model, recipe, **settings)
    accelerator.register_for_checkpointing(RecipeState(model))
    accelerator.print(report)
    return report


def read_settings(config: str | os.PathLike) -> dict[str, Any]:
    """The arguments of `patch` in a YAML file; ValueError, one line, where it says anything else."""
    data = read_yaml(config)
    if isinstance(data, dict) and ("fp8_config" in data or "compute_environment" in data):
        data = data.get("fp8_config")
    if not isinstance(data, dict):
        raise ValueError(f"{config}: must map {', '.join(SETTINGS)}, in accelerate's file under fp8_config")
    unknown = [str(key) for key in data if key not in SETTINGS]
    if unknown:
        raise ValueError(f"{config}: {', '.join(unknown)}: use {', '.join(SETTINGS)}")
    if ("recipe" in data) == ("policy" in data):
        raise ValueError(f"{config}: give either recipe or policy")
    for key, kind in (("recipe", str), ("convert_small", bool), ("strict", bool)):
        if key in data and (not isinstance(data[key], kind) or data[key] == ""):
            wanted = "name" if kind is str else "true or false"
            raise ValueError(f"{config}: {key}: {data[key]!r} is no {wanted}")
    if data.get("recipe", "bf16") not in RECIPES:
        raise ValueError(f"{config}: recipe: {data['recipe']!r}: use one of {', '.join(RECIPES)}")
    return data
