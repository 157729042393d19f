"""Swap accelerated layers into a model in place, say for each module why or why not, and put it back."""

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from turbo_nn import linear, rms_norm
from turbo_nn.recipes import Policy, resolve
from turbo_nn.report import LeftError, Report, Verdict
from turbo_nn.rule import Rule, Site, Twin, disagreement
from turbo_ops import Recipe

RULES: list[Rule] = [linear.RULE, rms_norm.RULE]
ORIGINAL = (
    "_turbo_original"  # in a patched module's __dict__: its class, the attributes it had, those it did not
)


def patch(
    model: nn.Module,
    recipe: object,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    convert_small: bool = False,
    strict: bool = False,
    verify: bool = True,
) -> Report:
    """Patch `model` in place: its modules change class and keep everything else; `unpatch` undoes it.

    recipe: a name of `turbo_nn.RECIPES`, a `Recipe`, a `Policy`, a mapping of patterns to either, or YAML.
    only, skip: globs over fully qualified names. convert_small: also layers too small to gain on a GPU.
    strict: raise LeftError, with the list and with nothing changed, where a layer that the recipe asks for
    would be left. verify: prove each kind of module on a probe. A patched model may be patched again with
    another recipe. Raises ValueError for an unknown recipe and for a pattern that matches nothing.
    """
    policy = resolve(recipe).for_model(model)
    chosen = _chooser(model, only, skip)
    proven: dict[tuple, Twin | str] = {}
    verdicts, twins = [], []
    for site in _sites(model):
        verdict, twin = _judge(site, policy, chosen, convert_small, proven if verify else None)
        if verdict is not None:
            verdicts.append(verdict)
            twins.append((site.module, twin))
    report = Report(verdicts)
    if strict and report.refused:
        raise LeftError(report)
    for module, twin in twins:
        if twin is not None:
            _swap(module, twin)
    return report


def unpatch(model: nn.Module) -> int:
    """Give every patched module its class and attributes back; returns how many there were."""
    patched = [module for module in model.modules() if ORIGINAL in module.__dict__]
    for module in patched:
        cls, had, had_not = module.__dict__.pop(ORIGINAL)
        module.__class__ = cls
        module.__dict__.update(had)
        for name in had_not:
            del module.__dict__[name]
    return len(patched)


def _swap(module: nn.Module, twin: Twin) -> None:
    if ORIGINAL not in module.__dict__:
        had = {name: module.__dict__[name] for name in twin.attributes if name in module.__dict__}
        had_not = [name for name in twin.attributes if name not in module.__dict__]
        module.__dict__[ORIGINAL] = (type(module), had, had_not)
    module.__class__ = twin.cls
    module.__dict__.update(twin.attributes)


def _judge(
    site: Site, policy: Policy, chosen: Callable[[str], str | None], convert_small: bool, proven: dict | None
) -> tuple[Verdict | None, Twin | None]:
    """The verdict on one module (None: it is no candidate), and the twin it is to become."""
    module, rule = site.module, next((rule for rule in RULES if rule.match(site.module)), None)
    if rule is None and not any(p.ndim >= 2 for p in module.parameters(recurse=False)):
        return None, None
    casts = rule is None or rule.casts
    name, recipe = (policy.at(site.fqn) or (None, None)) if casts else (None, Recipe())
    kind = (site.fqn, type(module).__name__, rule.name if rule else None)
    unasked: str | None = chosen(site.fqn) or (rule.protects(site) if rule else _protected(module))
    if not unasked and recipe is None:
        unasked = "no rule of the policy matches"
    if not unasked and casts and not (recipe and recipe.casts):
        unasked = f"recipe {name}: nothing to cast"
    if unasked or recipe is None:
        return Verdict(*kind, None, None, unasked), None
    if rule is None:
        transposed = "its weight is [in, out]: only nn.Linear's [out, in] is known"
        return Verdict(
            *kind, name, None, transposed if kind[1] == "Conv1D" else "no rule knows this class"
        ), None
    refusal = rule.refuses(site, convert_small)
    if "forward" in module.__dict__:
        refusal = (
            "its forward was replaced on the instance (accelerate's hooks, a patcher): patch before that"
        )
    twin = refusal or _twin(module, rule, recipe, proven)
    if isinstance(twin, str):
        return Verdict(*kind, name, None, twin), None
    return Verdict(*kind, name, rule.backend(module, recipe), None), twin


def _twin(module: nn.Module, rule: Rule, recipe: Recipe, proven: dict | None) -> Twin | str:
    """The first twin that agrees with `module` on every trial, else the last one's reason."""
    twins = rule.convert(module, recipe)
    if proven is None:
        return twins[0]
    plain = tuple(
        (k, v) for k, v in module.__dict__.items() if isinstance(v, int | float | str) and k != "training"
    )
    shapes = tuple((name, p.shape[-1] if p.ndim == 1 else p.ndim) for name, p in module.named_parameters())
    key = (type(module), plain if not rule.casts else (), shapes if not rule.casts else module.bias is None)
    if key not in proven:
        trials = rule.trials(module)
        for index, twin in enumerate(twins):
            reason = next(filter(None, (disagreement(module, twin, trial) for trial in trials)), None)
            if reason is None:
                proven[key] = index
                break
        else:
            proven[key] = reason
    return twins[proven[key]] if isinstance(proven[key], int) else proven[key]


def _protected(module: nn.Module) -> str | None:
    """Why nobody would want to cast a module that no rule is about."""
    if isinstance(module, nn.Embedding):
        return "embeddings stay in high precision"
    return "a router stays in high precision" if type(module).__name__.endswith(("Router", "Gate")) else None


def _sites(model: nn.Module) -> Iterator[Site]:
    """Every module once, under its first name."""
    modules = dict(model.named_modules())
    tables = frozenset(m.weight for m in modules.values() if isinstance(m, nn.Embedding))
    for fqn, module in modules.items():
        parent = modules.get(fqn.rpartition(".")[0]) if fqn else None
        yield Site(fqn, module, parent, _is_adapter(fqn, modules), tables)


def _is_adapter(fqn: str, modules: dict[str, nn.Module]) -> bool:
    parts = fqn.split(".")
    above = ((modules.get(".".join(parts[:n])), parts[n]) for n in range(len(parts)))
    return any(hasattr(module, "base_layer") and child != "base_layer" for module, child in above)


def _chooser(
    model: nn.Module, only: str | Iterable[str] | None, skip: str | Iterable[str] | None
) -> Callable[[str], str | None]:
    """fqn -> why `only` and `skip` leave it out, or None."""
    names = [name for name, _ in model.named_modules()]
    globs = {"only": _globs(only), "skip": _globs(skip)}
    for argument, patterns in globs.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"{argument}={pattern!r} matches no module of {type(model).__name__}")

    def reason(fqn: str) -> str | None:
        if only is not None and not any(fnmatchcase(fqn, pattern) for pattern in globs["only"]):
            return "not in `only`"
        return "in `skip`" if any(fnmatchcase(fqn, pattern) for pattern in globs["skip"]) else None

    return reason


def _globs(patterns: str | Iterable[str] | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())
