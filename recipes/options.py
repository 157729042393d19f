"""The options of finetune.py, from the command line and a YAML file."""

import argparse
import contextlib
from pathlib import Path
from typing import NoReturn

from turbo_nn.recipes import read_yaml


class Parser(argparse.ArgumentParser):
    """Errors are one line: what was wrong, not the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line over `--config` over the defaults; exits with 2 and one line where one is wrong."""
    parser = _parser()
    config = parser.parse_known_args(argv)[0].config
    if config:
        parser.set_defaults(**_from_yaml(parser, config))
    options = parser.parse_args(argv)
    if options.model is None or options.data is None:
        parser.error(f"--{'model' if options.model is None else 'data'} is missing")
    for name, least in {"steps": 1, "batch_size": 1, "grad_accum": 1, "seq_len": 2}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    if Path(options.output).is_file():
        parser.error(f"--output {options.output}: is a file, give a folder")
    for name in ("clip", "warmup", "eval_every", "save_every"):
        if getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must not be negative")
    if options.clip == 0:
        options.clip = float("inf")  # off
    if options.lora is not None and options.lora < 1:
        parser.error(f"--lora {options.lora}: must be at least 1")
    if options.recipe == "none" and options.policy:
        parser.error("--policy with --recipe none: the policy would not be used, drop one of them")
    return options


def _parser() -> Parser:
    parser = Parser(
        "finetune.py",
        description="Fine-tune a causal language model on a text, in FP8 or without. Run it with python or "
        "`accelerate launch` on several GPUs.",
    )
    add = parser.add_argument_group("model and data").add_argument
    add("--model", help="hub id, local folder, .gguf file, or with --random-init a shape of recipes/shapes/")
    add("--random-init", action="store_true", help="only the model's configuration: train from nothing")
    add("--data", help="text file, folder of .txt files, or hub dataset with a `text` column")
    add("--output", default="out/finetune", help="folder for everything that is written (%(default)s)")
    add = parser.add_argument_group("precision").add_argument
    add(
        "--recipe",
        default="fp8_blockwise",
        help="a name of turbo_nn.RECIPES, or none: no patch (%(default)s)",
    )
    add("--policy", help="YAML file of rules, layer by layer; instead of --recipe")
    add("--convert-small", action="store_true", help="on a GPU, also cast layers too small to gain")
    add(
        "--dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="auto: bf16 autocast on a GPU, else fp32",
    )
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train LoRA factors of this rank on every linear layer but the head",
    )
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=int, default=100, help="optimizer steps (%(default)s)")
    add("--batch-size", type=int, default=4, help="sequences a process and micro-step (%(default)s)")
    add("--seq-len", type=int, default=512, help="tokens a sequence (%(default)s)")
    add("--grad-accum", type=int, default=1, help="micro-steps an optimizer step (%(default)s)")
    add("--lr", type=float, default=1e-4, help="peak learning rate, cosine to a tenth (%(default)s)")
    add("--warmup", type=int, default=5, help="steps of linear warm-up (%(default)s)")
    add("--weight-decay", type=float, default=0.0, help="AdamW's (%(default)s)")
    add("--clip", type=float, default=1.0, help="largest gradient norm, 0 for any (%(default)s)")
    add("--seed", type=int, default=0, help="of data order, dropout and random weights (%(default)s)")
    add("--deterministic", action="store_true", help="bitwise repeatable on a GPU too; slower")
    add("--checkpointing", action="store_true", help="recompute activations in backward to save memory")
    add = parser.add_argument_group("keeping track").add_argument
    add("--eval-every", type=int, default=0, metavar="N", help="held-out loss each N steps (0: at the end)")
    add("--save-every", type=int, default=0, metavar="N", help="checkpoint each N steps (0: never)")
    add("--resume", metavar="DIR", help="checkpoint folder to go on from, bit for bit")
    add("--config", metavar="YAML", help="options as `name: value`; the command line wins")
    return parser


def _from_yaml(parser: Parser, path: str) -> dict[str, object]:
    try:
        given = read_yaml(path) or {}
    except (OSError, ValueError) as error:
        parser.error(f"--config {path}: {error}")
    if not isinstance(given, dict):
        parser.error(f"--config {path}: must be `name: value` lines")
    known = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    found = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            parser.error(f"--config {path}: unknown option {key!r}")
        action = known[name]
        if action.choices and value not in action.choices:
            parser.error(f"--config {path}: {key}: {value!r} is none of {', '.join(action.choices)}")
        found[name] = value
        kind = bool if action.nargs == 0 else action.type or str
        if kind is float and type(value) in (int, str):  # YAML reads 1e-3 as text
            with contextlib.suppress(ValueError):
                found[name] = float(value)
        if type(found[name]) is not kind:
            parser.error(f"--config {path}: {key}: {value!r} is no {kind.__name__}")
    return found
