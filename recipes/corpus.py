"""A text as token ids, and batches of it that depend on (seed, epoch, step) alone."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


class ByteTokenizer:
    """One token a byte, 256 ends a document: for models that start from nothing."""

    eos_token_id = 256
    vocab_size = 257

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save_pretrained(self, folder: str) -> None:
        """Nothing to save: bytes are bytes."""


def read_text(source: str) -> str:
    """A text file, the *.txt files of a folder in order, or the `text` column of a hub dataset's train split.

    Raises ValueError naming --data where there is nothing to read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path.read_text(errors="replace")
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise ValueError(f"--data {source}: no *.txt file in this folder")
        return "\n\n".join(file.read_text(errors="replace") for file in files)
    if path.suffix or source.startswith((".", "/", "~")):
        raise ValueError(f"--data {source}: no such file or folder")
    from datasets import load_dataset
    from models import offline_without_hub

    offline_without_hub()
    try:
        return "\n\n".join(load_dataset(source, split="train")["text"])
    except Exception as error:  # the hub's client raises many kinds
        raise ValueError(
            f"--data {source}: no such file or folder, and no hub dataset with a `text` column "
            f"could be read ({type(error).__name__}); give a text file"
        ) from error


@dataclass(frozen=True)
class Corpus:
    """Sequences of `length` tokens, cut from one text without overlap; the last tenth is held out."""

    train: Tensor  # [sequences, length]
    held_out: Tensor

    @classmethod
    def cut(cls, ids: list[int], length: int, batch: int) -> "Corpus":
        """ValueError, naming --data, where the text gives less than one batch and a held-out sequence."""
        sequences = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
        held_out = max(1, len(sequences) // 10)
        if len(sequences) - held_out < batch:
            raise ValueError(
                f"--data: {len(ids)} tokens are {len(sequences)} sequences of {length}, too few for "
                f"batches of {batch}: give a longer text, or a smaller --seq-len or --batch-size"
            )
        return cls(sequences[:-held_out], sequences[-held_out:])

    def batch(self, seed: int, step: int, size: int, rank: int = 0, ranks: int = 1) -> Tensor:
        """Rank's rows [size, length] at `step`; an epoch is a permutation drawn from (seed, epoch)."""
        total = size * ranks
        per_epoch = len(self.train) // total
        epoch, index = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train), generator=generator)
        return self.train[order[index * total + rank * size :][:size]]
