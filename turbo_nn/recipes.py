"""Recipes by name, and policies that give each layer its own."""

import fnmatch
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from turbo_ops import Cast, Gemm, Recipe


def _hybrid(forward: Cast, backward: Cast) -> Recipe:
    return Recipe(Gemm(forward, forward), Gemm(backward, forward), Gemm(backward, forward))


_TENSOR, _TENSOR_E5M2, _ROW = Cast("e4m3", (0, 0)), Cast("e5m2", (0, 0)), Cast("e4m3", (1, 0))
_ACTIVATION, _WEIGHT, _MX = Cast("e4m3", (1, 128)), Cast("e4m3", (128, 128)), Cast("e4m3", (1, 32), "e8m0")

RECIPES: dict[str, Recipe] = {
    # no casts: the layers stay in the dtype they have
    "bf16": Recipe(),
    # one scale a tensor, found anew each step; E5M2 gradients (arXiv 2209.05433)
    "fp8_tensorwise": _hybrid(_TENSOR, _TENSOR_E5M2),
    # one scale a row of each operand; a GEMM's error follows its own rows, so E4M3 serves gradients too
    "fp8_rowwise": _hybrid(_ROW, _ROW),
    # the same, with the gradient of the weight, which sums over all tokens, in high precision
    "fp8_rowwise_hp_wgrad": Recipe(Gemm(_ROW, _ROW), Gemm(_ROW, _ROW)),
    # 1x128 scales of activations and gradients, 128x128 of weights (DeepSeek-V3, arXiv 2412.19437)
    "fp8_blockwise": Recipe(
        Gemm(_ACTIVATION, _WEIGHT), Gemm(_ACTIVATION, _WEIGHT), Gemm(_ACTIVATION, _ACTIVATION)
    ),
    # power-of-two scales of 32 elements (OCP Microscaling Formats v1.0)
    "mxfp8": _hybrid(_MX, _MX),
}


@dataclass(frozen=True)
class Policy:
    """Ordered rules (pattern, recipe's name, recipe): the first pattern that matches a layer decides.

    A pattern is a glob over the whole fully qualified name ("*.layers.0.*"; `*` crosses dots), or structural:
    `blocks[0]`, `blocks[-1]` (a decoder block and all in it; `blocks[0].mlp.*` works too) and `head`.
    """

    rules: tuple[tuple[str, str, Recipe], ...]

    def for_model(self, model: nn.Module) -> "Policy":
        """The same rules with structural patterns spelled out; ValueError for one that matches no module."""
        names, blocks, head = (
            [name for name, _ in model.named_modules()],
            find_blocks(model),
            find_head(model),
        )
        rules = []
        for pattern, name, recipe in self.rules:
            spelled = _spell(pattern, blocks, head)
            if not any(_matches(spelled, fqn) for fqn in names):
                raise ValueError(f"policy: pattern {pattern!r} matches no module of {type(model).__name__}")
            rules.append((spelled, name, recipe))
        return Policy(tuple(rules))

    def at(self, fqn: str) -> tuple[str, Recipe] | None:
        """(name, recipe) of the first rule that matches a layer, or None."""
        return next(((name, recipe) for pattern, name, recipe in self.rules if _matches(pattern, fqn)), None)


def resolve(recipe: object) -> Policy:
    """A recipe's name, a Recipe, a Policy, a mapping of patterns to either, or a YAML file's path -> Policy.

    Raises ValueError for an unknown name, with the known ones, and for what a YAML file has wrong.
    """
    if isinstance(recipe, Policy):
        return recipe
    if isinstance(recipe, Recipe):
        name = next((known for known, value in RECIPES.items() if value == recipe), "custom")
        return Policy((("*", name, recipe),))
    if isinstance(recipe, Mapping):
        return _from_rules(recipe, RECIPES)
    if isinstance(recipe, os.PathLike) or (isinstance(recipe, str) and recipe.endswith((".yaml", ".yml"))):
        return load_policy(recipe)
    return _from_rules({"*": recipe}, RECIPES)


def load_policy(path: str | os.PathLike) -> Policy:
    """A policy from YAML: a mapping of patterns to recipes, or `recipes:` of your own beside `rules:`.

        recipes: {mine: {fprop: {lhs: {dtype: e4m3, block: [1, 0]}, rhs: {dtype: e4m3, block: [1, 0]}}}}
        rules: {"blocks[0]": bf16, "*": mine}

    Raises ValueError, in one line that names the file, for anything else.
    """
    try:
        content = yaml.load(Path(path).read_text(), Loader=_UniqueKeys)
        if not isinstance(content, dict) or not content:
            raise ValueError("must map patterns to recipes")
        own = content.get("recipes") if "rules" in content else None
        if not isinstance(own or {}, dict) or not isinstance(content.get("rules", {}), dict):
            raise ValueError("`recipes` and `rules` must be mappings")
        known = RECIPES | {name: _recipe(table) for name, table in (own or {}).items()}
        return _from_rules(content.get("rules", content), known)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"policy {path}: {' '.join(str(error).split())}") from error


class _UniqueKeys(yaml.SafeLoader):
    """YAML keeps the last of two equal keys; a policy's order matters, so that is an error here."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        if repeated := {str(key) for key in keys if keys.count(key) > 1}:
            raise ValueError(f"repeated key {', '.join(sorted(repeated))}")
        return super().construct_mapping(node, deep)


def _recipe(table: Mapping[str, Any]) -> Recipe:
    gemms = {}
    for name, row in table.items():
        sides = {side: Cast(**cells) for side, cells in row.items() if side != "fast_accum"}
        gemms[name] = Gemm(**sides, fast_accum=row.get("fast_accum", True))
    return Recipe(**gemms)


def _from_rules(rules: Mapping[str, object], known: Mapping[str, Recipe]) -> Policy:
    found = []
    for pattern, value in rules.items():
        if isinstance(value, Recipe):
            found.append((str(pattern), "custom", value))
        elif value in known:
            found.append((str(pattern), str(value), known[str(value)]))
        else:
            raise ValueError(f"unknown recipe {value!r} for {pattern!r}: use one of {', '.join(known)}")
    return Policy(tuple(found))


def _spell(pattern: str, blocks: list[str], head: str | None) -> str:
    if pattern == "head" and head is not None:
        return head
    indexed = re.match(r"blocks\[(-?\d+)\]", pattern)
    if not indexed:
        return pattern
    index = int(indexed[1])
    if not -len(blocks) <= index < len(blocks):
        raise ValueError(f"policy: {indexed[0]} of a model with {len(blocks)} blocks")
    return blocks[index] + (
        pattern[indexed.end() :] or "|"
    )  # "|" cannot be in a name: the block and all in it


def _matches(pattern: str, fqn: str) -> bool:
    if pattern.endswith("|"):
        return f"{fqn}.".startswith(f"{pattern[:-1]}.")
    return fnmatch.fnmatchcase(fqn, pattern)


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the repeated blocks: the children of the longest ModuleList of one class."""
    lists = [
        [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    return max(lists, key=len, default=[])


def find_head(model: nn.Module) -> str | None:
    """Name of the output layer: `get_output_embeddings()`, else the last Linear outside the blocks."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    inside = tuple(f"{block}." for block in find_blocks(model))
    outside = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.startswith(inside)]
    return (
        next((n for n, m in model.named_modules() if m is head and m is not None), None)
        or (outside or [None])[-1]
    )
