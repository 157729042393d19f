"""How the kernels see a tensor, and what they write of it."""

import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from turbo_ops.arch import hardware
from turbo_ops.quantize.op import scale_layout

Plan = Callable[..., tuple[Tensor, ...]]  # x, ... -> data, scale of each orientation


class Layout:
    """How a kernel sees x, and what it writes: data and scale where `rows`, their transposes where `cols`.

    A transposed view is seen as the tensor that it is a view of, and the orientations change places.
    """

    def __init__(
        self, x: Tensor, dtype: torch.dtype, block: tuple[int, int], scale_dtype: torch.dtype, both: bool
    ):
        self.swapped = x.stride(0) == 1 and x.stride(1) != 1
        seen = x.t() if self.swapped else x
        self.extents, self.strides = tuple(seen.shape), tuple(seen.stride())
        self.rows, self.cols = both or not self.swapped, both or self.swapped
        self.device, self.dtype, self.block, self.scale_dtype = x.device, dtype, block, scale_dtype
        self.limit = torch.finfo(dtype).max
        self.dense = self.strides == (self.extents[1], 1)
        wanted = (self.rows, self.extents), (self.cols, self.extents[::-1])
        self._outputs = [make for want, extents in wanted for make in self._makers(want, *extents)]
        order = (2, 3, 0, 1) if self.swapped else (0, 1, 2, 3)
        kept = (self.rows, self.rows, self.cols, self.cols)
        self._order = [i for i in order if kept[i]]

    def _makers(self, wanted: bool, rows: int, cols: int) -> tuple[Callable[[], Tensor | None], ...]:
        """What allocates data and what allocates scale."""
        if not wanted:
            return (lambda: None), (lambda: None)
        shape, strides = scale_layout(rows, cols, *self.block)
        data = self._allocator((rows, cols), (max(cols, 1), 1), self.dtype)
        if strides[0] == shape[1] or strides[1] != 1:
            return data, self._allocator(shape, strides, self.scale_dtype)
        padded = self._allocator((shape[0], strides[0]), strides, self.scale_dtype)  # padding included
        return data, lambda: padded()[:, : shape[1]]

    def _allocator(self, shape: tuple, strides: tuple, dtype: torch.dtype) -> Callable[[], Tensor]:
        return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=self.device)

    def allocate(self) -> list[Tensor | None]:
        """data, scale, data_t, scale_t; None where not wanted."""
        return [make() for make in self._outputs]

    def results(self, outputs: list[Tensor | None]) -> tuple[Tensor, ...]:
        """What the op returns of `allocate`'s."""
        return tuple([outputs[i] for i in self._order])  # type: ignore[misc]

    def tiles(self, rows: int, cols: int) -> tuple[tuple[int], dict]:
        """The grid of tiles of rows x cols, and what the kernel is told of them."""
        nvidia = hardware(self.device).startswith("sm")
        pack = 0 if self.extents[0] % 4 else 2 if nvidia else 1
        (R, C), largest_step = self.extents, max(*self.extents, *self.strides)
        facts = {"EVEN": R % rows == C % cols == 0, "PACK": pack, "WIDE": largest_step >= 1 << 22}
        return (triton.cdiv(R, rows) * triton.cdiv(C, cols),), facts | {"G": rows // 4, "BC": cols}
