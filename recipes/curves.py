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
