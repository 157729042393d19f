"""A causal language model and its tokenizer, from wherever they are."""

import copy
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from corpus import ByteTokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SHAPES = Path(__file__).parent / "shapes"


def load(source: str, random_init: bool) -> tuple[nn.Module, Any]:
    """(model in fp32, tokenizer). Raises ValueError, naming --model, where there is none.

    source: hub id, folder, .gguf file; with random_init also the name of a file in recipes/shapes.
    """
    offline_without_hub()
    if random_init:
        model = AutoModelForCausalLM.from_config(_config(source), dtype=torch.float32)
        return model, _tokenizer_or_bytes(source)
    path = Path(source).expanduser()
    if source.startswith((".", "/", "~")) and not path.exists():
        raise ValueError(f"--model {source}: no such file or folder")
    where = {"pretrained_model_name_or_path": source}
    ggufs = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if ggufs and not list(path.glob("*.safetensors")):
        return from_gguf(ggufs[0])
    try:
        return AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32
        ), AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(_one_line(source, error)) from error


def from_gguf(path: Path) -> tuple[nn.Module, Any]:
    """The weights dequantized, in a model that transformers saves: the one it loads counts as quantized."""
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(**where)


def offline_without_hub() -> None:
    """Ask the hub once whether it is there: its client retries each file for 23 s."""
    try:
        urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=5).close()
    except urllib.error.HTTPError:
        return  # it answered
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True


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
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError, TypeError, AttributeError):
        return ByteTokenizer()
    return (
        tokenizer if tokenizer("text")["input_ids"] else ByteTokenizer()
    )  # a config alone gives an empty one


def _one_line(source: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if Path(source).is_dir():
        return f"--model {source}: holds no model that can be loaded: {text[:200]}"
    return f"--model {source}: no such folder or .gguf file, and no hub answered with it: {text[:120]}"
