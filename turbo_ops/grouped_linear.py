"""A linear layer for each group of rows: three grouped products, each in the precision of a recipe."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from turbo_ops import weight_cache
from turbo_ops.arch import DTYPES
from turbo_ops.casting import HIGH_PRECISION, Cast, Recipe, Scaled
from turbo_ops.dispatch import refuse_second_derivative
from turbo_ops.grouped_gemm import grouped_gemm, grouped_gemm_accumulate_, grouped_gemm_wgrad
from turbo_ops.linear import into_main_grad
from turbo_ops.moe_permute import Permutation, moe_permute_gather, permute_rows, rows_of, unpermute_rows
from turbo_ops.quantize import ALIGN, UNWANTED, cast_groups


class Source(NamedTuple):
    """What x is made of: `moe_permute_gather(tokens [T, in], sources [R], None, k)`."""

    tokens: Tensor
    sources: Tensor
    k: int


class Call(NamedTuple):
    """All but the tensors to differentiate."""

    recipe: Recipe
    dtype: torch.dtype
    recording: bool
    resident: bool
    source: Source | None


class GroupedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, call: Call) -> Tensor:
        recipe, dtype, recording, resident, source = call
        need_x, need_weight = (recording and need for need in ctx.needs_input_grad[:2])
        fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad
        lhs, x_t = cast_groups(x.to(dtype), ends, fprop.lhs, wgrad.rhs, cols=need_weight)
        # backward casts what is not held, from the weight itself
        recast = need_x and dgrad.rhs is not None and not (resident and weight.requires_grad)
        rhs, weight_t = _weight_casts(weight, fprop.rhs, dgrad.rhs, need_x and not recast, call)
        weight_t = Scaled(weight) if recast else weight_t
        remade = source if need_weight and wgrad.rhs is None else None
        kept = (remade.tokens, remade.sources) if remade else x_t
        ctx.save_for_backward(ends, *kept, *weight_t)
        owner = _owner(weight)
        main = owner if need_weight and getattr(owner, "main_grad", None) is not None else None
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.kept = recipe, dtype, recast, remade and remade.k, (main, _is_flipped(weight)), dtypes
        bias = None if bias is None else bias.to(dtype)
        return grouped_gemm(lhs.data, rhs.data, ends, lhs.scale, rhs.scale, bias, dtype, fprop.fast_accum)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("grouped_linear")
        ends, *saved = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        recipe, dtype, recast, k, target, (x_dtype, weight_dtype, bias_dtype) = ctx.kept
        dgrad, wgrad = recipe.dgrad, recipe.wgrad
        grad, grad_t = cast_groups(grad_y, ends, dgrad.lhs, wgrad.lhs, rows=need_x, cols=need_weight)
        grad_x = grad_weight = grad_bias = None
        if need_x:
            weight_t = cast_experts(saved[2], None, dgrad.rhs)[1] if recast else Scaled(*saved[2:])
            scales = grad.scale, weight_t.scale
            grad_x = grouped_gemm(grad.data, weight_t.data, ends, *scales, None, x_dtype, dgrad.fast_accum)
        if need_weight:
            x_t = Scaled(*saved[:2])
            if k:
                x_t = Scaled(moe_permute_gather(saved[0], saved[1], None, k).to(dtype).t())
            grad_weight = _weight_grad(grad_t, x_t, ends, target, weight_dtype, wgrad.fast_accum)
        if need_bias:  # the sum of a group's rows: a product with ones, which stops at its end
            ones = grad_y.new_ones((1, len(grad_y)))
            grad_bias = grouped_gemm_wgrad(grad_y.t(), ones, ends, dtype=bias_dtype)[:, :, 0]
        return grad_x, grad_weight, grad_bias, None, None


def _weight_grad(
    grad_t: Scaled, x_t: Scaled, ends: Tensor, target: tuple, dtype: torch.dtype, fast_accum: bool
) -> Tensor | None:
    """In the order in which the weight is stored, so that nothing copies it. target: main_grad's, flipped."""
    main, flipped = target
    a, b = (x_t, grad_t) if flipped else (grad_t, x_t)
    operands = a.data, b.data, ends, a.scale, b.scale
    if main is None:
        made = grouped_gemm_wgrad(*operands, dtype, fast_accum)
    else:
        made = into_main_grad(main, lambda out: grouped_gemm_accumulate_(out, *operands, fast_accum))
    return made.transpose(1, 2) if flipped and made is not None else made


def _is_flipped(weight: Tensor) -> bool:
    """Whether memory has it as [E, in, out]."""
    return weight.transpose(1, 2).is_contiguous() and not weight.is_contiguous()


def _owner(weight: Tensor) -> Tensor:
    """The parameter that a flipped view is of; else the weight itself."""
    base = weight._base
    return (
        base if base is not None and base.shape == weight.transpose(1, 2).shape and base.is_leaf else weight
    )


def _weight_casts(
    weight: Tensor, how: Cast | None, how_t: Cast | None, need_t: bool, call: Call
) -> tuple[Scaled, Scaled]:
    """`cast_experts`, once for all micro-batches of a step."""

    def cast() -> tuple[Scaled, Scaled]:
        given = weight if how and how_t else weight.to(call.dtype)
        return cast_experts(given, how, how_t, cols=need_t)

    if how is None or not (call.recording and call.resident) or torch.compiler.is_compiling():
        return cast()
    owner = _owner(weight)
    return weight_cache.kept(owner, (how, how_t, need_t, call.dtype, owner is weight), cast)


def cast_experts(
    weight: Tensor, how: Cast | None, how_t: Cast | None, *, cols: bool = True
) -> tuple[Scaled, Scaled]:
    """weight [E, out, in] cast by `how` along `in`, and as [E, in, out] by `how_t` along `out` where `cols`.

    Both are operands b of `grouped_gemm`.
    """
    if _is_flipped(weight):
        weight_t, lhs = _cast_stored(weight.transpose(1, 2), how_t, how, rows=cols, cols=True)
        return lhs, weight_t
    return _cast_stored(weight, how, how_t, rows=True, cols=cols)


def _cast_stored(
    weight: Tensor, how: Cast | None, how_t: Cast | None, *, rows: bool, cols: bool
) -> tuple[Scaled, Scaled]:
    """As groups of out rows each, made up to whole blocks."""
    lhs, weight_t = Scaled(weight) if rows else UNWANTED, Scaled(weight.transpose(1, 2)) if cols else UNWANTED
    rows, cols = rows and how is not None, cols and how_t is not None
    if not (rows or cols):
        return lhs, weight_t
    experts, out, width = weight.shape
    padded = -(-out // ALIGN) * ALIGN
    flat = F.pad(weight, (0, 0, 0, padded - out)).reshape(experts * padded, width)
    ends = torch.arange(1, experts + 1, device=weight.device) * padded
    made, made_t = cast_groups(flat, ends, how, how_t, rows=rows, cols=cols)
    if rows:
        scale = made.scale
        if scale is not None and scale.ndim == 2:
            scale = scale.unflatten(0, (experts, -1))
            scale = scale[:, :out] if scale.shape[1] == padded else scale
        lhs = Scaled(made.data.view(experts, padded, width)[:, :out], scale)
    if cols:
        scale = made_t.scale
        if scale is not None and scale.ndim == 2:
            scale = scale.unflatten(1, (experts, -1)).transpose(0, 1)
        weight_t = Scaled(made_t.data.view(width, experts, padded).transpose(0, 1)[:, :, :out], scale)
    return lhs, weight_t


def _aligned(ends: Tensor, rows: int) -> Permutation:
    """The permutation that moves each group to a multiple of `ALIGN` rows."""
    experts, device = len(ends), ends.device
    sizes = ends.diff(prepend=ends.new_zeros(1))
    padded = (sizes + (ALIGN - 1)) // ALIGN * ALIGN
    moved = padded.cumsum(0)
    shift = (moved - padded) - (ends - sizes)
    row = torch.arange(rows, device=device)
    group = torch.searchsorted(ends, row, right=True)
    places = torch.where(group < experts, row + shift[group.clamp(max=experts - 1)], -1)
    sources = torch.full((rows_of(rows, experts, ALIGN) + 1,), -1, device=device)
    sources[places] = torch.where(places >= 0, row, -1)  # -1: the spare last row
    return Permutation(places[:, None], sources[:-1].clone(), moved, ends.new_zeros(1))


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    align: int = 1,
    resident: bool = True,
    source: Source | None = None,
) -> Tensor:
    """x [R, in], weight [E, out, in], ends [E] int64, bias [E, out] -> [R, out]: a linear layer a group.

    Rows ends[e - 1] to ends[e] go through expert e (`moe_permute` makes rows and ends); those from the last
    end on are zero, in the output and in x's gradient. An expert without rows has gradients of 0.
    Differentiable once in x, weight and bias; dtypes are as of `linear`. recipe None means no casts. align:
    what every end is a multiple of; a recipe that casts copies x to multiples of 128 where it is another.
    resident: see `linear`. source: lets backward make x again in place of keeping it. ValueError where shapes
    or dtypes do not fit, and for a recipe with a history or MX blocks.
    """
    dtype = _checked_dtype(x, weight, ends, bias, recipe)
    recipe = recipe or HIGH_PRECISION
    call = Call(recipe, dtype, torch.is_grad_enabled(), resident, source)
    if not recipe.casts or align % ALIGN == 0:
        return GroupedLinearFunction.apply(x, weight, bias, ends, call)
    moved = _aligned(ends, len(x))
    rows = permute_rows(x.contiguous(), moved)
    return unpermute_rows(GroupedLinearFunction.apply(rows, weight, bias, moved.ends, call), moved)


def _checked_dtype(
    x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, recipe: Recipe | None
) -> torch.dtype:
    """What the products are computed from; ValueError for what cannot be."""
    problem, dtype = None, x.dtype
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        problem = f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [R, in] and [E, out, in]"
    elif bias is not None and bias.shape != weight.shape[:2]:
        problem = f"bias {tuple(bias.shape)} must be [E, out], {tuple(weight.shape[:2])}"
    elif ends.shape != weight.shape[:1] or ends.dtype != torch.int64:
        problem = f"ends {tuple(ends.shape)} of {ends.dtype} must be [E], ({len(weight)},), of torch.int64"
    elif recipe is not None and not isinstance(recipe, Recipe):
        problem = f"recipe={recipe!r}: give a Recipe, turbo_nn.RECIPES[name] say"
    elif recipe is not None:
        problem = recipe_problem(recipe)
    if problem is None and dtype not in DTYPES:
        problem = f"x is {dtype}: give fp32, bf16 or fp16"
    if problem:
        raise ValueError(f"grouped_linear: {problem}")
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    if not x.dtype == weight.dtype == (x if bias is None else bias).dtype:
        dtypes = f"x {x.dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}"
        raise ValueError(
            f"grouped_linear: dtypes differ ({dtypes}): convert the input, or run under torch.autocast"
        )
    return dtype


def recipe_problem(recipe: Recipe) -> str | None:
    """Why grouped products have no such casts; None where they do."""
    if recipe.history:
        return "a recipe with a history would need one for each expert: use fp8_tensorwise"
    for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        for cast in (gemm.lhs, gemm.rhs):
            if cast is not None and cast.scale_dtype != "fp32":
                return f"blocks of {cast.block} with {cast.scale_dtype} scales: use fp8_blockwise"
    return None
