"""What `patch` did to each layer, and why."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Verdict:
    """One layer: patched by `rule` to run `recipe` on `backend`, or left for `reason`.

    A layer that is left although the recipe asks for it keeps that recipe's name. What nobody asks for (bf16,
    only, skip, an embedding, a router, a tied head, a LoRA factor) has recipe None, and so have norms.
    """

    fqn: str
    module: str
    rule: str | None = None
    recipe: str | None = None
    backend: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Report:
    """A verdict for each module with parameters of its own. Printed, a table; equal blocks share a line."""

    verdicts: tuple[Verdict, ...]

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)

    @property
    def patched(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.reason is None]

    @property
    def left(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.reason is not None]

    @property
    def refused(self) -> list[Verdict]:
        """Left although the recipe asked for them: what `strict=True` raises for."""
        return [verdict for verdict in self.left if verdict.recipe is not None]

    def to_json(self) -> str:
        """A list of objects with the fields of `Verdict`."""
        return json.dumps([asdict(verdict) for verdict in self.verdicts], indent=1)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "module", "recipe", "backend, or why it was left")]
        rows += [(fqn, *cells) for fqn, cells in _lines(self.verdicts)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        table = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
        return "\n".join([*table, f"patched {len(self.patched)} of {len(self)}, left {len(self.left)}"])


class LeftError(ValueError):
    """`patch(strict=True)`: layers that the recipe asks for cannot have it. `report` has all verdicts."""

    def __init__(self, report: Report):
        self.report = report
        what = f"{len(report.refused)} layers that the recipe asks for would be left"
        how = "skip them, or give them bf16 in a policy"
        lines = [f"  {fqn}: {cells[-1]}" for fqn, cells in _lines(report.refused)]
        super().__init__("\n".join([f"{what} ({how}):", *lines]))


def _lines(verdicts: tuple[Verdict, ...] | list[Verdict]) -> list[tuple[str, tuple[str, ...]]]:
    """(fqn, cells) of each verdict; those that differ in numbers of the fqn only share one: `up.[0-3]`."""
    rows = [
        (
            tuple(v.fqn.split(".")),
            (v.module, v.recipe or "-", (v.reason and f"left: {v.reason}") or v.backend or "-"),
        )
        for v in verdicts
    ]
    for place in range(max((len(parts) for parts, _ in rows), default=0)):
        groups: dict[tuple, list[int]] = {}
        for parts, cells in rows:
            numbered = len(parts) > place and parts[place].isdigit()
            key = (parts[:place], parts[place:] if not numbered else parts[place + 1 :], numbered, cells)
            groups.setdefault(key, []).append(int(parts[place]) if numbered else 0)
        rows = [
            ((*before, _ranges(numbers), *after) if numbered else before + after, cells)
            for (before, after, numbered, cells), numbers in groups.items()
        ]
    return [(".".join(parts) or "(the model)", cells) for parts, cells in rows]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "[0-2,5]"; a single number stays itself."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    text = ",".join("-".join(map(str, span)) for span in spans)
    return text if len(numbers) == 1 else f"[{text}]"
