"""The named recipes, and policies: which layer gets which recipe."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import Toy, patch, reference_on_cpu
from torch import nn

import turbo_nn
from turbo_nn import RECIPES, Cast, Gemm, Policy, Recipe, load_policy


@pytest.fixture(autouse=True)
def _reference(device: torch.device):
    with reference_on_cpu(device):
        yield


def recipes_by_layer(recipe, model: nn.Module | None = None, **options) -> dict[str, str | None]:
    report = patch(Toy() if model is None else model, recipe, **options)
    return {v.fqn: v.recipe if v.reason is None else None for v in report if v.rule == "linear"}


LAYERS = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]


def test_the_named_recipes() -> None:
    """What each name promises: dtype and block of lhs and rhs in fprop, dgrad, wgrad."""
    row, tile, square, mx = (1, 0), (1, 128), (128, 128), (1, 32)
    e4m3 = {
        "fp8_rowwise": [(row, row)] * 3,
        "fp8_rowwise_hp_wgrad": [(row, row)] * 2 + [None],
        "fp8_blockwise": [(tile, square), (tile, square), (tile, tile)],
        "mxfp8": [(mx, mx)] * 3,
    }
    assert set(RECIPES) == {"bf16", "fp8_tensorwise", "fp8_delayed", *e4m3}
    assert not RECIPES["bf16"].casts
    for name, blocks in e4m3.items():
        scale = "e8m0" if name == "mxfp8" else "fp32"
        gemms = [Gemm(*(Cast("e4m3", b, scale) for b in pair)) if pair else Gemm() for pair in blocks]
        assert RECIPES[name] == Recipe(*gemms), name
    delayed, tensorwise = RECIPES["fp8_delayed"], RECIPES["fp8_tensorwise"]
    for gemm in ("fprop", "dgrad", "wgrad"):
        for side in ("lhs", "rhs"):
            cast = getattr(getattr(delayed, gemm), side)
            assert cast.history == 16
            assert replace(cast, history=0) == getattr(getattr(tensorwise, gemm), side)
    dtypes = [(g.lhs.dtype, g.rhs.dtype) for g in (tensorwise.fprop, tensorwise.dgrad, tensorwise.wgrad)]
    assert dtypes == [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e4m3")]


def test_the_first_match_wins() -> None:
    rules = {"*.0.*": "bf16", "head": "mxfp8", "*.down": "fp8_rowwise", "*": "fp8_blockwise"}
    expected = dict(zip(LAYERS, [None, None, "fp8_blockwise", "fp8_rowwise", "mxfp8"], strict=True))
    assert recipes_by_layer(rules) == expected
    downs_first = {"*.down": "fp8_rowwise"} | rules
    assert recipes_by_layer(downs_first) == expected | {LAYERS[1]: "fp8_rowwise"}
    with pytest.raises(ValueError, match="behind '\\*'"):
        recipes_by_layer(dict(reversed(rules.items())))


def test_patterns_are_anchored() -> None:
    for pattern in ("up", "layers.0", "ayers.0.up", "layers.0.u", "LAYERS.0.up"):
        with pytest.raises(ValueError, match="matches no"):
            recipes_by_layer({pattern: "bf16", "*": "mxfp8"})


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        ("blocks[0]", LAYERS[:2]),
        ("blocks[-1]", LAYERS[2:4]),
        ("blocks[1]", LAYERS[2:4]),
        ("head", LAYERS[4:]),
        ("layers.[01].up", [LAYERS[0], LAYERS[2]]),
    ],
)
def test_structural_patterns(pattern: str, hit: list[str]) -> None:
    found = recipes_by_layer({pattern: "mxfp8", "*": "bf16"})
    assert [name for name, recipe in found.items() if recipe] == hit


def test_blocks_are_layers_not_experts() -> None:
    """The longest list of one class, but not a list inside a block, however long."""
    model = Toy()
    for layer in model.layers:
        layer.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(9)])
    model.odd = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()])
    found = recipes_by_layer({"blocks[-1]": "mxfp8", "*": "bf16"}, model)
    hit = {name for name, recipe in found.items() if recipe}
    assert hit == {"layers.1.up", "layers.1.down", *(f"layers.1.experts.{i}" for i in range(9))}


def test_the_head_is_as_wide_as_the_vocabulary() -> None:
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32), nn.Linear(32, 8))
    found = recipes_by_layer({"head": "mxfp8", "*": "bf16"}, model)
    assert found == {"1": "mxfp8", "2": None}


@pytest.mark.parametrize("pattern", ["blocks[2]", "blocks[-3]", "model.layers.*", "lm_head", "*.q_proj"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    model = Toy()
    before = [type(m) for m in model.modules()]
    for call in (
        lambda: patch(model, {pattern: "bf16", "*": "mxfp8"}),
        lambda: patch(model, "mxfp8", skip=[pattern]),
        lambda: patch(model, "mxfp8", only=pattern),
    ):
        with pytest.raises(ValueError, match=r"blocks|matches no") as error:
            call()
        assert pattern.partition(".")[0] in str(error.value)
        assert "\n" not in str(error.value)
    assert [type(m) for m in model.modules()] == before


def test_a_container_is_no_layer() -> None:
    """`layers.0` names a block: as a rule it would do nothing, in silence."""
    for options in ({"recipe": {"layers.0": "bf16", "*": "mxfp8"}}, {"recipe": "mxfp8", "skip": "layers.0"}):
        with pytest.raises(ValueError, match=r"layers\.0"):
            patch(Toy(), **options)


def test_what_no_rule_matches_is_left() -> None:
    report = patch(Toy(), {"layers.*": "mxfp8"})
    head = next(v for v in report if v.fqn == "head")
    assert head.reason == "no rule of the policy matches"
    assert len([v for v in report.patched if v.recipe == "mxfp8"]) == 4


GOOD = """
recipes:
  mine:
    fprop: {lhs: {dtype: e4m3, block: [1, 0]}, rhs: {dtype: e4m3, block: [0, 0]}, fast_accum: false}
    wgrad:
      lhs: {dtype: e5m2, block: [1, 32], scale_dtype: e8m0}
      rhs: {dtype: e4m3, block: [1, 32], scale_dtype: e8m0}
rules:
  "blocks[0]": bf16
  head: fp8_rowwise
  "*": mine
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "policy.yaml"
    file.write_text(text)
    return file


def test_a_policy_from_yaml(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD)
    expected = dict(zip(LAYERS, [None, None, "mine", "mine", "fp8_rowwise"], strict=True))
    for form in (file, str(file), load_policy(file)):
        assert recipes_by_layer(form) == expected
    model = Toy()
    patch(model, file)
    mine = model.layers[1].up.recipe
    assert mine.fprop == Gemm(Cast("e4m3", (1, 0)), Cast("e4m3", (0, 0)), fast_accum=False)
    assert mine.dgrad == Gemm()
    assert mine.wgrad.lhs == Cast("e5m2", (1, 32), "e8m0")
    short = written(tmp_path, '"*.0.*": bf16\n"*": fp8_rowwise\n')
    assert recipes_by_layer(short)["layers.1.up"] == "fp8_rowwise"
    assert isinstance(load_policy(short), Policy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("*: bf16\n", "policy.yaml"),
        ("[bf16\n", "policy.yaml"),
        ("", "map"),
        ("- bf16\n", "map"),
        ("fp8_blockwise\n", "map"),
        ('"*": fp9\n', "fp9.*fp8_blockwise"),
        ('"*": [bf16]\n', "bf16"),
        ('"*": null\n', "None"),
        ('"*": bf16\n"*": mxfp8\n', "repeated|twice"),
        ('recipes: {mine: {fprop: {lhs: {dtype: e9}}}}\nrules: {"*": mine}\n', "policy.yaml"),
        ('recipes: {mine: {forward: {}}}\nrules: {"*": mine}\n', "forward"),
        ('recipes: {mine: 3}\nrules: {"*": mine}\n', "mine"),
        ('recipes: {mine: {fprop: 3}}\nrules: {"*": mine}\n', "mine"),
        (
            'recipes: {mine: {fprop: {lhs: &x {dtype: e4m3, block: [1, 7]}, rhs: *x}}}\nrules: {"*": mine}\n',
            "1, 7",
        ),
        ('recipes: {bf16: {}}\nrules: {"*": bf16}\n', "bf16"),
        ('rules: {"*": bf16}\nrule: {"*": bf16}\n', "rule"),
        ("3: bf16\n", "3"),
        ("{}\n", "it has no rule"),
        ('"*": bf16\nhead: mxfp8\n', "the rule 'head' is behind '\\*', which takes all: move it up"),
        (
            'recipes: {a: {fprop: {lhs: {dtype: e4m3, block: 128}}}}\nrules: {"*": a}\n',
            "fprop: lhs: Cast.block=128",
        ),
        ('recipes: {a: {fprop: {lhs: {dtype: e4m3}}}}\nrules: {"*": a}\n', "fprop: lhs: lacks block"),
        (
            'recipes: {a: {fprop: {lhs: {dtype: e4m3, block: [1, 0]}}}}\nrules: {"*": a}\n',
            "fprop: rhs: is None, must map dtype, block",
        ),
        (
            'recipes: {a: {fprop: {lhs: &x {dtype: e4m3, block: [1, 0]}, rhs: *x, fast_accum: "no"}}}\n'
            'rules: {"*": a}\n',
            "Gemm.fast_accum='no': use true or false",
        ),
        ("recipes: {}\n", "`rules` and `recipes`, mappings both"),
        ("rules: mxfp8\n", "`rules` and `recipes`, mappings both"),
        ('"*":\t\tbf16\n\thead: bf16\n', "indent with spaces"),
        ("? [a, b]\n: bf16\n", "policy.yaml"),
    ],
)
def test_a_bad_file_is_one_clear_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says) as error:
        load_policy(written(tmp_path, text))
    assert "policy.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_policy_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_bytes(b'"*": \xff\xfe')
    with pytest.raises(ValueError, match=r"policy\.yaml: is no UTF-8 text"):
        load_policy(file)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Gemm("e4m3", "e4m3"), "Gemm.lhs='e4m3': give a Cast"),
        (lambda: Recipe("fp8"), "Recipe.fprop='fp8': give a Gemm"),
        (lambda: Cast("e4m3", 128), "Cast.block=128: use one of"),
    ],
)
def test_what_a_recipe_is_made_of_is_checked(make, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=r"nowhere\.yaml"):
        turbo_nn.patch(Toy(), str(tmp_path / "nowhere.yaml"))


def test_a_policy_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="fp8_blockwise"):
        patch(Toy(), {"nothing.here": "fp9", "*": "bf16"})


def test_a_recipe_of_ones_own_is_custom() -> None:
    own = Recipe(fprop=Gemm(Cast("e4m3", (1, 0)), Cast("e4m3", (1, 0))))
    assert set(recipes_by_layer(own).values()) == {"custom"}
    assert set(recipes_by_layer({"*": own}).values()) == {"custom"}
    assert set(recipes_by_layer({"*": RECIPES["mxfp8"]}).values()) == {"mxfp8"}
    assert "custom" in repr(turbo_nn.Linear(4, 4, recipe=own))
