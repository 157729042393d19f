"""What FP8 does to the numbers of a training run, layer by layer: a log, and a picture of it."""

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import turbo_ops
from turbo_nn.linear import Linear
from turbo_nn.recipes import RECIPES, name_of
from turbo_ops import Cast, Recipe
from turbo_ops.arch import fp8_dtype
from turbo_ops.casting import AmaxRow

BLOCK = 128  # rows, and columns, that are sampled together: the blocks of every recipe stay whole
SAMPLE, MOST_COLUMNS = 1 << 18, 1 << 11  # elements of a tensor that are looked at, and columns among them
FACTS = ("step", "layer", "operand", "recipe", "dtype")
NUMBERS = ("amax", "nonfinite", "underflow", "overflow", "snr_db", "snr_t_db")
LEAST_NOISE = 1e-10  # of the signal: a cast that loses nothing has 200 dB, for JSON has no infinity


class Operand(NamedTuple):
    """A tensor of a linear layer and how a recipe casts it: along its rows, and its transpose."""

    name: str
    casts: Callable[[Recipe], tuple[Cast | None, Cast | None]]


OPERANDS = (  # in the order of an amax history's rows
    Operand("input", lambda r: (r.fprop.lhs, r.wgrad.rhs)),
    Operand("weight", lambda r: (r.fprop.rhs, r.dgrad.rhs)),
    Operand("grad_output", lambda r: (r.dgrad.lhs, r.wgrad.lhs)),
)
INPUT, WEIGHT, GRAD_OUTPUT = range(3)
# what fp8_delayed would give depends on a past that a layer of another recipe does not have
WHAT_IF = {name: recipe for name, recipe in RECIPES.items() if recipe.casts and not recipe.history}


class Step(NamedTuple):
    """A sampled step, and which (layer, operand) it has rows of."""

    number: int
    seen: set[tuple[str, int]]


class PrecisionLog:
    """Made by `precision_log`; `close()`, or the end of a `with`, writes the rest and takes the hooks out."""

    def __init__(self, model: nn.Module, every: int, path: Path):
        self._every, self._path, self._steps, self._rows = every, path, 0, 0
        self._pending: list[tuple[dict, Tensor]] = []
        self._sampled: Step | None = None
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._begin)]
        for fqn, layer in model.named_modules():
            if isinstance(layer, Linear):
                # first of all hooks: what FSDP gathered is still there, and y is the layer's own
                hook = layer.register_forward_hook(self._observer(fqn), prepend=True, with_kwargs=True)
                self._hooks.append(hook)

    def __enter__(self) -> "PrecisionLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left and remove the hooks; once. Warns where nothing was recorded at all."""
        if not self._hooks:
            return
        self._flush()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not self._rows:
            why = "no step of training ran, or the model is compiled: log one that is not"
            warnings.warn(f"precision_log: {self._path} has no row: {why}", stacklevel=2)

    def _begin(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return  # a forward inside a backward is checkpointing's: no step of its own
        self._sampled = None
        if model.training and torch.is_grad_enabled():
            self._flush()
            if self._steps % self._every == 0:
                self._sampled = Step(self._steps, set())
            self._steps += 1

    def _observer(self, fqn: str) -> Callable:
        def observe(layer: Linear, args: tuple, kwargs: dict, y: Tensor) -> None:
            step = self._sampled
            if step is None or torch.compiler.is_compiling():
                return
            self._record(step, fqn, layer, INPUT, (*args, *kwargs.values())[0])
            self._record(step, fqn, layer, WEIGHT, layer.weight)
            if y.requires_grad:
                y.register_hook(lambda grad: self._record(step, fqn, layer, GRAD_OUTPUT, grad))

        return observe

    @torch.no_grad()
    def _record(self, step: Step, fqn: str, layer: Linear, row: int, tensor: Tensor) -> None:
        if (fqn, row) in step.seen or tensor.numel() == 0 or not self._hooks:
            return  # a recomputed forward shows the same again
        step.seen.add((fqn, row))
        casts = OPERANDS[row].casts(layer.recipe)
        dtypes = [how.dtype for how in casts if how]
        numbers = measure(tensor.detach(), row, casts, layer.amax_history)
        values = step.number, fqn, OPERANDS[row].name, name_of(layer.recipe), max(dtypes, default=None)
        self._pending.append((dict(zip(FACTS, values, strict=True)), numbers))

    def _flush(self) -> None:
        """One transfer from each device for all that a step measured."""
        if not self._pending:
            return
        groups: dict[torch.device, list[tuple[dict, Tensor]]] = {}
        for facts, numbers in self._pending:
            groups.setdefault(numbers.device, []).append((facts, numbers))
        self._rows += len(self._pending)
        self._pending.clear()
        with self._path.open("a") as file:
            for group in groups.values():
                table = torch.stack([numbers for _, numbers in group]).tolist()
                for (facts, _), numbers in zip(group, table, strict=True):
                    known = [number if math.isfinite(number) else None for number in numbers]
                    row = facts | dict(zip(NUMBERS, known, strict=False))
                    row["what_if"] = dict(zip(WHAT_IF, known[len(NUMBERS) :], strict=True))
                    file.write(json.dumps(row) + "\n")


def precision_log(model: nn.Module, every: int = 100, path: str | Path = "precision.jsonl") -> PrecisionLog:
    """Record at each `every`-th step, for each `turbo_nn.Linear` and operand, what its casts lose.

        with turbo_nn.precision_log(model, every=100):
            ...  # train

    A step is a forward of `model` in training mode with gradients on: with gradient accumulation each
    micro-batch is one. A row of the JSONL file holds step (from 0), layer, operand (input, weight,
    grad_output), recipe, dtype (e4m3 or e5m2, the less precise where it casts to both), and
      amax: largest magnitude, null where something is not finite;
      nonfinite, underflow, overflow: shares of elements that are NaN or inf; of those not 0, that become 0
        (along rows); and that are past what a delayed scale holds, 0 for other recipes;
      snr_db, snr_t_db: signal to noise of the cast along rows and of the transpose's; null where not cast
        or all is 0;
      what_if: the lower of both that each named recipe would give (`fp8_delayed` is as `fp8_tensorwise`).
    amax and scales are of the whole tensor; the rest is of at most 2^18 elements: blocks of 128 rows, and
    past 2048 columns blocks of 128 columns, spread evenly. Of a layer that is called twice in a step, one
    call. Other steps do nothing but look whether it is their turn; gradients do not change by a bit.

    A step is written when the next begins. The file is begun anew; ranks need a file each. Under
    torch.compile nothing is recorded, and `close` warns. ValueError for every < 1, a model without a
    `turbo_nn.Linear`, or a file that cannot be written.
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"precision_log: every={every}: use a number of steps, at least 1")
    if not any(isinstance(module, Linear) for module in model.modules()):
        raise ValueError(
            f"precision_log: model={type(model).__name__} has no turbo_nn.Linear: "
            "patch it first, with turbo_nn.patch(model, recipe)"
        )
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    except OSError as error:
        raise ValueError(
            f"precision_log: path={str(path)!r} cannot be written ({error.strerror}): give another"
        ) from None
    return PrecisionLog(model, every, path)


class Sample(NamedTuple):
    """Some of a tensor [R, C], and what the scales of the whole depend on; fp32.

    values [r, c]; bordered [r + 1, c + 1]: values, and the largest magnitudes of their whole rows, columns
    and, in the corner, of the tensor.
    """

    values: Tensor
    bordered: Tensor

    @property
    def amax(self) -> Tensor:
        return self.bordered[-1, -1]


def sampled(tensor: Tensor) -> Sample:
    """At most `SAMPLE` elements of tensor [..., C] in whole blocks; without a look at them from the host."""
    whole = tensor.reshape(-1, tensor.shape[-1])
    columns = _places(whole.shape[1], MOST_COLUMNS // BLOCK, whole.device)
    rows = _places(whole.shape[0], max(SAMPLE // (len(columns) * BLOCK), 1), whole.device)
    chosen, (r, c) = whole[rows], (len(rows), len(columns))
    peaks = torch.linalg.vector_norm(whole, torch.inf, dim=0)  # amax, without a copy for abs
    bordered = torch.empty(r + 1, c + 1, device=whole.device)
    bordered[:r, :c] = chosen[:, columns]
    bordered[:r, c] = torch.linalg.vector_norm(chosen, torch.inf, dim=1)
    bordered[r, :c], bordered[r, c] = peaks[columns], peaks.amax()
    return Sample(bordered[:r, :c], bordered)


def _places(extent: int, blocks: int, device: torch.device) -> Tensor:
    """The indices of an axis, or of so many whole blocks amid equal parts of it."""
    if extent <= blocks * BLOCK:
        return torch.arange(extent, device=device)
    middles = (2 * torch.arange(blocks, device=device) + 1) * (extent // BLOCK) // (2 * blocks)
    return (middles[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()


def measure(
    tensor: Tensor, row: int, casts: tuple[Cast | None, Cast | None], history: Tensor | None
) -> Tensor:
    """`NUMBERS` and `WHAT_IF` of tensor [..., C], the operand of `row`, cast by `casts`; on its device."""
    sample = sampled(tensor)
    values, nan = sample.values, sample.amax.new_full((), torch.nan)
    again = functools.cache(functools.partial(_cast, sample))  # many recipes, few casts
    noise_of = functools.cache(
        lambda *how: torch.linalg.vector_norm(values - again(*how), dtype=torch.double)
    )
    past = _past(row, casts, history)
    noises = [
        nan if how is None else noise_of(how, across, past if recipe is None and how.history else None)
        for recipe in (None, *WHAT_IF.values())
        for how, across in zip(OPERANDS[row].casts(recipe) if recipe else casts, (False, True), strict=True)
    ]
    signal = torch.linalg.vector_norm(values, dtype=torch.double)  # squares of gradients underflow fp32
    noise = torch.stack(noises).view(-1, 2)
    noise = torch.cat([noise[0], torch.fmax(noise[1:, 0], noise[1:, 1])])
    snr = 20 * torch.log10(signal / torch.maximum(noise, signal * LEAST_NOISE))
    how, overflow = casts[0], nan.new_zeros(())
    underflow = nan
    if how is not None:
        nonzero = values != 0
        back = again(how, False, past if how.history else None)
        underflow = (nonzero & (back == 0)).sum() / nonzero.sum().clamp_min(1)
    if past is not None:
        overflow = (values.abs() > past).float().mean()
    nonfinite = (~values.isfinite()).float().mean()
    return torch.cat([torch.stack([sample.amax, nonfinite, underflow, overflow]), snr.float()])


def _past(row: int, casts: tuple[Cast | None, Cast | None], history: Tensor | None) -> Tensor | None:
    """The largest magnitude that a delayed cast holds; None where a tensor's own amax gives the scale."""
    delayed = next((how for how in casts if how and how.history), None)
    if delayed is None or history is None or not AmaxRow(history, row).known:
        return None
    past = history[row, 1:].amax()
    return torch.where(past > 0, past, torch.finfo(fp8_dtype(delayed.dtype, past.device)).max)


def _cast(sample: Sample, how: Cast, across: bool, past: Tensor | None) -> Tensor:
    """The values [r, c] cast and back, as the transpose where `across`; past: see `_past`.

    A scale of a whole axis comes from the border, cast with them.
    """
    r, c = sample.values.shape
    given = sample.bordered if how.block[1] == 0 else sample.values
    if past is not None:
        given = torch.maximum(torch.minimum(given, past), -past)
        given[r, c] = past
    how = Cast(how.dtype, how.block, how.scale_dtype)  # a tensor's own amax: `past` is in it by now
    back = turbo_ops.dequantize(*turbo_ops.cast(given.t() if across else given, how), torch.float32)
    return (back.t() if across else back)[:r, :c]


def read(path: str | Path) -> list[dict]:
    """The rows of a log. ValueError, naming file and line, for what is none; OSError without a file."""
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            kept = {name: row[name] for name in (*FACTS, *NUMBERS, "what_if")}
            numbers = [*(kept[name] for name in NUMBERS), *kept["what_if"].values()]
            if not all(isinstance(value, float | int | None) for value in numbers):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}:{number}: not a row of a precision log") from None
        rows.append(kept)
    if not rows:
        raise ValueError(f"{path}:1: an empty precision log: was a step of training sampled?")
    return rows


def lower_snr(row: dict) -> float | None:
    """The lower SNR in dB of both orientations; None where neither is cast."""
    return min((row[name] for name in ("snr_db", "snr_t_db") if row[name] is not None), default=None)


def heat_map(log: str | Path, picture: str | Path) -> Path:
    """Draw the lower SNR in dB of both orientations, layers down and steps across, a panel an operand.

    picture: a PNG, or what else its suffix says. ImportError without matplotlib; the errors of `read`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("heat_map needs matplotlib: pip install 'turbo_nn[recipes]'") from None
    rows = read(log)
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    steps = sorted({row["step"] for row in rows})
    width = 3 * min(3 + 0.15 * len(steps), 10)
    figure = Figure(figsize=(width, 1.5 + 0.16 * len(layers)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    shown = range(0, len(steps), -(-len(steps) // 10))
    for operand, axes in zip(OPERANDS, panels, strict=True):
        grid = _grid((row for row in rows if row["operand"] == operand.name), layers, steps)
        image = axes.imshow(grid, aspect="auto", vmin=10, vmax=40, cmap="RdYlGn", interpolation="nearest")
        axes.set(title=operand.name, xlabel="step", xticks=shown, xticklabels=[steps[i] for i in shown])
        axes.set(yticks=range(len(layers)), yticklabels=layers)
    figure.colorbar(image, ax=panels, label="SNR of the cast (dB)")
    figure.savefig(picture, dpi=100)
    return Path(picture)


def _grid(rows: Iterable[dict], layers: list[str], steps: list[int]) -> list[list[float]]:
    """[layer][step] of SNR in dB, NaN where there is none."""
    at = {(row["layer"], row["step"]): lower_snr(row) for row in rows}
    values = [[at.get((layer, step)) for step in steps] for layer in layers]
    return [[math.nan if value is None else value for value in line] for line in values]
