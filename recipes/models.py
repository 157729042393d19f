"""A causal language model and its tokenizer, from wherever they are."""

import json
from pathlib import Path
from typing import Any

import torch
from corpus import ByteTokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SHAPES = Path(__file__).parent / "shapes"


def load(source: str, random_init: bool) -> tuple[nn.Module, Any]:
    """(model in fp32, tokenizer). Raises ValueError, naming --model, where there is none.

    source: hub id, folder, .gguf file; with random_init also the name of a file in recipes/shapes.
    """
    if random_init:
        model = AutoModelForCausalLM.from_config(_config(source), dtype=torch.float32)
        return model, _tokenizer_or_bytes(source)
    path = Path(source).expanduser()
    where = {"pretrained_model_name_or_path": source}
    ggufs = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if ggufs and not list(path.glob("*.safetensors")):
        where = {"pretrained_model_name_or_path": str(ggufs[0].parent), "gguf_file": ggufs[0].name}
    try:
        return AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32
        ), AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(_one_line(source, error)) from error


def _config(source: str) -> Any:
    shape = SHAPES / f"{source}.json"
    try:
        if shape.exists():
            table = json.loads(shape.read_text())
            return AutoConfig.for_model(**table)
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        names = ", ".join(sorted(path.stem for path in SHAPES.glob("*.json")))
        raise ValueError(f"{_one_line(source, error)}; shapes shipped for --random-init: {names}") from error


def _tokenizer_or_bytes(source: str) -> Any:
    """A model that starts from nothing can read bytes where no tokenizer is at hand."""
    if (SHAPES / f"{source}.json").exists():
        return ByteTokenizer()
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError, TypeError, AttributeError):
        return ByteTokenizer()


def _one_line(source: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"--model {source}: no such folder or .gguf file, and no hub answered with it: {text[:200]}"
