"""Loss curves as a picture."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def read(metrics: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a step that a resumed run repeats counts once, as it was last."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return list({(row["step"], "eval_loss" in row): row for row in rows}.values())


def draw(runs: dict[str, list[dict]], path: Path, title: str) -> Path:
    """Training loss (lines) and held-out loss (dots) of each run against the step."""
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120, layout="constrained")
    for name, rows in runs.items():
        train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
        held_out = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
        (line,) = (
            axes.plot(*zip(*train, strict=True), label=name, linewidth=1.5) if train else axes.plot([], [])
        )
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o", color=line.get_color(), label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def draw_gaps(runs: dict[str, dict], path: Path, title: str) -> Path:
    """Each run's held-out loss against the step, and below it how far it is from the first run's, in percent.

    runs: name -> {"curve": [[step, loss], ...]}, all at the same steps.
    """
    figure, (above, below) = pyplot.subplots(
        2, sharex=True, figsize=(7, 6), dpi=120, layout="constrained", height_ratios=(2, 3)
    )
    base = [loss for _, loss in next(iter(runs.values()))["curve"]]
    for name, run in runs.items():
        steps, losses = zip(*run["curve"], strict=True)
        above.plot(steps, losses, label=name, linewidth=1.2)
        gaps = [100 * (loss / beside - 1) for loss, beside in zip(losses, base, strict=True)]
        below.plot(steps, gaps, label=name, linewidth=1.2)
    above.set(ylabel="held-out loss (nats a token)", title=title)
    below.set(xlabel="step", ylabel=f"from {next(iter(runs))}, %")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path)
    pyplot.close(figure)
    return path
