"""Autograd of one linear layer: three GEMMs, each in the precision that the recipe gives it.

    fprop  y      = cast(x)    @ cast(weight).T           contracts in
    dgrad  grad_x = cast(g)    @ cast(weight.T).T         contracts out
    wgrad  grad_w = cast(g.T)  @ cast(x.T).T              contracts tokens

Each tensor is cast from high precision, once along each axis that is needed, in one read. What backward needs
of x is saved as wgrad's operand: 1 byte an element where wgrad is cast.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from turbo_ops import weight_cache
from turbo_ops.arch import DTYPES
from turbo_ops.casting import GRAD_OUTPUT, HIGH_PRECISION, INPUT, WEIGHT, AmaxRow, Cast, Recipe, Scaled
from turbo_ops.dispatch import Runner, directly, kind_of, refuse_second_derivative, runner
from turbo_ops.gemm import gemm, gemm_accumulate_, matmul
from turbo_ops.quantize import cast, cast_arguments, cast_both, quantize


class Call(NamedTuple):
    """All but the tensors to differentiate. shared: what x is a view of, which other layers may read too."""

    recipe: Recipe
    dtype: torch.dtype
    recording: bool
    shared: Tensor | None
    history: Tensor | None
    resident: bool
    run: Runner

    def amax(self, row: int) -> AmaxRow | None:
        return None if self.history is None else AmaxRow(self.history, row)


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        recipe, dtype, recording, _, history, resident, run = call
        # needs_input_grad is True for a parameter under no_grad too, and grad mode is always off in here
        need_x, need_weight = (recording and need for need in ctx.needs_input_grad[:2])
        fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad
        lhs, x_t = _input_casts(x, fprop.lhs, wgrad.rhs, need_weight, call)
        # backward casts what is not held, from the weight itself
        recast = need_x and dgrad.rhs is not None and not (resident and weight.requires_grad)
        rhs, weight_t = _weight_casts(weight, fprop.rhs, dgrad.rhs, need_x and not recast, call)
        weight_t = Scaled(weight) if recast else weight_t
        ctx.save_for_backward(*(x_t or _NOTHING), *(weight_t or _NOTHING))
        main = weight if need_weight and getattr(weight, "main_grad", None) is not None else None
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.kept = recipe, history, run, recast, main, dtypes
        bias = None if bias is None else bias.to(dtype)
        return matmul(lhs, rhs, dtype, bias=bias, fast_accum=fprop.fast_accum, run=run, slot="fprop")

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear")
        saved = ctx.saved_tensors  # once: non-reentrant checkpointing unpacks each tensor a single time
        x_t, weight_t = Scaled(*saved[:2]), Scaled(*saved[2:])
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        recipe, history, run, recast, main, (x_dtype, weight_dtype, bias_dtype) = ctx.kept
        dgrad, wgrad = recipe.dgrad, recipe.wgrad
        run = directly if run is directly else runner(kind_of(grad_y), run)
        amax = None if history is None else AmaxRow(history, GRAD_OUTPUT)
        grad_x = grad_weight = None
        if need_x and need_weight:
            grad, grad_t = cast_both(grad_y, dgrad.lhs, wgrad.lhs, amax, run, GRAD_OUTPUT)
        elif need_x:
            grad = cast(grad_y, dgrad.lhs, amax, run, GRAD_OUTPUT)
        elif need_weight:
            grad_t = cast(grad_y.t(), wgrad.lhs, amax, run, "grad_output.t")
        if need_x:
            if recast:
                past = None if history is None else AmaxRow(history, WEIGHT)
                weight_t = cast(weight_t.data.t(), dgrad.rhs, past, run, "weight.t")
            grad_x = matmul(grad, weight_t, x_dtype, fast_accum=dgrad.fast_accum, run=run, slot="dgrad")
        if main is not None:
            operands = grad_t.data, x_t.data, grad_t.scale, x_t.scale
            grad_weight = into_main_grad(main, lambda out: gemm_accumulate_(out, *operands, wgrad.fast_accum))
        elif need_weight:
            grad_weight = matmul(
                grad_t, x_t, weight_dtype, fast_accum=wgrad.fast_accum, run=run, slot="wgrad"
            )
        grad_bias = grad_y.sum(0).to(bias_dtype) if need_bias else None
        return grad_x, grad_weight, grad_bias, None


_NOTHING = (None, None)


def _operands(
    x: Tensor, how: Cast | None, how_t: Cast | None, need_t: bool, call: Call, row: int
) -> tuple[Scaled, Scaled | None]:
    """x cast along its last axis, x.t() along its own where backward needs it; uncast, in `call.dtype`."""
    amax, run = call.amax(row), call.run
    if need_t and how is not None and how == how_t:
        return cast_both(x, how, how_t, amax, run, row)
    operand = cast(x if how else x.to(call.dtype), how, amax, run, row)
    if not need_t:
        return operand, None
    return operand, cast(x.t() if how_t else x.to(call.dtype).t(), how_t, amax, run, (row, "transposed"))


def _input_casts(
    x: Tensor, how: Cast | None, how_t: Cast | None, need_t: bool, call: Call
) -> tuple[Scaled, Scaled | None]:
    """`_operands`, cast once for all layers that read the same activation (q, k and v; gate and up).

    The casts are an attribute of the activation, with its version: they die with it.
    """
    shared = call.shared
    if shared is None or how is None:
        return _operands(x, how, how_t, need_t, call, INPUT)
    key = shared._version, x.shape, how, how_t, call.dtype  # as in carry_casts
    found = getattr(shared, "_turbo_casts", None)
    if found is None or found[0] != key or (need_t and found[2] is None):
        found = key, *_operands(x, how, how_t, need_t, call, INPUT)
        shared._turbo_casts = found  # type: ignore[attr-defined]
    return found[1], found[2] if need_t else None


def carry_casts(x: Tensor, how: Cast | None, lhs: Scaled, x_t: Scaled) -> None:
    """Let x [..., in] carry casts that were made before it came to `linear`: by `how` along both axes."""
    dtype, rows = x.dtype, (x.shape[:-1].numel(), x.shape[-1])
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    x._turbo_casts = (x._version, rows, how, how, dtype), lhs, x_t  # type: ignore[attr-defined]


def _weight_casts(
    weight: Tensor, how: Cast | None, how_t: Cast | None, need_t: bool, call: Call
) -> tuple[Scaled, Scaled | None]:
    """`_operands`, cast once for all micro-batches of a step."""
    if how is None or not (call.recording and call.resident) or torch.compiler.is_compiling():
        return _operands(weight, how, how_t, need_t, call, WEIGHT)
    return weight_cache.kept(
        weight,
        (how, how_t, need_t, call.dtype),
        lambda: _operands(weight, how, how_t, need_t, call, WEIGHT),
    )


def into_main_grad(weight: Any, add_into: Callable[[Tensor], None]) -> Tensor | None:
    """wgrad summed into `weight.main_grad` (Megatron's convention); `.grad` gets nothing.

    Where the weight has `grad_added_to_main_grad` it becomes True, and a placeholder makes its hooks run.
    """
    main_grad = weight.main_grad
    if main_grad.shape != weight.shape or not main_grad.is_floating_point():
        given = f"{tuple(main_grad.shape)} of {main_grad.dtype}"
        raise ValueError(f"main_grad {given} must have the weight's {tuple(weight.shape)} and be fp32, say")
    add_into(main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return main_grad.new_zeros((), dtype=weight.dtype).expand(weight.shape)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    history: Tensor | None = None,
    *,
    resident: bool = True,
) -> Tensor:
    """x [..., in] @ weight [out, in].T + bias [out] -> [..., out], differentiable once in all three.

    The output has x's dtype, or autocast's; gradients have their tensors' dtypes. recipe None means no casts.
    history: the layer's own `delayed.new_history`, for a recipe that asks for one. resident: whether the
    weight stays in memory; if not (FSDP gathers it), no cast of it outlives the GEMM that it was made for.
    Any extents, 0 and 1 included. Raises ValueError where shapes or, outside autocast, dtypes disagree, or a
    history is missing.
    """
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [..., in] and [out, in]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear: bias {tuple(bias.shape)} must be [out] of weight {tuple(weight.shape)}")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ValueError(f"linear: recipe={recipe!r}: give a Recipe, turbo_nn.RECIPES[name] say")
    dtype = x.dtype
    if dtype not in DTYPES:
        raise ValueError(f"linear: x is {dtype}: give fp32, bf16 or fp16")
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    elif not x.dtype == weight.dtype == (x if bias is None else bias).dtype:
        dtypes = f"x {x.dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}"
        raise ValueError(f"linear: dtypes differ ({dtypes}): convert the input, or run under torch.autocast")
    # an activation inside a graph dies with the step; a buffer of the caller's may be written unseen
    compiling = torch.compiler.is_compiling()
    shared = None if compiling or x.grad_fn is None else x
    recipe, rows = recipe or HIGH_PRECISION, x
    if x.ndim != 2:  # a view's two autograd nodes cost 20 us a step
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    of_bias = None if bias is None or compiling else kind_of(bias)
    run = directly if compiling else runner((kind_of(rows), kind_of(weight), of_bias, recipe, dtype))
    call = Call(recipe, dtype, torch.is_grad_enabled(), shared, history, resident, run)
    y = LinearFunction.apply(rows, weight, bias, call)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])


def linear_backends(weight: Tensor, recipe: Recipe, tokens: int = 4096) -> str:
    """What `linear` will run on for this weight: "gemm:blaslt quantize:triton". Allocates nothing."""
    how = recipe.fprop if recipe.fprop.lhs else recipe.dgrad
    with FakeTensorMode():
        x = torch.empty(tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
        fake = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if how.lhs is None or how.rhs is None:
            return f"gemm:{gemm.choose(x, fake, None, None, None, x.dtype, True).name}"
        casts = [(t, *cast_arguments(t, c)) for t, c in ((x, how.lhs), (fake, how.rhs))]
        (a, a_scale), (b, b_scale) = (quantize.reference(*args) for args in casts)
        chosen = gemm.choose(a, b, a_scale, b_scale, None, x.dtype, how.fast_accum).name
        return f"gemm:{chosen} quantize:{quantize.choose(*casts[0]).name}"
