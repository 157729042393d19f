"""Inputs of quantize, quantize_both and dequantize."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from turbo_ops.arch import fp8_dtype

BLOCKS = {
    "tensorwise": (0, 0, torch.float32),
    "rowwise": (1, 0, torch.float32),
    "1x128": (1, 128, torch.float32),
    "128x128": (128, 128, torch.float32),
    "mx": (1, 32, torch.float8_e8m0fnu),
}
SHAPES = {
    "test": [(1, 1), (0, 130), (200, 0), (37, 203), (130, 256), (256, 384)],
    "bench": [(8192, 4096), (8192, 14336), (28672, 4096)],
}
SPECIAL = {"zeros": 0.0, "tiny": 1e-38, "huge": 3e38, "nan": float("nan"), "inf": float("inf")}


def quantize(size: str, device: torch.device) -> dict:
    found = {}
    for block, (rows, cols, scale_dtype) in BLOCKS.items():
        for name in ("e4m3", "e5m2") if size == "test" else ("e4m3",):
            dtype = fp8_dtype(name, device)
            for shape in SHAPES[size]:
                make = partial(
                    _quantize, partial(_normal, shape, torch.bfloat16, device), dtype, rows, cols, scale_dtype
                )
                found[f"{block}-{name}-{shape[0]}x{shape[1]}-bf16"] = make
        if size == "test":
            e4m3 = fp8_dtype("e4m3", device)
            inputs: dict[str, Callable[[], Tensor]] = {
                **{
                    f"130x200-{t}": partial(_normal, (130, 200), d, device)
                    for t, d in (("fp32", torch.float32), ("fp16", torch.float16))
                },
                "256x384-fp32": partial(_normal, (256, 384), torch.float32, device),
                "200x130-transposed": lambda: _normal((130, 200), torch.bfloat16, device).t(),
                "256x128-fp32-transposed": lambda: _normal((128, 256), torch.float32, device).t(),
                "32x64-fp32-transposed": lambda: _normal((64, 32), torch.float32, device).t(),
                "64x130-broadcast": lambda: _normal((1, 130), torch.bfloat16, device).expand(64, 130),
                **{f"70x140-{n}": partial(_special, v, device) for n, v in SPECIAL.items()},
            }
            found |= {
                f"{block}-e4m3-{n}": partial(_quantize, x, e4m3, rows, cols, scale_dtype)
                for n, x in inputs.items()
            }
    return found


quantize_both = quantize


def quantize_delayed(size: str, device: torch.device) -> dict:
    """Histories that know nothing, that fit x, and that are too small for it."""
    found, pasts = {}, {"unknown": 0.0, "fits": 9.0, "overflows": 0.5}
    for name in ("e4m3", "e5m2") if size == "test" else ("e4m3",):
        for shape in SHAPES[size]:
            for past, amax in pasts.items() if size == "test" else (("fits", 9.0),):
                x = partial(_normal, shape, torch.bfloat16, device)
                make = partial(_delayed, x, amax, fp8_dtype(name, device))
                found[f"{name}-{shape[0]}x{shape[1]}-{past}"] = make
    if size == "test":
        e4m3 = fp8_dtype("e4m3", device)
        inputs: dict[str, Callable[[], Tensor]] = {
            "130x200-fp32": partial(_normal, (130, 200), torch.float32, device),
            "200x130-transposed": lambda: _normal((130, 200), torch.bfloat16, device).t(),
            "256x128-fp32-transposed": lambda: _normal((128, 256), torch.float32, device).t(),
            "32x64-fp32-transposed": lambda: _normal((64, 32), torch.float32, device).t(),
            **{f"70x140-{n}": partial(_special, v, device) for n, v in SPECIAL.items()},
        }
        found |= {f"e4m3-{n}": partial(_delayed, x, 9.0, e4m3) for n, x in inputs.items()}
    return found


quantize_both_delayed = quantize_delayed


def _delayed(x: Callable[[], Tensor], amax: float, dtype: torch.dtype) -> tuple:
    history = torch.zeros(3, 17, device=(values := x()).device)
    history[1, 3:5] = torch.tensor([amax, amax / 2])
    return values, history, 1, dtype


MADE_SHAPES = {"test": [(1, 1), (37, 203), (130, 256), (256, 384)], "bench": [(8192, 14336)]}


def quantize_both_swiglu(size: str, device: torch.device) -> dict:
    found = {}
    for block in ("1x128", "128x128", "mx") if size == "test" else ("1x128",):
        how = fp8_dtype("e4m3", device), *BLOCKS[block]
        for shape in MADE_SHAPES[size]:
            gates = partial(_gates, shape, device)
            found[f"{block}-silu-{shape[0]}x{shape[1]}"] = partial(_made, gates, "silu", how)
        if size == "test":
            for activation in ("gelu_tanh", "swigluoai"):
                halves = partial(_gates, (130, 256), device)
                found[f"{block}-{activation}-130x256"] = partial(_made, halves, activation, how)
    return found


def quantize_both_swiglu_delayed(size: str, device: torch.device) -> dict:
    found, dtype = {}, fp8_dtype("e4m3", device)
    for shape in MADE_SHAPES[size]:
        for past, amax in {"unknown": 0.0, "fits": 200.0, "overflows": 0.5}.items():
            make = partial(_made_delayed, partial(_gates, shape, device), amax, dtype)
            found[f"silu-{shape[0]}x{shape[1]}-{past}"] = make
    return found


def quantize_both_cross_entropy(size: str, device: torch.device) -> dict:
    shapes = {"test": [(1, 2), (37, 203), (130, 256), (128, 384)], "bench": [(2048, 128256)]}[size]
    found = {}
    for block, name in (("tensorwise", "e5m2"), ("1x128", "e4m3"), ("128x128", "e4m3")):
        how = fp8_dtype(name, device), *BLOCKS[block]
        for shape in shapes:
            found[f"{block}-{name}-{shape[0]}x{shape[1]}"] = partial(_loss, shape, how, device)
    return found


def _gates(shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Halves of one tensor."""
    gate, up = _normal((shape[0], 2 * shape[1]), torch.bfloat16, device).chunk(2, 1)
    return gate, up


def _made(gates: Callable[[], tuple], activation: str, how: tuple) -> tuple:
    return (*gates(), activation, *how)


def _made_delayed(gates: Callable[[], tuple], amax: float, dtype: torch.dtype) -> tuple:
    gate, up = gates()
    _, history, row, _ = _delayed(lambda: gate, amax, dtype)
    return gate, up, "silu", history, row, dtype


def _loss(shape: tuple[int, int], how: tuple, device: torch.device) -> tuple:
    from turbo_ops.cross_entropy.op import cross_entropy as contract

    logits = _normal(shape, torch.bfloat16, device)
    labels = torch.randint(shape[1], shape[:1], device=device)
    labels[1::3] = -100
    _, lse, peak = contract.reference(logits, labels)
    return logits, labels, torch.rand(shape[0], device=device), lse, peak, -100, *how


# rows of the groups, multiples of 128, rows behind them, columns
GROUPS = {
    "test": {
        "one": ([128], 0, 8),
        "empty-ends": ([0, 256, 0, 128, 0], 70, 200),
        "none-used": ([0, 0], 130, 24),
        "no-row": ([0], 0, 8),
        "no-column": ([128], 0, 0),
        "many": ([128 * (i % 2) for i in range(9)], 128, 132),
    },
    "bench": {"qwen3": ([512 + 128 * (i % 3 - 1) for i in range(128)], 0, 2048)},
}


def quantize_groups(size: str, device: torch.device) -> dict:
    return {name: partial(_without_last, make) for name, make in _groups(size, device, (False,)).items()}


def quantize_both_groups(size: str, device: torch.device) -> dict:
    return _groups(size, device, (False, True))


def _groups(size: str, device: torch.device, ways: tuple[bool, ...]) -> dict:
    found = {}
    for name, shape in GROUPS[size].items():
        for dtype in ("e4m3", "e5m2") if size == "test" else ("e4m3",):
            for rowwise in ways:
                way = "rowwise" if rowwise else "tensorwise"
                given = fp8_dtype(dtype, device), rowwise, torch.bfloat16
                found[f"{way}-{dtype}-{name}-bf16"] = partial(_grouped, shape, *given, device)
    if size == "test":
        shape, e4m3 = GROUPS[size]["empty-ends"], fp8_dtype("e4m3", device)
        for rowwise in ways:
            way = "rowwise" if rowwise else "tensorwise"
            found[f"{way}-fp32"] = partial(_grouped, shape, e4m3, rowwise, torch.float32, device)
            found |= {
                f"{way}-{name}": partial(_grouped, shape, e4m3, rowwise, torch.float32, device, value)
                for name, value in SPECIAL.items()
            }
    return found


def _grouped(
    shape: tuple, dtype: torch.dtype, rowwise: bool, of_x: torch.dtype, device: torch.device, *value: float
) -> tuple:
    sizes, behind, cols = shape
    x = _normal((sum(sizes) + behind, cols), of_x, device)
    if value and abs(value[0]) < 1:
        x *= value[0]
    elif value:
        x[:200:3, 77] = value[0]
    x[sum(sizes) :] = torch.nan  # not to be read
    return x, torch.tensor(sizes, device=device).cumsum(0), dtype, rowwise


def _without_last(make: Callable[[], tuple]) -> tuple:
    return make()[:-1]


def dequantize(size: str, device: torch.device) -> dict:
    from turbo_ops.quantize.op import quantize as contract

    def made(make: Callable[[], tuple], dtype: torch.dtype) -> tuple:
        return (*contract.reference(*make()), dtype)

    dtypes = (torch.bfloat16, torch.float32) if size == "test" else (torch.bfloat16,)
    return {
        f"{name}-to-{str(dtype)[6:]}": partial(made, make, dtype)
        for name, make in quantize(size, device).items()
        for dtype in dtypes
        if name.startswith(("1x128", "mx", "tensorwise")) or size == "bench"
    }


def _quantize(x: Callable[[], Tensor], *rest: object) -> tuple:
    return (x(), *rest)


def _normal(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).mul_(3).to(dtype)


def _special(value: float, device: torch.device) -> Tensor:
    """Normal values, a special one in each third row; all are scaled by it where it is 0 or tiny."""
    x = torch.randn(70, 140, device=device)
    if abs(value) < 1:
        return x.mul_(value)
    x[::3, 77] = value
    return x
