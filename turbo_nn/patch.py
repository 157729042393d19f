"""Swap the classes of a model's modules for accelerated ones, say what was done and why, and swap back."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from turbo_nn import causal_lm, experts, gated_mlp, linear, moe_block, rms_norm, rotary
from turbo_nn.recipes import Policy, RecipeLike, as_policy
from turbo_nn.report import LeftError, Report, Verdict
from turbo_nn.rule import Prover, Rule, Twin, kind
from turbo_nn.structure import Names, are_experts, checked_select, kept, names_of
from turbo_ops import Recipe

RULES: list[Rule] = [
    linear.RULE,
    rms_norm.RULE,
    gated_mlp.RULE,
    experts.RULE,
    moe_block.RULE,
    rotary.RULE,
    causal_lm.RULE,
]
ORIGINAL = "_turbo_original"
Globs = str | list[str] | tuple[str, ...] | None


class Original(NamedTuple):
    """What `unpatch` needs. It lives on the module, so copies and pickles of a patched model have it, too."""

    cls: type[nn.Module]
    twin: type[nn.Module]
    overwritten: dict[str, Any]
    added: tuple[str, ...]


def patch(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    only: Globs = None,
    skip: Globs = None,
    convert_small: bool = False,
    strict: bool = False,
    verify: bool = True,
) -> Report:
    """Give `model`'s linear layers the recipe and its norms one kernel, in place; say which, and why not.

    Only classes change: modules, parameters, state_dict, hooks and attributes stay the same objects. Patching
    again starts from the original model, so the last call alone decides. `print(report)` shows a table.

    recipe: a name of `RECIPES`, a `Recipe`, or a policy (a `Policy`, its mapping, or its YAML file).
    only, skip: patterns as in a policy; layers to look at, layers to leave.
    convert_small: on a GPU, also take layers too small to gain. On a CPU size leaves nothing out.
    strict: raise LeftError where a layer that the recipe asks for would be left, and change nothing. Layers
        excluded by only, skip or a policy are not asked for, nor are embeddings, tied heads, routers and LoRA
        factors, unless a policy names the layer itself, without a wildcard: that overrules the default.
    verify: run each kind of module beside its twin on a small CPU probe, and leave it where they disagree.
    ValueError for an unknown recipe, for a pattern that matches no layer, and for what is no eager module.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"patch: model is a {type(model).__name__}: give an nn.Module that is not scripted")
    policy = as_policy(recipe)
    before = [(module, _twin_of(module)) for module in model.modules() if ORIGINAL in vars(module)]
    unpatch(model)
    try:
        plan = _Plan(model, policy, only, skip).run(Prover(verify), convert_small)
        report = Report(tuple(verdict for verdict, _ in plan.values()))
        if strict and report.refused:
            raise LeftError(report)
    except BaseException:
        for module, twin in before:
            _swap(module, twin)
        raise
    for module, (_, planned) in plan.items():
        if planned is not None:
            _swap(module, planned)
    return report


def unpatch(model: nn.Module) -> int:
    """Give every module of `model` that `patch` changed its class and attributes back; returns how many.

    RuntimeError, with nothing changed, where a forward or class was put over a patched one since.
    """
    patched = [(fqn, module) for fqn, module in model.named_modules() if ORIGINAL in vars(module)]
    for fqn, module in patched:
        if _forward_is_overridden(module):
            raise RuntimeError(
                f"unpatch: the forward of {fqn!r} was overridden after patch(); undo that first"
                " (accelerate: remove_hook_from_module(model, recurse=True))"
            )
        if type(module) is not vars(module)[ORIGINAL].twin:
            raise RuntimeError(
                f"unpatch: {fqn!r} became a {type(module).__name__} after patch(); undo that first"
            )
    for _, module in patched:
        original: Original = vars(module).pop(ORIGINAL)
        for name in original.added:
            vars(module).pop(name, None)
        vars(module).update(original.overwritten)
        vars(module).pop("forward", None)
        module.__class__ = original.cls
    return len(patched)


def is_patched(model: nn.Module) -> bool:
    """Whether `patch` changed a module of `model`, and `unpatch` did not change it back."""
    return any(ORIGINAL in vars(module) for module in model.modules())


def _forward_is_overridden(module: nn.Module) -> bool:
    """Not by its own class's, bound, or what that wraps: accelerate leaves either behind when it unwraps."""
    forward: Any = vars(module).get("forward")
    if forward is None:
        return False
    bound, own = getattr(forward, "__func__", None), type(module).forward
    while own is not bound and hasattr(own, "__wrapped__"):
        own = own.__wrapped__
    return own is not bound


def _casts(module: nn.Module) -> bool:
    own = vars(module).get("recipe")
    return isinstance(own, Recipe) and own.casts


def _twin_of(module: nn.Module) -> Twin:
    original: Original = vars(module)[ORIGINAL]
    names = (*original.overwritten, *original.added)
    return Twin(original.twin, {name: vars(module)[name] for name in names})


def _swap(module: nn.Module, twin: Twin) -> None:
    state = vars(module)
    state.pop("forward", None)
    overwritten = {name: state[name] for name in twin.attributes if name in state}
    added = tuple(name for name in twin.attributes if name not in state)
    state.update(twin.attributes)
    state[ORIGINAL] = Original(type(module), twin.cls, overwritten, added)
    module.__class__ = twin.cls


class _Plan:
    """What would become of each module; nothing is changed yet."""

    def __init__(self, model: nn.Module, policy: Policy, only: Globs, skip: Globs):
        self.names: Names = {
            module: names
            for module, names in names_of(model).items()
            if any(weight is not None for weight in module._parameters.values()) or _rule(module)
        }
        self.kept = kept(model)
        self.policy = policy
        self.chosen: dict[nn.Module, str] = {}
        for pattern in policy.rules:
            for module in checked_select(model, self.names, pattern, "policy: the rule"):
                self.chosen.setdefault(module, pattern)
        self.excluded: dict[nn.Module, str] = {}
        if only is not None:
            if not _globs(only):
                raise ValueError(f"patch: only={only!r} leaves everything: name layers, or drop it")
            wanted = {m for glob in _globs(only) for m in checked_select(model, self.names, glob, "only:")}
            self.excluded |= dict.fromkeys(self.names.keys() - wanted, f"not in only={only!r}")
        for glob in _globs(skip):
            found = checked_select(model, self.names, glob, "skip:")
            self.excluded |= dict.fromkeys(found, f"excluded by skip={glob!r}")

    def run(self, prover: Prover, convert_small: bool) -> dict[nn.Module, tuple[Verdict, Twin | None]]:
        """For each module its verdict, and the twin that it is to become."""
        plan: dict[nn.Module, tuple[Verdict, Twin | None]] = {}
        backends: dict[tuple, str | None] = {}
        for module, names in self.names.items():
            rule = _rule(module)
            who = (names[0], type(module).__name__, rule.name if rule else None)
            pattern = self.chosen.get(module)
            label, recipe = ("", Recipe()) if pattern is None else self.policy.recipe(pattern)
            unasked = self._unasked(module, rule, label, recipe)
            if rule is None or unasked is not None:
                lost = rule is None and recipe.casts and module not in self.excluded and are_experts(names)
                plan[module] = Verdict(*who, label if lost else None, reason=unasked), None
                continue
            asked = label if rule.casts else None
            twin = _answer(rule, module, recipe, prover, convert_small)
            if isinstance(twin, str):
                lost = recipe.casts or _casts(module)  # left uncast, it lacks nothing that was asked for
                plan[module] = Verdict(*who, asked if lost else None, reason=twin), None
                continue
            key = (rule.name, recipe, *kind(module))
            if key not in backends:
                backends[key] = rule.backend(module, twin)
            plan[module] = Verdict(*who, asked, backends[key]), twin
        return plan

    def _unasked(self, module: nn.Module, rule: Rule | None, label: str, recipe: Recipe) -> str | None:
        """Why nobody asks for this module: no rule, the caller's own words, or a default that protects it."""
        if rule is None:
            return self.kept.get(module, f"there is no rule for {type(module).__name__}")
        if module in self.excluded:
            return self.excluded[module]
        if not label:
            return "no rule of the policy matches"
        if not rule.casts:
            return None
        if not (recipe.casts or rule.uncast or _casts(module)):
            return f"recipe {label}: nothing to cast"
        named = self.chosen[module] == "head" or not set("*?[") & set(self.chosen[module])
        return None if named else self.kept.get(module)


def _answer(rule: Rule, module: nn.Module, recipe: Recipe, prover: Prover, convert_small: bool) -> Twin | str:
    if _forward_is_overridden(module):
        return "its forward is overridden on the instance (accelerate's hooks, another patcher)"
    reason = rule.refuses(module, recipe)
    if reason is None and not convert_small and (recipe.casts or not rule.casts):
        reason = rule.small(module)
    return reason or prover.pick(rule, module, recipe)


def _rule(module: nn.Module) -> Rule | None:
    return next((rule for rule in RULES if rule.match(module)), None)


def _globs(given: Globs) -> tuple[str, ...]:
    globs = (given,) if isinstance(given, str) or not isinstance(given or (), Iterable) else given or ()
    for glob in globs:
        if not isinstance(glob, str):
            raise ValueError(f"patch: only and skip are globs, strings, not {glob!r}")
    return tuple(globs)
