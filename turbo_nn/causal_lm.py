"""A causal language model whose training loss comes from its hidden states: the logits are not made."""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import turbo_ops
from turbo_nn.linear import Linear, is_plain
from turbo_nn.rule import Probe, Rule, Twin, draw, plain_linear, twin_class
from turbo_ops import Recipe

SOFTCAP = "final_logit_softcapping"
LOSS = "ForCausalLMLoss"  # the loss function of transformers that `fused_loss` stands in for


class HandsOn:
    """What the model finds as its head while the loss is fused: hidden states stay what they are."""

    def __init__(self, head: nn.Linear):
        self.weight, self.bias = head.weight, head.bias

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden


class Uncapped:
    """A configuration that caps no logits: hidden states pass where the model would cap them."""

    def __init__(self, config: Any):
        self._config, self.capped_at = config, softcap_of(config)

    def __getattr__(self, name: str) -> Any:
        return None if name == SOFTCAP else getattr(self._config, name)

    def get_text_config(self, *args: Any, **kwargs: Any) -> "Uncapped":
        return Uncapped(self._config.get_text_config(*args, **kwargs))


class CausalLM(nn.Module):
    """`model(input_ids, labels=...)` in training: `turbo_ops.linear_cross_entropy`; output.logits is None.

    The model does what it did in eval, without labels, with logits_to_keep, where a tuple is asked for, where
    the head has hooks or is no plain linear layer, with a loss function of one's own, and with
    `model.keeps_logits = True`. The head's recipe casts; gradients of its weight are made in forward.
    """

    keeps_logits = False
    fusing = False
    loss_function: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        original = cls.__mro__[2].forward  # type: ignore[attr-defined]
        loss_function = cls.__mro__[2].loss_function  # type: ignore[attr-defined]

        @functools.wraps(original)  # with its signature: Trainer and generate() read it
        def forward(self: Any, *args: Any, **inputs: Any) -> Any:
            if not self.can_fuse(args, inputs):
                return original(self, *args, **inputs)
            config = self.config
            self.fusing, self.config = True, Uncapped(config) if softcap_of(config) else config
            try:
                output = original(self, *args, **inputs)
            finally:
                self.fusing, self.config = False, config
            # without its logits, which are hidden states: neither a name, a key nor a place gives them
            return type(output)(**{name: value for name, value in output.items() if name != "logits"})

        def loss(self: Any) -> Any:
            return self.fused_loss if self.fusing else loss_function.fget(self)

        cls.forward, cls.loss_function = forward, property(loss, loss_function.fset)

    def can_fuse(self, args: tuple, inputs: dict[str, Any]) -> bool:
        if not self.training or self.keeps_logits or len(args) > 1 or inputs.get("labels") is None:
            return False
        as_tuple = inputs.get("return_dict", True) is False or not getattr(self.config, "return_dict", True)
        kept = inputs.get("logits_to_keep", 0)
        if as_tuple or not isinstance(kept, int) or kept:
            return False
        own_loss = self.__dict__.get("_loss_function")
        return problem(self) is None and (own_loss is None or own_loss.__name__ == LOSS)

    @property
    def lm_head(self) -> Any:
        head = self._modules["lm_head"]
        return HandsOn(head) if self.fusing else head  # type: ignore[arg-type]

    def fused_loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As `ForCausalLMLoss`, of hidden states [B, S, D] in place of logits."""
        if shift_labels is None:  # a token predicts the next one
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        head: Any = self._modules["lm_head"]
        if not torch.is_autocast_enabled(logits.device.type):  # some models make their logits fp32
            logits = logits.to(head.weight.dtype)
        return turbo_ops.linear_cross_entropy(
            logits,
            head.weight,
            shift_labels.to(logits.device),
            head.bias,
            head.recipe.by_own_amax if isinstance(head, Linear) else None,
            divisor=num_items_in_batch,
            ignore_index=ignore_index,
            softcap=self.config.capped_at if isinstance(self.config, Uncapped) else 0.0,
        )


def softcap_of(config: Any) -> float:
    """What the model caps its logits at by tanh, 0 where it does not."""
    return getattr(config, SOFTCAP, None) or getattr(config.get_text_config(), SOFTCAP, None) or 0.0


def problem(model: nn.Module) -> str | None:
    """Why the head cannot be fused with the loss."""
    head: Any = model._modules["lm_head"]
    if not is_plain(head):
        return f"its head, a {type(head).__name__}, is no plain linear layer, or has hooks"
    config: Any = model.config
    if config.is_encoder_decoder:
        return "its decoder is not all of it: the labels are not shifted"
    vocabulary = getattr(config, "vocab_size", None) or getattr(config.get_text_config(), "vocab_size", None)
    if len(head.weight) != vocabulary:
        return f"its head has {len(head.weight)} rows for a vocabulary of {vocabulary}"
    if getattr(head.weight, "main_grad", None) is not None:
        return "its head sums gradients into main_grad"
    return None


def _match(module: nn.Module) -> bool:
    cls = type(module)
    if isinstance(module, CausalLM):
        return True
    has_loss = isinstance(getattr(cls, "loss_function", None), property) and hasattr(module, "config")
    return has_loss and "lm_head" in module._modules and "labels" in inspect.signature(cls.forward).parameters


def _refuses(module: nn.Module, recipe: Recipe) -> str | None:
    if isinstance(module, CausalLM):
        return "is a CausalLM already"
    loss = getattr(getattr(module, "loss_function", None), "__name__", "")
    return problem(module) or (None if loss == LOSS else f"its loss function is {loss}, not {LOSS}")


def _convert(module: nn.Module, recipe: Recipe) -> list[Twin]:
    return [Twin(twin_class(CausalLM, type(module)), {"fusing": False})]  # type: ignore[arg-type]


class _Outputs(SimpleNamespace):
    """What a decoder returns, to be read by name or by place; what it does not have is None."""

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int | slice) -> Any:
        return self.last_hidden_state if place == 0 else () if isinstance(place, slice) else None


class _Decoder(nn.Module):
    """Gives the same hidden states whatever it is asked."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(last_hidden_state=self.hidden)


def _probe(module: nn.Module) -> list[Probe]:
    """The model's own forward around a head of 4 features and a decoder that is none, with labels ignored."""
    head: Any = module._modules["lm_head"]
    vocabulary, width = len(head.weight), 4
    hidden, weight = draw((2, 5, width), (vocabulary, width))
    hidden *= 8  # so that a softcap of 30 counts
    labels = torch.arange(10).view(2, 5) % vocabulary
    labels[0, 2] = -100
    modules: dict[str, nn.Module] = {name: _Decoder(hidden) for name in module._modules}
    modules["lm_head"] = plain_linear(weight)
    return [
        Probe({}, hidden, modules=modules, run=lambda m: m(input_ids=labels.clamp(0), labels=labels).loss)
    ]


RULE = Rule(
    "causal_lm",
    match=_match,
    convert=_convert,
    probe=_probe,
    refuses=_refuses,
    backend=lambda module, twin: "linear_cross_entropy in training",
)
