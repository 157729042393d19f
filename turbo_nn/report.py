"""What `patch` did to each module, and why not more."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby


@dataclass(frozen=True)
class Verdict:
    """One candidate: patched by `rule` to run `recipe` on `backend`, or left for `reason`.

    A module that is left although its recipe asks for it keeps that recipe's name; what nobody asks for
    (bf16 by policy, an embedding, a router, a tied head, a LoRA factor) has recipe None.
    """

    fqn: str
    module: str
    rule: str | None
    recipe: str | None
    backend: str | None
    reason: str | None


class Report:
    """The verdicts in the model's order; printed, a table where equal layers of all blocks share a row."""

    def __init__(self, verdicts: list[Verdict]):
        self.verdicts = verdicts

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)

    @property
    def patched(self) -> list[Verdict]:
        return [v for v in self if v.reason is None]

    @property
    def left(self) -> list[Verdict]:
        return [v for v in self if v.reason is not None]

    @property
    def refused(self) -> list[Verdict]:
        """Left although the recipe asked for them: what `strict=True` raises for."""
        return [v for v in self.left if v.recipe is not None]

    def to_json(self) -> str:
        """A JSON list of verdicts."""
        return json.dumps([asdict(v) for v in self], indent=1)

    def __str__(self) -> str:
        rows = [("layer", "module", "recipe", "backend, or why it was left")]
        for (fqn, module, recipe, last), group in _grouped(self.verdicts):
            rows.append((_numbered(fqn, group), module, recipe or "-", last))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[3]}"
            for row in rows
        ]
        return "\n".join([*lines, f"{len(self.patched)} patched, {len(self.left)} left"])


class LeftError(ValueError):
    """`strict=True` and the recipe asks for layers that cannot be patched; `report` has all verdicts."""

    def __init__(self, report: Report):
        self.report = report
        lines = [f"  {v.fqn} ({v.module}): {v.reason}" for v in report.refused]
        super().__init__("\n".join([f"{len(lines)} layers that the recipe asks for would be left:", *lines]))


def _grouped(verdicts: list[Verdict]) -> list[tuple[tuple, list[int]]]:
    """((fqn with its first index as *, module, recipe, last column), indices), in the model's order."""
    groups: dict[tuple, list[int]] = {}
    for v in verdicts:
        index = re.search(r"(?<=\.)\d+(?=\.)", v.fqn)
        fqn = v.fqn if index is None else f"{v.fqn[: index.start()]}*{v.fqn[index.end() :]}"
        key = (fqn, v.module, v.recipe, (v.reason and f"left: {v.reason}") or v.backend or "")
        groups.setdefault(key, []).append(-1 if index is None else int(index[0]))
    return list(groups.items())


def _numbered(fqn: str, indices: list[int]) -> str:
    """ "layers.*.mlp" and [0, 1, 2, 5] -> "layers.[0-2,5].mlp"."""
    if "*" not in fqn:
        return fqn
    runs = [
        [i for _, i in run] for _, run in groupby(enumerate(sorted(indices)), lambda pair: pair[1] - pair[0])
    ]
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return fqn.replace("*", spans[0] if len(indices) == 1 else f"[{','.join(spans)}]", 1)
