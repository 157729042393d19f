"""The vocabulary of low precision: a Cast says how, Scaled is the result, and real = data * scale."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

# (rows, columns) that share a scale, 0 = the whole axis, and the scale of each
BLOCKS = {(0, 0): "fp32", (1, 0): "fp32", (1, 32): "e8m0", (1, 128): "fp32", (128, 128): "fp32"}
# Where kernels that cast what they make on the way were measured to pay; elsewhere one makes and one casts.
ON_THE_WAY: tuple[str, ...] = ()
INPUT, WEIGHT, GRAD_OUTPUT = range(3)  # rows of an amax history
SCALE_DTYPES = {"fp32": torch.float32, "e8m0": torch.float8_e8m0fnu}


@dataclass(frozen=True)
class Cast:
    """How one operand of a GEMM becomes FP8.

    dtype: "e4m3" or "e5m2"; which encoding that is depends on the GPU (`arch.fp8_dtype`).
    block: (rows, contracted) extent that shares one scale, 0 = the whole axis: (0, 0) tensorwise,
        (1, 0) rowwise, (1, 128) and (128, 128) blockwise, (1, 32) MX (OCP Microscaling Formats v1.0).
    scale_dtype: "fp32", or "e8m0" (a power of two, rounded up so that nothing saturates; arXiv 2506.08027).
    history: optimizer steps whose largest amax gives the scale (`delayed`), 0 = the tensor's own amax.
    """

    dtype: str
    block: tuple[int, int]
    scale_dtype: str = "fp32"
    history: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("e4m3", "e5m2"):
            raise ValueError(f"Cast.dtype={self.dtype!r}: use 'e4m3' or 'e5m2'")
        if not isinstance(self.block, tuple | list) or tuple(self.block) not in BLOCKS:
            raise ValueError(f"Cast.block={self.block!r}: use one of {tuple(BLOCKS)}")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"Cast.scale_dtype={self.scale_dtype!r}: use one of {tuple(SCALE_DTYPES)}")
        if self.scale_dtype != BLOCKS[self.block[0], self.block[1]]:
            raise ValueError(
                f"Cast: scale_dtype {self.scale_dtype!r} with block {self.block}: e8m0 goes with (1, 32)"
            )
        if not isinstance(self.history, int) or self.history < 0:
            raise ValueError(f"Cast.history={self.history!r}: use a number of steps, 0 for none")
        if self.history and tuple(self.block) != (0, 0):
            raise ValueError(f"Cast: history {self.history} with block {self.block}: it goes with (0, 0)")
        object.__setattr__(self, "block", tuple(self.block))


@dataclass(frozen=True)
class Gemm:
    """The casts of `lhs @ rhs.T`; none at all means high precision.

    fast_accum: let Hopper's tensor cores keep FP8 partial sums in their own registers, some 14 bits wide,
    and not promote them to fp32. Ignored elsewhere, and with blockwise scales, promoted every 128 products.
    """

    lhs: Cast | None = None
    rhs: Cast | None = None
    fast_accum: bool = True

    def __post_init__(self) -> None:
        for name, operand in (("lhs", self.lhs), ("rhs", self.rhs)):
            if not isinstance(operand, Cast | None):
                raise ValueError(f"Gemm.{name}={operand!r}: give a Cast, or None for high precision")
        if not isinstance(self.fast_accum, bool):
            raise ValueError(f"Gemm.fast_accum={self.fast_accum!r}: use true or false")
        if (self.lhs is None) != (self.rhs is None):
            raise ValueError(f"Gemm(lhs={self.lhs}, rhs={self.rhs}): cast both operands or neither")

    @property
    def by_own_amax(self) -> "Gemm":
        lhs, rhs = (cast and replace(cast, history=0) for cast in (self.lhs, self.rhs))
        return Gemm(lhs, rhs, self.fast_accum)


@dataclass(frozen=True)
class Recipe:
    """The three GEMMs of a linear layer: input x weight, grad_output x weight.T, grad_output.T x input.T.

    fprop contracts `in`, dgrad contracts `out`, wgrad contracts the tokens. Printed, a recipe is a table.
    """

    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()

    def __post_init__(self) -> None:
        for name in ("fprop", "dgrad", "wgrad"):
            if not isinstance(getattr(self, name), Gemm):
                raise ValueError(f"Recipe.{name}={getattr(self, name)!r}: give a Gemm")

    @property
    def casts(self) -> bool:
        """Whether any GEMM is cast."""
        return any(gemm.lhs is not None for gemm in (self.fprop, self.dgrad, self.wgrad))

    @functools.cached_property
    def history(self) -> int:
        """The longest history that a cast asks for."""
        casts = [c for gemm in (self.fprop, self.dgrad, self.wgrad) for c in (gemm.lhs, gemm.rhs) if c]
        return max((cast.history for cast in casts), default=0)

    @functools.cached_property
    def by_own_amax(self) -> "Recipe":
        """The recipe without histories, for tensors that have none."""
        return Recipe(*(gemm.by_own_amax for gemm in (self.fprop, self.dgrad, self.wgrad)))

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.fprop, self.dgrad, self.wgrad))

    def __hash__(self) -> int:
        return self._hash  # asked for at each call of a layer, and 3 us long

    def __str__(self) -> str:
        lines = []
        for name in ("fprop", "dgrad", "wgrad"):
            gemm = getattr(self, name)
            cells = [
                f"{c.dtype} {c.block} {c.scale_dtype}{f' history {c.history}' if c.history else ''}"
                if c
                else "high precision"
                for c in (gemm.lhs, gemm.rhs)
            ]
            lines.append(f"{name}  {cells[0]:22} {cells[1]:22}")
        return "\n".join(lines)


HIGH_PRECISION = Recipe()


class Scaled(NamedTuple):
    """`scale` has one entry per block, so its shape says the granularity; None means high precision."""

    data: Tensor
    scale: Tensor | None = None


class AmaxRow:
    """The row of an amax history (`delayed`) that a cast reads and notes its tensor in."""

    __slots__ = ("history", "row")

    def __init__(self, history: Tensor, row: int):
        self.history, self.row = history, row

    @property
    def known(self) -> bool:
        """Whether a step before this one noted an amax: until then a cast looks for amax itself."""
        return self.row in getattr(self.history, "known", ())

    def note(self, x: Tensor) -> None:
        """Gather the amax of a tensor that was cast without the history."""
        if x.numel():
            slot = self.history[self.row, 0]
            slot.copy_(torch.maximum(slot, x.detach().abs().amax().float()))
