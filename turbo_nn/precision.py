"""What FP8 does to the numbers of a training run, layer by layer: a log, and a picture of it."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_nn.linear import Linear
from turbo_nn.recipes import RECIPES, name_of
from turbo_ops import Cast, Recipe

SAMPLE = 1 << 18  # elements of a tensor that its SNR is measured on
BLOCK = 128  # rows that are sampled together: blocks along either axis stay whole
NUMBERS = ("amax", "nonfinite", "underflow", "overflow", "snr_db", "snr_t_db")


class Operand(NamedTuple):
    """A tensor of a linear layer and how a recipe casts it: along its rows, and its transpose."""

    name: str
    casts: Callable[[Recipe], tuple[Cast | None, Cast | None]]


OPERANDS = (
    Operand("input", lambda r: (r.fprop.lhs, r.wgrad.rhs)),
    Operand("weight", lambda r: (r.fprop.rhs, r.dgrad.rhs)),
    Operand("grad_output", lambda r: (r.dgrad.lhs, r.wgrad.lhs)),
)
INPUT, WEIGHT, GRAD_OUTPUT = range(3)
WHAT_IF = {name: recipe for name, recipe in RECIPES.items() if recipe.casts and not recipe.history}


class PrecisionLog:
    """Made by `precision_log`; `close()`, or the end of a `with`, writes the rest and takes the hooks out."""

    def __init__(self, model: nn.Module, every: int, path: Path):
        self._every, self._path, self._step = every, path, -1
        self._pending: list[tuple[dict, Tensor]] = []
        self._seen: set[tuple[str, int]] | None = None  # of the step that is sampled; None between
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._begin)]
        for fqn, layer in model.named_modules():
            if isinstance(layer, Linear):
                self._hooks.append(layer.register_forward_hook(self._observer(fqn, layer)))

    def __enter__(self) -> "PrecisionLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._flush()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, model: nn.Module, args: Any) -> None:
        # a forward inside a backward is checkpointing's: no step of its own
        if model.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._flush()
            self._step += 1
            self._seen = set() if self._step % self._every == 0 else None
        elif torch._C._current_graph_task_id() == -1:
            self._seen = None

    def _observer(self, fqn: str, layer: Linear) -> Callable:
        def observe(module: nn.Module, args: tuple, y: Tensor) -> None:
            if self._seen is None or torch.compiler.is_compiling():
                return
            self._record(fqn, layer, INPUT, args[0])
            self._record(fqn, layer, WEIGHT, layer.weight)
            if y.requires_grad:
                y.register_hook(lambda grad: self._record(fqn, layer, GRAD_OUTPUT, grad))

        return observe

    @torch.no_grad()
    def _record(self, fqn: str, layer: Linear, row: int, tensor: Tensor) -> None:
        if self._seen is None or (fqn, row) in self._seen or tensor.numel() == 0:
            return  # a recomputed forward shows the same again
        self._seen.add((fqn, row))
        operand, history = OPERANDS[row], layer.amax_history
        past = None if history is None else history[row, 1:].amax()
        numbers = measure(tensor.detach(), operand.casts(layer.recipe), past)
        what_if = [snr_of(tensor.detach(), operand.casts(recipe)[0]) for recipe in WHAT_IF.values()]
        facts = {"step": self._step, "layer": fqn, "operand": operand.name, "recipe": name_of(layer.recipe)}
        self._pending.append((facts, torch.stack([*numbers, *what_if])))

    def _flush(self) -> None:
        """One transfer from the device for all that a step measured."""
        if not self._pending:
            return
        values = torch.stack([numbers for _, numbers in self._pending]).tolist()
        with self._path.open("a") as file:
            for (facts, _), numbers in zip(self._pending, values, strict=True):
                known = [number if math.isfinite(number) else None for number in numbers]
                row = facts | dict(zip(NUMBERS, known, strict=False))
                row["what_if"] = dict(zip(WHAT_IF, known[len(NUMBERS) :], strict=True))
                file.write(json.dumps(row) + "\n")
        self._pending.clear()


def precision_log(model: nn.Module, every: int = 100, path: str | Path = "precision.jsonl") -> PrecisionLog:
    """Record at each `every`-th step, for each `turbo_nn.Linear` and operand, what its casts lose.

        with turbo_nn.precision_log(model, every=100):
            ...  # train

    A step is a forward of `model` in training mode with gradients on, so each micro-batch counts. A row of
    the JSONL file holds step, layer, operand (input, weight, grad_output), recipe, and
      amax: largest magnitude;
      nonfinite, underflow, overflow: shares of the elements that are NaN or inf, that are not 0 and become
        0, and that are past what a delayed scale can hold;
      snr_db, snr_t_db: signal to noise of the cast along rows and of the transpose's; null where not cast;
      what_if: snr_db that each named recipe would give.
    amax is of the whole tensor, the rest of at most 2^18 elements in blocks of 128 rows, spread evenly. On
    other steps a hook returns at once. Gradients do not change. The file is begun anew.

    ValueError for every < 1, a model without a `turbo_nn.Linear`, or a file that cannot be written.
    """
    if every < 1:
        raise ValueError(f"precision_log: every={every}: use a number of steps, at least 1")
    if not any(isinstance(module, Linear) for module in model.modules()):
        raise ValueError(
            "precision_log: model has no turbo_nn.Linear: call turbo_nn.patch(model, recipe) first"
        )
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    except OSError as error:
        raise ValueError(f"precision_log: path={str(path)!r} cannot be written: {error.strerror}") from None
    return PrecisionLog(model, every, path)


def measure(tensor: Tensor, casts: tuple[Cast | None, Cast | None], past: Tensor | None) -> list[Tensor]:
    """`NUMBERS` of tensor [..., C], scalars on its device; past: the amax of a delayed scale, 0 unknown."""
    how, how_t = casts
    sample, amax = sampled(tensor)
    limit = torch.where(past > 0, past, amax) if past is not None and how and how.history else None
    nan = amax.new_full((), torch.nan)
    share = [
        (~sample.isfinite()).float().mean(),
        nan if how is None else _underflow(sample, _cast(sample, how, amax if limit is None else limit)),
        amax.new_zeros(()) if limit is None else (sample.abs() > limit).float().mean(),
    ]
    scale = amax if limit is None else limit
    straight = nan if how is None else _snr(sample, _cast(sample, how, scale))
    across = nan if how_t is None else _snr(sample.t(), _cast(sample.t(), how_t, scale))
    return [amax, *share, straight, across]


def snr_of(tensor: Tensor, how: Cast | None) -> Tensor:
    """SNR in dB of a cast of tensor [..., C] along its rows; NaN for no cast."""
    sample, amax = sampled(tensor)
    return amax.new_full((), torch.nan) if how is None else _snr(sample, _cast(sample, how, amax))


def sampled(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, C] in fp32, whole blocks of 128 spread evenly over tensor [..., C], and its amax."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    amax = torch.linalg.vector_norm(rows, torch.inf).float()
    blocks, wanted = len(rows) // BLOCK, max(SAMPLE // (BLOCK * max(rows.shape[1], 1)), 1)
    if blocks <= wanted:
        return rows[: wanted * BLOCK].float(), amax
    firsts = torch.arange(wanted, device=rows.device) * (blocks // wanted) * BLOCK
    index = (firsts[:, None] + torch.arange(BLOCK, device=rows.device)).flatten()
    return rows[index].float(), amax


def _cast(sample: Tensor, how: Cast, amax: Tensor) -> Tensor:
    """The sample cast and back; a tensorwise scale is that of the whole tensor, whose amax joins as a row."""
    if how.block != (0, 0):
        return turbo_ops.dequantize(*turbo_ops.cast(sample, how), torch.float32)
    clamped = torch.maximum(torch.minimum(sample, amax), -amax)
    whole = torch.cat([clamped, amax.expand(1, sample.shape[1])])
    how = Cast(how.dtype, how.block)
    return turbo_ops.dequantize(*turbo_ops.cast(whole, how), torch.float32)[:-1]


def _underflow(sample: Tensor, cast: Tensor) -> Tensor:
    nonzero = sample != 0
    return (nonzero & (cast == 0)).float().sum() / nonzero.float().sum().clamp_min(1)


def _snr(signal: Tensor, cast: Tensor) -> Tensor:
    noise = (signal - cast).square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    return 10 * torch.log10(signal.square().sum() / noise)


def read(path: str | Path) -> list[dict]:
    """The rows of a log. ValueError, naming file and line, for what is none; OSError without a file."""
    rows = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append(
                {name: row[name] for name in ("step", "layer", "operand", "recipe", *NUMBERS, "what_if")}
            )
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}:{number}: not a row of a precision log") from None
    if not rows:
        raise ValueError(f"{path}: an empty precision log: was a step of training sampled?")
    return rows


def heat_map(log: str | Path, picture: str | Path) -> Path:
    """Draw SNR in dB, layers down and steps across, a panel for each operand; needs matplotlib."""
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("Agg")
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("heat_map needs matplotlib: pip install 'turbo_nn[recipes]'") from None
    rows = read(log)
    layers, steps = (list(dict.fromkeys(row[name] for row in rows)) for name in ("layer", "step"))
    size = (4 + 0.15 * len(steps), 1.5 + 0.16 * len(layers))
    figure, panels = pyplot.subplots(1, 3, figsize=(3 * size[0], size[1]), layout="constrained", sharey=True)
    for operand, axes in zip(OPERANDS, panels, strict=True):
        grid = _grid((row for row in rows if row["operand"] == operand.name), layers, steps)
        image = axes.imshow(grid, aspect="auto", vmin=10, vmax=40, cmap="RdYlGn", interpolation="nearest")
        axes.set(title=operand.name, xlabel="step", xticks=range(len(steps)), xticklabels=steps)
        axes.set(yticks=range(len(layers)), yticklabels=layers)
    figure.colorbar(image, ax=panels, label="SNR of the cast (dB)")
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)
    return Path(picture)


def _grid(rows: Iterable[dict], layers: list[str], steps: list[int]) -> list[list[float]]:
    grid = [[math.nan] * len(steps) for _ in layers]
    for row in rows:
        if row["snr_db"] is not None:
            grid[layers.index(row["layer"])][steps.index(row["step"])] = row["snr_db"]
    return grid
