"""Which part of a model is what, by structure: blocks, head, routers, tied weights, LoRA factors."""

import difflib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

Names = Mapping[nn.Module, list[str]]  # a module under two parents is one module with two names

EXPERTS = re.compile(r"(\w+_)?experts")
ROUTER = re.compile(r"(\w+_)?(router|gate|gating)")  # beside experts, whole names only: never gate_proj
BLOCK = re.compile(r"blocks\[(-?\d+)\](\..+)?")


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module and its fully qualified names, in order."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def blocks(model: nn.Module) -> list[nn.Module]:
    """The longest ModuleList of same-type children; a list inside one (experts) is part of a block."""
    found: list[nn.Module] = []
    for module in _outermost_lists(model):
        if len(module) > len(found):
            found = list(module)
    return found


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
        yield module
        return
    for child in module.children():
        yield from _outermost_lists(child)


def head(model: nn.Module) -> nn.Module | None:
    """get_output_embeddings(), or the last Linear as wide as the vocabulary, the first embedding's."""
    getter = getattr(model, "get_output_embeddings", None)
    found = getter() if getter else None
    if found is not None:
        return found
    modules = list(model.modules())
    vocabulary = next((m.num_embeddings for m in modules if isinstance(m, nn.Embedding)), None)
    heads = [m for m in modules if isinstance(m, nn.Linear) and m.out_features == vocabulary]
    return heads[-1] if heads else None


def kept(model: nn.Module) -> dict[nn.Module, str]:
    """Modules that stay in high precision unless a policy names them, with the reason."""
    modules = list(model.modules())
    embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    shared = {id(weight) for m in embeddings for weight in m.parameters(recurse=False)}
    reasons: dict[nn.Module, str] = {}
    for module in modules:
        if module in embeddings:
            reasons[module] = "embeddings stay in high precision"
        elif id(module._parameters.get("weight")) in shared:
            reasons[module] = "tied: its weight is an embedding's, which stays in high precision"
        if isinstance(module, nn.TransformerEncoderLayer):
            fast = (
                "TransformerEncoderLayer's fast path (eval, no gradients) reads its weight without calling it"
            )
            reasons |= dict.fromkeys((module.linear1, module.linear2), fast)
        for router in _routers(module):
            reasons |= dict.fromkeys(router.modules(), "routers stay in high precision")
        if "base_layer" in module._modules:
            for factor in (child for name, child in module.named_children() if name != "base_layer"):
                reasons |= dict.fromkeys(factor.modules(), "LoRA factors stay in high precision")
    return reasons


def _routers(module: nn.Module) -> list[nn.Module]:
    children = dict(module.named_children())
    beside_experts = any(map(EXPERTS.fullmatch, children))
    return [
        child
        for name, child in children.items()
        if "Router" in type(child).__name__ or (beside_experts and ROUTER.fullmatch(name))
    ]


def are_experts(names: list[str]) -> bool:
    """Whether this is where a mixture of experts keeps its weights: most of a model's GEMMs."""
    return any(EXPERTS.fullmatch(name.rpartition(".")[2]) for name in names)


def select(model: nn.Module, names: Names, pattern: str) -> set[nn.Module]:
    """The modules of `names` that a pattern names: a glob on the whole fqn, or a part found by structure.

    `blocks[0]`, `blocks[-1]`: a block and all in it; `blocks[0].mlp.*`: a glob inside it; `head`: see there.
    """
    block = BLOCK.fullmatch(pattern)
    roots: list[nn.Module | None] = [head(model)] if pattern == "head" else []
    if block:
        every, index = blocks(model), int(block[1])
        roots = list(every[index:][:1]) if index >= -len(every) else []
        if roots and block[2]:
            pattern = next(name for name, module in model.named_modules() if module is roots[0]) + block[2]
            roots = []
    found = {module for module, fqns in names.items() if any(fnmatchcase(fqn, pattern) for fqn in fqns)}
    return found | {part for root in roots if root is not None for part in root.modules() if part in names}


def checked_select(model: nn.Module, names: Names, pattern: str, origin: str) -> set[nn.Module]:
    """`select`, and ValueError where a pattern names no layer: a typo must not pass in silence."""
    found = select(model, names, pattern)
    if not found and names and pattern != "*":
        raise ValueError(f"{origin} {pattern!r} matches no layer of the model{_hint(model, names, pattern)}")
    return found


def _hint(model: nn.Module, names: Names, pattern: str) -> str:
    if BLOCK.fullmatch(pattern):
        return f": it has {len(blocks(model))} blocks"
    if select(model, names, f"{pattern}.*"):
        return f": it is not a layer itself, use '{pattern}.*'"
    fqns = [fqn for some in names.values() for fqn in some]
    inside = [fqn for fqn in fqns if fnmatchcase(fqn, f"*.{pattern}")]  # in a wrapper's .module, say
    close = inside or difflib.get_close_matches(pattern.strip("*."), fqns, n=1, cutoff=0.4)
    return f": the closest is {close[0]!r}" if close else ""
