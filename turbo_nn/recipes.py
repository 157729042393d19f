"""The named recipes as data, and policies: which layer gets which recipe.

A recipe is three GEMMs (fprop, dgrad, wgrad) of two operands, each cast by a `Cast` or kept. Everywhere, it
is given as a name of `RECIPES`, a `Recipe`, or a policy: a `Policy`, its mapping, or its YAML file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from turbo_ops import Cast, Gemm, Recipe

_TENSOR, _WIDE_TENSOR = Cast("e4m3", (0, 0)), Cast("e5m2", (0, 0))
_ROW = Cast("e4m3", (1, 0))
_TILE, _SQUARE = Cast("e4m3", (1, 128)), Cast("e4m3", (128, 128))
_MX = Cast("e4m3", (1, 32), "e8m0")

BF16 = Recipe()
"""No casts: every GEMM in the precision of its operands."""
FP8_TENSORWISE = Recipe(Gemm(_TENSOR, _TENSOR), Gemm(_WIDE_TENSOR, _TENSOR), Gemm(_WIDE_TENSOR, _TENSOR))
"""One scale a tensor; E4M3 forward, E5M2 for grad_output ("hybrid", arXiv 2209.05433)."""
_DELAYED, _WIDE_DELAYED = Cast("e4m3", (0, 0), history=16), Cast("e5m2", (0, 0), history=16)
FP8_DELAYED = Recipe(Gemm(_DELAYED, _DELAYED), Gemm(_WIDE_DELAYED, _DELAYED), Gemm(_WIDE_DELAYED, _DELAYED))
"""`fp8_tensorwise` with the largest amax of 16 steps for scale: tensors are read once (arXiv 2209.05433)."""
FP8_ROWWISE = Recipe(Gemm(_ROW, _ROW), Gemm(_ROW, _ROW), Gemm(_ROW, _ROW))
"""One scale a row of every operand, E4M3 throughout (torchao's `rowwise`)."""
FP8_ROWWISE_HP_WGRAD = Recipe(Gemm(_ROW, _ROW), Gemm(_ROW, _ROW))
"""`fp8_rowwise` with the weight gradient in high precision (torchao's `rowwise_with_gw_hp`)."""
FP8_BLOCKWISE = Recipe(Gemm(_TILE, _SQUARE), Gemm(_TILE, _SQUARE), Gemm(_TILE, _TILE))
"""1x128 for activations and gradients, 128x128 for weights (DeepSeek-V3, arXiv 2412.19437)."""
MXFP8 = Recipe(Gemm(_MX, _MX), Gemm(_MX, _MX), Gemm(_MX, _MX))
"""1x32 blocks with power-of-two scales, E4M3 throughout (OCP Microscaling v1.0, arXiv 2506.08027)."""

RECIPES: dict[str, Recipe] = {
    "bf16": BF16,
    "fp8_tensorwise": FP8_TENSORWISE,
    "fp8_delayed": FP8_DELAYED,
    "fp8_rowwise": FP8_ROWWISE,
    "fp8_rowwise_hp_wgrad": FP8_ROWWISE_HP_WGRAD,
    "fp8_blockwise": FP8_BLOCKWISE,
    "mxfp8": MXFP8,
}


def name_of(recipe: Recipe) -> str:
    """The name of a recipe, or "custom"."""
    return next((name for name, known in RECIPES.items() if known == recipe), "custom")


@dataclass(frozen=True)
class Policy:
    """Ordered rules, pattern -> recipe: the first that matches a layer decides; without one it is left.

    A pattern is a glob on the whole fqn (`*.layers.0.*`, `lm_head`) or found by structure: `blocks[0]`,
    `blocks[-1]` (a block and all in it), `blocks[0].mlp.*`, `head`. A recipe is a name of `RECIPES` or of
    `recipes`, or a `Recipe`. ValueError for an unknown name.
    """

    rules: Mapping[str, str | Recipe]
    recipes: Mapping[str, Recipe] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = sorted(RECIPES.keys() & self.recipes.keys())
        if taken:
            raise ValueError(f"policy: recipe {taken[0]!r} is a built-in one: choose another name")
        if not self.rules:
            raise ValueError("policy: it has no rule: give at least '*': a recipe")
        every = next((index for index, pattern in enumerate(self.rules) if pattern == "*"), len(self.rules))
        if unreachable := [*self.rules][every + 1 :]:
            raise ValueError(
                f"policy: the rule {unreachable[0]!r} is behind '*', which takes all: move it up"
            )
        for pattern in self.rules:
            if not isinstance(pattern, str):
                raise ValueError(f"policy: pattern {pattern!r} is not a string: quote it")
            self.recipe(pattern)

    def recipe(self, pattern: str) -> tuple[str, Recipe]:
        """Name and recipe of a rule."""
        given = self.rules[pattern]
        if isinstance(given, Recipe):
            return name_of(given), given
        known = RECIPES | dict(self.recipes)
        if not isinstance(given, str) or given not in known:
            raise ValueError(f"unknown recipe {given!r}: use one of {', '.join(known)}")
        return given, known[given]


RecipeLike = str | os.PathLike | Recipe | Policy | Mapping[str, str | Recipe]


def as_policy(recipe: RecipeLike) -> Policy:
    """Any form of a recipe as a policy. ValueError for anything else."""
    if isinstance(recipe, Policy):
        return recipe
    if isinstance(recipe, Mapping):
        return Policy(recipe)
    if isinstance(recipe, os.PathLike) or (isinstance(recipe, str) and recipe.endswith((".yaml", ".yml"))):
        return load_policy(recipe)
    if isinstance(recipe, str | Recipe):
        return Policy({"*": recipe})
    raise ValueError(f"a recipe is a Recipe, a policy or a name ({', '.join(RECIPES)}), not {recipe!r}")


def layer_recipe(recipe: RecipeLike) -> Recipe:
    """The recipe of one layer that is in no model: a policy answers by its rule "*"."""
    policy = as_policy(recipe)
    if "*" not in policy.rules:
        raise ValueError("this policy has no rule '*', the only one that matches a layer without a name")
    return policy.recipe("*")[1]


class _Loader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys in silence; this refuses."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            plain = isinstance(key, yaml.ScalarNode)
            if not plain or key.value in seen:
                problem = f"{key.value!r} is there twice" if plain else "a key must be a plain string"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | os.PathLike) -> Any:
    """YAML as plain data. ValueError, one line with the file, for bad YAML, a repeated key, or no UTF-8.

    OSError where the file cannot be read.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hints = {"\\t": "indent with spaces", "alphabetic": "quote patterns that start with *"}
        hint = next((f" ({say})" for sign, say in hints.items() if sign in str(error.problem)), "")
        raise ValueError(f"{path}:{line}: {error.problem}{hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no UTF-8 text: {' '.join(str(error).split())}") from None


def load_policy(path: str | os.PathLike) -> Policy:
    """A policy from YAML: a mapping of patterns to recipes, or `recipes` of one's own beside `rules`.

        recipes: {mine: {fprop: {lhs: {dtype: e4m3, block: [1, 0]}, rhs: {dtype: e4m3, block: [1, 0]}}}}
        rules: {"blocks[0]": bf16, "*": mine}

    A GEMM that is not named stays in high precision. ValueError, one line that names the file, for bad YAML,
    a repeated key, an unknown recipe or a bad cast; OSError where the file cannot be read.
    """
    data = read_yaml(path)
    try:
        if not isinstance(data, dict):
            raise ValueError("must map patterns to recipes")
        own: dict = {}
        if "rules" in data or "recipes" in data:
            own, rules = data.pop("recipes", {}), data.pop("rules", None)
            if data or not isinstance(own, dict) or not isinstance(rules, dict):
                raise ValueError(f"holds `rules` and `recipes`, mappings both, and nothing else: {[*data]}")
            data = rules
        return Policy(data, {name: _recipe(name, gemms) for name, gemms in own.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _recipe(name: str, gemms: Any) -> Recipe:
    place = f"recipe {name!r}"
    try:
        made = {}
        for gemm, operands in _mapping(gemms, ("fprop", "dgrad", "wgrad")).items():
            place = f"recipe {name!r}: {gemm}"
            fields = dict(_mapping(operands, ("lhs", "rhs", "fast_accum")))
            for operand in ("lhs", "rhs"):
                place = f"recipe {name!r}: {gemm}: {operand}"
                cast = _mapping(fields.get(operand), ("dtype", "block", "scale_dtype", "history"))
                missing = [key for key in ("dtype", "block") if key not in cast]
                if missing:
                    raise ValueError(f"lacks {' and '.join(missing)}")
                fields[operand] = Cast(**cast)
            made[gemm] = Gemm(**fields)
        return Recipe(**made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from None


def _mapping(given: Any, keys: tuple[str, ...]) -> dict:
    if not isinstance(given, dict):
        raise ValueError(f"is {given!r}, must map {', '.join(keys)}")
    unknown = [key for key in given if key not in keys]
    if unknown:
        raise ValueError(f"has {', '.join(keys)}, not {', '.join(map(repr, unknown))}")
    return given
