"""Fine-tune a causal language model in FP8 (or without, as its own twin) on accelerate.

    python recipes/finetune.py --model HuggingFaceTB/SmolLM2-135M --data corpus.txt --recipe fp8_blockwise

Everything random, the order of the data included, follows from (seed, step): a resumed run is bit for bit the
one that was not interrupted. Under --output: metrics.jsonl, tensorboard/, loss.png, report.json, model/
(safetensors that plain transformers loads), adapter/ with --lora, and checkpoint-N/.
"""

import argparse
import hashlib
import json
import math
import os
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; for --deterministic
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import curves
import models
import options as options_of
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from corpus import Corpus, read_text
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import turbo_nn

GIB = 1024**3


def main(argv: list[str] | None = None) -> int:
    options = options_of.parse(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return run(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"finetune.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    # Weights stay fp32 and autocast computes in bf16: AdamW's small updates round away in bf16 weights.
    on_gpu = torch.cuda.is_available()
    bf16 = options.dtype == "bf16" or (options.dtype == "auto" and on_gpu)
    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", cpu=not on_gpu)
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
    set_seed(options.seed)
    policy = check_recipe(options)
    text = read_text(options.data)
    decides = trajectory(options, policy, text, accelerator.num_processes)
    first = resume_step(options, decides)
    model, tokenizer = models.load(options.model, options.random_init)
    corpus = Corpus.cut(
        tokenizer(text)["input_ids"], options.seq_len, options.batch_size * accelerator.num_processes
    )
    model = adapted(model, options).to(accelerator.device)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    report = patched(model, policy, options, accelerator, output)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=options.lr, weight_decay=options.weight_decay
    )
    accelerator.register_for_checkpointing(turbo_nn.RecipeState(model))
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if first:
        accelerator.load_state(options.resume)
    with Log(output, accelerator, options, first) as log:
        train(prepared, optimizer, corpus, accelerator, options, decides, first, log)
    if accelerator.is_main_process:
        save(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), tokenizer, output, report)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return 0


def check_recipe(options: argparse.Namespace) -> object:
    """What `turbo_nn.patch` is called with, or None; ValueError before a model is loaded for nothing."""
    if options.policy:
        return turbo_nn.load_policy(options.policy)
    if options.recipe == "none":
        return None
    if options.recipe not in turbo_nn.RECIPES:
        raise ValueError(f"--recipe {options.recipe}: use one of none, {', '.join(turbo_nn.RECIPES)}")
    return options.recipe


def adapted(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """The model in training mode, with LoRA factors where they are asked for."""
    model.config.use_cache = False
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.lora:
        from peft import LoraConfig, get_peft_model

        if options.checkpointing:
            model.enable_input_require_grads()
        model = get_peft_model(
            model, LoraConfig(r=options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return model.train()


def patched(
    model: nn.Module, policy: object, options: argparse.Namespace, accelerator: Accelerator, output: Path
) -> turbo_nn.Report | None:
    """Patch in place, print and keep the report; ValueError where no layer can take the recipe."""
    if policy is None:
        return None
    report = turbo_nn.patch(model, policy, convert_small=options.convert_small)
    if accelerator.is_main_process:
        print(report)
        (output / "report.json").write_text(report.to_json())
    if report.refused and not any(v.recipe for v in report.patched):
        name = f"--policy {options.policy}" if options.policy else f"--recipe {options.recipe}"
        reasons = sorted({v.reason for v in report.refused if v.reason})
        raise ValueError(
            f"{name}: no layer of this model can take it: {'; '.join(reasons[:3])}; or use --convert-small"
        )
    return report


def trajectory(options: argparse.Namespace, policy: object, text: str, processes: int) -> dict[str, Any]:
    """All that the weights after a step follow from: a resumed run must have the same."""
    names = (
        "model", "random_init", "dtype", "convert_small", "lora", "steps", "batch_size", "seq_len",
        "grad_accum", "lr", "warmup", "weight_decay", "clip", "seed",
    )  # fmt: skip
    decides = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    decides |= {"--policy": repr(policy)} if options.policy else {"--recipe": options.recipe}
    decides["--data"] = f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return decides | {"processes": processes}


def resume_step(options: argparse.Namespace, decides: dict[str, Any]) -> int:
    """The step to go on from: 0, or that of --resume. ValueError where its run was another one."""
    if not options.resume:
        return 0
    file = Path(options.resume) / "step.json"
    if not file.exists():
        raise ValueError(
            f"--resume {options.resume}: no checkpoint there, expected one like out/finetune/checkpoint-100"
        )
    try:
        state = json.loads(file.read_text())
        step, before = state["step"], state["decides"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--resume {options.resume}: step.json is damaged: {error!r}") from None
    others = [
        f"{name} {before.get(name)}, not {decides.get(name)}"
        for name in before | decides
        if before.get(name) != decides.get(name)
    ]
    if others:
        raise ValueError(f"--resume {options.resume}: was trained with {'; '.join(others)}: give the same")
    if step >= options.steps:
        raise ValueError(f"--resume {options.resume}: is at step {step}, the last of --steps {options.steps}")
    return step


def learning_rate(options: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak; a function of the step alone."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(
    model: nn.Module, optimizer: Any, corpus: Corpus, accelerator: Accelerator, options: argparse.Namespace,
    decides: dict, first: int, log: "Log",
) -> None:  # fmt: skip
    tokens = options.batch_size * options.seq_len * options.grad_accum * accelerator.num_processes
    for step in range(first, options.steps):
        began = time.perf_counter()
        torch.manual_seed(options.seed * 1_000_003 + step)  # dropout
        rate = learning_rate(options, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = torch.zeros((), device=accelerator.device)
        for micro in range(options.grad_accum):
            last = micro == options.grad_accum - 1
            ids = corpus.batch(
                options.seed, step * options.grad_accum + micro, options.batch_size,
                accelerator.process_index, accelerator.num_processes,
            ).to(accelerator.device)  # fmt: skip
            with nullcontext() if last else accelerator.no_sync(model):
                part = model(input_ids=ids, labels=ids).loss / options.grad_accum
                accelerator.backward(part)
            loss += part.detach()
        norm = accelerator.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss = accelerator.reduce(loss, "mean").item()
        seconds = time.perf_counter() - began
        row = {
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": float(norm),
            "tokens_per_second": tokens / seconds,
        }
        log.write(step + 1, {**row, "seconds": seconds, "peak_memory_gib": peak_memory()})
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} at step {step + 1}: lower --lr, or try a recipe with finer scales"
            )
        done = step + 1
        if done == options.steps or (options.eval_every and done % options.eval_every == 0):
            log.write(done, {"eval_loss": held_out_loss(model, corpus, accelerator, options)})
        if options.save_every and done % options.save_every == 0:
            checkpoint(accelerator, options, decides, done)


@torch.no_grad()
def held_out_loss(
    model: nn.Module, corpus: Corpus, accelerator: Accelerator, options: argparse.Namespace
) -> float:
    """Mean loss of at most 8 held-out batches, the same ones each time and on each rank."""
    model.eval()
    batches = corpus.held_out[: 8 * options.batch_size].split(options.batch_size)
    losses = [
        model(input_ids=ids.to(accelerator.device), labels=ids.to(accelerator.device)).loss for ids in batches
    ]
    model.train()
    return torch.stack(losses).mean().item()


def checkpoint(accelerator: Accelerator, options: argparse.Namespace, decides: dict, step: int) -> None:
    folder = Path(options.output) / f"checkpoint-{step}"
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        (folder / "step.json").write_text(json.dumps({"step": step, "decides": decides}))


def save(model: nn.Module, tokenizer: Any, output: Path, report: turbo_nn.Report | None) -> None:
    """Safetensors that need no turbo_nn: its classes are taken out first, its state_dict never differed."""
    turbo_nn.unpatch(model)
    if hasattr(model, "merge_and_unload"):
        model.save_pretrained(output / "adapter")
        model = model.merge_and_unload()
    model.config.use_cache = True
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(str(output / "model"))
    counts = f", {len(report.patched)} layers patched and {len(report.left)} left" if report else ""
    print(f"saved {output / 'model'}{counts}")


def peak_memory() -> float:
    """GiB: allocated on the GPU, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


class Log:
    """Metrics as JSONL and TensorBoard, a progress bar, and at the end the curve; the main process writes."""

    def __init__(self, output: Path, accelerator: Accelerator, options: argparse.Namespace, first: int):
        self.main = accelerator.is_main_process
        self.output = output
        if not self.main:
            return
        self.path = output / "metrics.jsonl"
        kept = (
            [row for row in curves.read(self.path) if row["step"] <= first]
            if first and self.path.exists()
            else []
        )
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self.board = SummaryWriter(str(output / "tensorboard"), purge_step=first + 1 if first else None)
        self.bar = tqdm(
            total=options.steps, initial=first, unit="step", desc=options.policy or options.recipe
        )

    def __enter__(self) -> "Log":
        return self

    def write(self, step: int, row: dict[str, float]) -> None:
        if not self.main:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")
        for name, value in row.items():
            self.board.add_scalar(name, value, step)
        if "loss" in row:
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {row['tokens_per_second']:.0f} tokens/s")
            self.bar.update()

    def __exit__(self, *error: object) -> None:
        if not self.main:
            return
        self.bar.close()
        self.board.close()
        rows = curves.read(self.path)
        if rows:
            print(f"loss curve: {curves.draw({'loss': rows}, self.output / 'loss.png', str(self.output))}")


if __name__ == "__main__":
    sys.exit(main())
