"""Scales of a group of rows: a tile of 128 rows is in one group, which it looks up among the ends."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbo_ops.arch import hardware
from turbo_ops.device.launch import Launch
from turbo_ops.device.scale import bits_of, largest, magnitude, scale_and_inverse
from turbo_ops.device.target import refuses_device
from turbo_ops.quantize.backend_triton.tiles import largest4, load4, store_rows, store_transposed
from turbo_ops.quantize.groups import (
    ALIGN,
    empty,
    empty_both,
    groups_problem,
    quantize_both_groups,
    quantize_groups,
)

MAX_GROUPS = 1024  # ends that a program holds


@triton.jit
def grouped_tile(
    x, ends, R, C, E, stride_r, stride_c, EXPERTS: tl.constexpr, G: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Of this program: its group, where its tile begins, rows, columns, values, zeros behind all groups."""
    first_r = (tl.program_id(0) // tl.cdiv(C, BC)).to(tl.int64) * (4 * G)
    first_c = (tl.program_id(0) % tl.cdiv(C, BC)).to(tl.int64) * BC
    names = tl.arange(0, EXPERTS)
    known = tl.load(ends + names, mask=names < E, other=R + 1)
    group = tl.sum((known <= first_r).to(tl.int32), 0)
    last = tl.load(ends + E - 1)
    corner = x + first_r * stride_r + first_c * stride_c
    rows, cols = (4 * tl.arange(0, G)).to(tl.int64), tl.arange(0, BC).to(tl.int64)
    tiles = load4(corner, rows, cols, last - first_r, C - first_c, stride_r, stride_c, False)
    return group, first_r, first_c, tl.arange(0, G), tl.arange(0, BC), tiles


@triton.jit
def group_amax_kernel(
    x, ends, amax, amax_t, R, C, E, stride_r, stride_c,
    ROWWISE: tl.constexpr, EXPERTS: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude of a group, or of each row and each column of a group; all begin at 0."""
    group, first_r, first_c, groups, cols, tiles = grouped_tile(
        x, ends, R, C, E, stride_r, stride_c, EXPERTS, G, BC
    )  # fmt: skip
    if group < E:
        found = tl.reduce(largest4(tiles[0], tiles[1], tiles[2], tiles[3]), 0, largest)
        if ROWWISE:
            for i in tl.static_range(4):
                of_rows = bits_of(tl.reduce(magnitude(tiles[i]), 1, largest))
                rows = first_r + 4 * groups + i
                tl.atomic_max(amax + rows, of_rows, mask=rows < R)
            at = amax_t + group.to(tl.int64) * C + first_c + cols
            tl.atomic_max(at, bits_of(found), mask=cols < C - first_c)
        else:
            tl.atomic_max(amax + group, bits_of(tl.reduce(found, 0, largest)))


@triton.jit
def store_scales(
    amax, scale, scale_t, E, C, cols, EXPERTS: tl.constexpr, LIMIT: tl.constexpr, ROWWISE: tl.constexpr
):  # fmt: skip
    """Those of all groups, by the programs of the first rows: an empty group has no program of its own."""
    if ROWWISE:
        for _group in range(E):
            found = tl.load(amax + cols, mask=cols < C, other=0)
            made, _ = scale_and_inverse(found.to(tl.float32, bitcast=True), LIMIT, False)
            tl.store(scale_t + cols, made, mask=cols < C)
            amax += C
            scale_t += C
    else:
        names = tl.arange(0, EXPERTS)
        found = tl.load(amax + names, mask=names < E, other=0)
        made, _ = scale_and_inverse(found.to(tl.float32, bitcast=True), LIMIT, False)
        tl.store(scale + names, made, mask=names < E)
        if scale_t is not None:
            tl.store(scale_t + names, made, mask=names < E)


@triton.jit
def group_cast_kernel(
    x, ends, amax, amax_t, data, scale, data_t, scale_t, R, C, E, stride_r, stride_c,
    LIMIT: tl.constexpr, ROWWISE: tl.constexpr, EXPERTS: tl.constexpr,
    PACK: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    group, first_r, first_c, groups, cols, tiles = grouped_tile(
        x, ends, R, C, E, stride_r, stride_c, EXPERTS, G, BC
    )  # fmt: skip
    left_r, left_c = R - first_r, C - first_c
    own = tl.minimum(group, E - 1).to(tl.int64)
    out, out_t = data + first_r * C + first_c, data_t
    if data_t is not None:
        out_t = data_t + first_c * R + first_r
    if (first_r == 0) & (ROWWISE or first_c == 0):
        store_scales(
            amax_t if ROWWISE else amax, scale, scale_t, E, C, first_c + cols, EXPERTS, LIMIT, ROWWISE
        )  # fmt: skip
    if ROWWISE:
        for i in tl.static_range(4):
            rows = 4 * groups + i
            found = tl.load(amax + first_r + rows, mask=rows < left_r, other=0)
            row_scale, inverse = scale_and_inverse(found.to(tl.float32, bitcast=True), LIMIT, False)
            if first_c == 0:
                tl.store(scale + first_r + rows, row_scale, mask=rows < left_r)
            store_rows(out, tiles[i], inverse[:, None], rows, cols, left_r, left_c, C, False)
        found = tl.load(amax_t + own * C + first_c + cols, mask=(cols < left_c) & (group < E), other=0)
        _, inverse = scale_and_inverse(found.to(tl.float32, bitcast=True), LIMIT, False)
        store_transposed(out_t, tiles, inverse[None, :], groups, cols, left_r, left_c, R, False, PACK)
    else:
        found = tl.load(amax + own, mask=group < E, other=0)
        _, inverse = scale_and_inverse(found.to(tl.float32, bitcast=True), LIMIT, False)
        for i in tl.static_range(4):
            store_rows(out, tiles[i], inverse, 4 * groups + i, cols, left_r, left_c, C, False)
        if data_t is not None:
            again = tl.load(amax + own, mask=group < E, other=0)
            _, inverse = scale_and_inverse(again.to(tl.float32, bitcast=True), LIMIT, False)
            store_transposed(out_t, tiles, inverse, groups, cols, left_r, left_c, R, False, PACK)


def refuses(x: Tensor, ends: Tensor, dtype: torch.dtype, rowwise: bool = False) -> str | None:
    if not ends.is_contiguous() or len(ends) > MAX_GROUPS:
        return f"ends must be contiguous and at most {MAX_GROUPS}, are {len(ends)}"
    return groups_problem(x, ends, dtype) or refuses_device(x, dtype)


def _plan(x: Tensor, ends: Tensor, dtype: torch.dtype, *, rowwise: bool, both: bool) -> Callable:
    (R, C), E, device = x.shape, len(ends), x.device
    grid, scalars = (triton.cdiv(R, ALIGN) * triton.cdiv(C, 128),), (R, C, E, *x.stride())
    pack = 0 if R % 4 else 2 if hardware(device).startswith("sm") else 1
    facts = {"EXPERTS": triton.next_power_of_2(E), "G": ALIGN // 4, "BC": 128, "num_warps": 8}
    find = Launch(group_amax_kernel, grid, scalars, ROWWISE=rowwise, **facts)
    limit = torch.finfo(dtype).max
    cast = Launch(group_cast_kernel, grid, scalars, LIMIT=limit, ROWWISE=rowwise, PACK=pack, **facts)

    def run(x: Tensor, ends: Tensor, *_: object) -> tuple[Tensor, ...]:
        made = empty_both(x, ends, dtype, rowwise) if both else empty(x, ends, dtype)
        if R * C == 0:
            for scale in made[1::2]:
                scale.fill_(1)
            return made
        amax = torch.zeros(R + E * C if rowwise else E, dtype=torch.int32, device=device)
        amax, amax_t = (amax[:R], amax[R:]) if rowwise else (amax, None)
        find(x, ends, amax, amax_t)
        cast(x, ends, amax, amax_t, *made, *[None] * (4 - len(made)))
        return made

    return run


@quantize_groups.backend("triton", refuses=refuses, planned=True)
def _(x: Tensor, ends: Tensor, dtype: torch.dtype) -> Callable:
    return _plan(x, ends, dtype, rowwise=False, both=False)


@quantize_both_groups.backend("triton", refuses=refuses, planned=True)
def _(x: Tensor, ends: Tensor, dtype: torch.dtype, rowwise: bool) -> Callable:
    return _plan(x, ends, dtype, rowwise=rowwise, both=True)
