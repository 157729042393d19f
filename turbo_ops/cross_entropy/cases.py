"""Inputs of cross_entropy_ and cross_entropy."""

from collections.abc import Callable
from functools import partial

import torch

SHAPES = {"test": [(1, 1), (0, 8), (5, 33), (7, 5000)], "bench": [(1024, 128256)]}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN = (-100, 0.0, 0.0, 0.0)  # ignore_index, label_smoothing, z_loss, softcap
OPTIONS = {
    "ignore 3": (3, 0.0, 0.0, 0.0),
    "smoothed": (-100, 0.1, 0.0, 0.0),
    "z": (-100, 0.0, 1e-2, 0.0),
    "capped": (-100, 0.1, 1e-2, 5.0),
}


def cross_entropy_(size: str, device: torch.device) -> dict:
    found: dict[str, Callable[[], tuple]] = {}
    for shape in SHAPES[size]:
        for name, dtype in DTYPES.items() if size == "test" else [("bf16", torch.bfloat16)]:
            make = partial(_make, shape, dtype, device)
            found[f"grad-{name}-{shape[0]}x{shape[1]}"] = partial(make, True, PLAIN)
            found[f"loss-{name}-{shape[0]}x{shape[1]}"] = partial(make, False, PLAIN)
    if size == "test":
        make = partial(_make, (6, 300), torch.float32, device, True)
        found |= {f"grad-fp32-{name.replace(' ', '-')}": partial(make, o) for name, o in OPTIONS.items()}
        found["loss-no-class"] = lambda: _no_class(_make((6, 300), torch.float32, device, False, PLAIN))
    return found


def cross_entropy(size: str, device: torch.device) -> dict:
    """As `cross_entropy_` without options; a label that is no class has no peak to agree on."""
    made = cross_entropy_(size, device).items()
    return {
        name: partial(_plain, make) for name, make in made if name.startswith("loss-") and "no" not in name
    }


def _plain(make: Callable[[], tuple]) -> tuple:
    return *make()[:2], -100


def _make(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, grad: bool, options: tuple
) -> tuple:
    rows, classes = shape
    logits = torch.randn(shape, device=device).mul_(3).to(dtype)
    labels = torch.randint(classes, (rows,), device=device)
    labels[1::3] = options[0]
    return logits, labels, torch.rand(rows, device=device) if grad else None, *options


def _no_class(args: tuple) -> tuple:
    args[1][:2] = torch.tensor([300, -1])
    return args
