"""Repairs of Triton's CPU interpreter (TRITON_INTERPRET=1), for tests only; Triton 3.6 to 3.9, numpy 2.

Stock, it computes with the raw bits of bf16, truncates fp32 -> bf16, casts FP8 wrongly, knows no FNUZ and no
`dot_scaled`, and reads out of bounds without a word. Call `install()` before a kernel module is imported.
Not repaired: inline assembly. Unseen by any interpreter: layouts, LDS limits, missing barriers, real races.
"""

import functools
import os
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.language import semantic
from triton.language.extra import libdevice
from triton.runtime import autotuner
from triton.runtime import interpreter as stock

TensorHandle, Builder = stock.TensorHandle, stock.InterpreterBuilder

# Types that numpy lacks: the interpreter stores their bits in unsigned integers.
STORED_AS_BITS = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
NUMPY_FLOATS = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}
FP8_LIMITS = {kind: torch.finfo(STORED_AS_BITS[kind]).max for kind in STORED_AS_BITS if kind != tl.bfloat16}
FLOATS = {**STORED_AS_BITS, **NUMPY_FLOATS}
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BIT_OPERATIONS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)


def as_torch(array: np.ndarray) -> torch.Tensor:
    array = np.asarray(array, order="C")  # ascontiguousarray would turn a scalar into a vector
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def decode(stored: np.ndarray, kind: tl.dtype) -> np.ndarray:
    """What the interpreter stores for `kind` -> float32 values (float64 stays float64)."""
    kind = kind.scalar
    if kind not in STORED_AS_BITS:
        return stored if stored.dtype == np.float64 else stored.astype(np.float32)
    bits = as_torch(stored).view(torch.int16 if kind == tl.bfloat16 else torch.uint8)
    return bits.view(STORED_AS_BITS[kind]).float().numpy()


def encode(values: np.ndarray, kind: tl.dtype, toward_zero: bool = False) -> np.ndarray:
    """Values -> what the interpreter stores, rounded to nearest even; FP8 saturates as GPU casts do."""
    kind = kind.scalar
    if kind in NUMPY_FLOATS and not (toward_zero and kind == tl.float16):
        return values.astype(NUMPY_FLOATS[kind])
    exact = values.astype(np.float32)
    limit = FP8_LIMITS.get(kind)
    rounded = as_torch(exact if limit is None else np.clip(exact, -limit, limit))
    rounded = rounded.to(STORED_AS_BITS.get(kind, torch.float16))
    unsigned = np.uint16 if limit is None else np.uint8
    bits = rounded.view(torch.int16 if limit is None else torch.uint8).numpy().view(unsigned)
    if not toward_zero:
        return bits
    too_far = (rounded.float().abs() > as_torch(exact).abs()).numpy()
    return (bits - too_far.astype(unsigned)).astype(unsigned)


def has_bits(handle: TensorHandle) -> bool:
    return handle.dtype.scalar in STORED_AS_BITS


def numbers(handle: TensorHandle) -> np.ndarray:
    """A handle's data as something that numpy can compute with."""
    return decode(handle.data, handle.dtype) if has_bits(handle) else handle.data


def pack(values: np.ndarray, kind: tl.dtype) -> TensorHandle:
    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    kind = kind.scalar
    stored = encode(values, kind) if kind in STORED_AS_BITS else values.astype(stock._get_np_dtype(kind))
    return TensorHandle(stored, kind)


# ---- casts


def convert_float(stored: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
    values = decode(stored.view(stock._get_np_dtype(source)), source)
    toward_zero = rounding is not None and rounding == ir.ROUNDING_MODE.RTZ
    bits = encode(values, target, toward_zero)
    return bits.view(f"uint{target.scalar.primitive_bitwidth}").reshape(stored.shape)


def cast(builder: Builder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
    before, after = source.dtype.scalar, target.scalar
    if before not in STORED_AS_BITS and after not in STORED_AS_BITS:
        return TensorHandle(source.data.astype(stock._get_np_dtype(target)), after)
    values = decode(source.data, before) if before in FLOATS else source.data.astype(np.float64)
    stored = encode(values, after) if after in FLOATS else values.astype(stock._get_np_dtype(after))
    return TensorHandle(stored, after)


# ---- arithmetic


def repaired(original: Callable, arity: int, result: int) -> Callable:
    """A builder method (self, *handles, operation) that decodes its operands; one's type is the result's."""

    @functools.wraps(original)
    def compute(builder: Builder, *args: object) -> TensorHandle:
        handles, operation = args[:arity], args[arity]
        moves_bits = operation is np.where or operation in BIT_OPERATIONS
        if moves_bits or not any(has_bits(handle) for handle in handles):
            return original(builder, *args)
        return pack(operation(*map(numbers, handles)), handles[result].dtype)

    return compute


def fused_multiply_add(original: Callable) -> Callable:
    def compute(builder: Builder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if not has_bits(z):
            return original(builder, x, y, z)
        return pack(numbers(x) * numbers(y) + numbers(z), z.dtype)

    return compute


def dot(builder: Builder, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *_: object) -> TensorHandle:
    if a.dtype.scalar in FLOATS:
        product = np.matmul(decode(a.data, a.dtype), decode(b.data, b.dtype))
    else:
        product = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32))
    return pack(product + numbers(acc), acc.dtype)


def dot_scaled(
    builder: Builder, a, a_scale, a_format, b, b_scale, b_format, fast_math, a_packs_k, b_packs_k, acc
) -> TensorHandle:
    a = scaled_operand(a, a_scale, a_format, a_packs_k, contracted=-1)
    b = scaled_operand(b, b_scale, b_format, b_packs_k, contracted=-2)
    return TensorHandle((np.matmul(a, b) + acc.data).astype(np.float32), tl.float32)


def scaled_operand(
    data: TensorHandle, scale: TensorHandle | None, form: object, packs_k: bool, contracted: int
) -> np.ndarray:
    """Real values of an MX operand; its scales have the contracted axis last, whichever operand it is."""
    kinds = ir.ScaleDotElemTypeTY
    if form == kinds.E2M1:
        values = unpack_e2m1(data.data.view(np.uint8), contracted if packs_k else -3 - contracted)
    else:
        floats = {kinds.E4M3: tl.float8e4nv, kinds.E5M2: tl.float8e5, kinds.BF16: tl.bfloat16}
        values = decode(data.data, floats.get(form, tl.float16))
    if scale is None:
        return values
    factors = scale_values(scale)
    factors = np.repeat(factors, values.shape[contracted] // factors.shape[-1], axis=-1)
    return values * (factors if contracted == -1 else np.swapaxes(factors, -1, -2))


def unpack_e2m1(pairs: np.ndarray, axis: int) -> np.ndarray:
    """Two 4-bit numbers a byte along `axis`, the low half first."""
    pairs = np.moveaxis(pairs, axis, -1)
    values = np.stack([E2M1_VALUES[pairs & 15], E2M1_VALUES[pairs >> 4]], -1)
    return np.moveaxis(values.reshape(*pairs.shape[:-1], -1), -1, axis)


def scale_values(scale: TensorHandle) -> np.ndarray:
    if scale.dtype.scalar not in (tl.uint8, tl.int8):  # NVFP4: FP8 scales
        return decode(scale.data, scale.dtype)
    exponent = scale.data.view(np.uint8)  # E8M0, 255 is NaN
    return np.where(
        exponent == 255, np.float32("nan"), np.ldexp(np.float32(1), exponent.astype(np.int32) - 127)
    )


# ---- reductions and scans


def on_values(original: Callable, compute: Callable, wrap: Callable = lambda result: result) -> Callable:
    """A reduction that sums bf16 values, not their bits."""

    def reduce(operation: object, x: tl.core.tensor) -> object:
        if x.dtype.scalar != tl.bfloat16:
            return original(operation, x)
        stored = encode(np.asarray(compute(operation, decode(x.handle.data, tl.bfloat16))), tl.bfloat16)
        return wrap(tensor(stored, tl.bfloat16))

    return reduce


def named_reduction(original: Callable) -> Callable:
    """`turbo_ops.device.scale.largest` by numpy; stock walks a combining function of one's own in Python."""

    def reduce(operation: object, x: tuple) -> object:
        if getattr(operation.combine_fn, "__name__", "") != "largest":
            return original(operation, x)
        return operation.min_max(x[0], val_reduce_op=np.max)  # which keeps NaN

    return reduce


def tensor(stored: np.ndarray, kind: tl.dtype) -> tl.core.tensor:
    shape = list(stored.shape)
    handle = TensorHandle(stored if shape else stored.reshape(1), kind)
    return tl.core.tensor(handle, tl.block_type(kind, shape) if shape else kind)


# ---- atomics


def atomic_rmw(original: Callable) -> Callable:
    """bf16 atomics, one lane after the other."""
    operations = {
        ir.ATOMIC_OP.FADD: np.add,
        ir.ATOMIC_OP.MAX: np.maximum,
        ir.ATOMIC_OP.MIN: np.minimum,
        ir.ATOMIC_OP.XCHG: lambda old, new: new,
    }

    def update(builder: Builder, kind: object, ptr, value, mask, sem, scope) -> TensorHandle:
        if value.dtype.scalar != tl.bfloat16:
            return original(builder, kind, ptr, value, mask, sem, scope)
        pointers, values, wanted = np.broadcast_arrays(ptr.data, value.data, mask.data)
        before = np.zeros(pointers.shape, np.uint16)
        one = np.ones(1, bool)
        for lane in zip(*np.nonzero(wanted), strict=True):
            address = np.array([pointers[lane]], np.uint64)
            old = stock._interpreter.load(address, one, np.zeros(1, np.uint16), np.dtype(np.uint16))
            new = operations[kind](decode(old, tl.bfloat16), decode(values[lane].reshape(1), tl.bfloat16))
            stock._interpreter.memory.store(address, encode(new, tl.bfloat16), one)  # atomic: no race
            before[lane] = old[0]
        return TensorHandle(before, tl.bfloat16)

    return update


# ---- libdevice


def through_torch(function: Callable) -> Callable:
    return lambda *arrays: function(*map(as_torch, arrays)).numpy()


def half_away_from_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


SAME_NAME_IN_NUMPY = (
    "abs ceil copysign cos cosh exp exp2 expm1 floor fmod isinf isnan log log1p log2 rint sin sinh sqrt tan "
    "tanh trunc"
)
LIBDEVICE = {
    **{name: getattr(np, name) for name in SAME_NAME_IN_NUMPY.split()},
    **{name: through_torch(getattr(torch, name)) for name in ("erf", "erfc", "erfinv", "lgamma", "sigmoid")},
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan2": np.arctan2,
    "div_rn": np.divide,
    "fast_dividef": np.divide,
    "fast_expf": np.exp,
    "fast_logf": np.log,
    "fast_tanhf": np.tanh,
    "finitef": np.isfinite,
    "ldexp": lambda x, exponent: np.ldexp(x, exponent.astype(np.int32)),
    "nearbyint": np.rint,
    "pow": np.power,
    "round": through_torch(half_away_from_zero),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


def library_function(function: Callable) -> Callable:
    def call(*args: object, _semantic: object = None, **_: object) -> tl.core.tensor:
        to_tensor = stock.interpreter_semantic.to_tensor
        args = [arg if isinstance(arg, tl.core.tensor) else to_tensor(arg) for arg in args]
        values = function(*np.broadcast_arrays(*(numbers(arg.handle) for arg in args)))
        handle = pack(values, args[0].dtype)
        is_block = args[0].type.is_block() or values.size > 1
        return tl.core.tensor(
            handle, tl.block_type(handle.dtype, list(values.shape)) if is_block else handle.dtype
        )

    return call


# ---- installation


@functools.cache
def install() -> None:
    """Repair the interpreter of this process; kernels imported before keep parts of the stock one."""
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before anything imports triton")
    import interpreter_memory

    interpreter_memory.install()
    stock._convert_float = convert_float
    Builder.cast_impl = cast
    Builder.unary_op = repaired(Builder.unary_op, 1, 0)
    Builder.binary_op = repaired(Builder.binary_op, 2, 0)
    Builder.ternary_op = repaired(Builder.ternary_op, 3, 2)
    Builder.create_fma = fused_multiply_add(Builder.create_fma)
    Builder.create_dot, Builder.create_dot_scaled = dot, dot_scaled
    Builder.create_atomic_rmw = atomic_rmw(Builder.create_atomic_rmw)
    Builder.get_bf16 = lambda builder, value: pack(np.array([value], np.float32), tl.bfloat16)
    reduce, scan = stock.ReduceOps, stock.ScanOps
    reduce.sum = on_values(reduce.sum, lambda op, x: np.sum(x, axis=op.axis, keepdims=op.keep_dims))
    reduce.apply_impl = named_reduction(reduce.apply_impl)
    scan.cumsum = on_values(scan.cumsum, lambda op, x: np.cumsum(x, axis=op.axis), lambda result: [result])
    scan.cumprod = on_values(scan.cumprod, lambda op, x: np.cumprod(x, axis=op.axis), lambda result: [result])
    for name, function in LIBDEVICE.items():
        setattr(libdevice, name, library_function(function))
    _repair_language()
    # There is no driver to measure with: take the configuration that the environment names.
    autotuner.Autotuner._bench = _chosen_config


def _chosen_config(
    tuner: autotuner.Autotuner, *_: object, config: triton.Config, **__: object
) -> list[float]:
    chosen = int(os.environ.get("TRITON_INTERPRET_CONFIG", "0")) % len(tuner.configs)
    return [0.0 if tuner.configs.index(config) == chosen else 1.0] * 3


def _repair_language() -> None:
    patch_tensor, patch_core = stock._patch_lang_tensor, stock._patch_lang_core
    convert, scaled = stock._implicit_cvt, semantic.TritonSemantic.dot_scaled

    def repaired_tensor(cls: type, scope: object, *rest: object) -> None:
        patch_tensor(cls, scope, *rest)
        # numpy >= 2.4 refuses int() of an array with one element and one axis
        scope.set_attr(cls, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def repaired_core(language: object, scope: object, *rest: object) -> None:
        patch_core(language, scope, *rest)
        to_ir, fnuz = language.dtype.to_ir, ("fp8e4b8", "fp8e5b16")
        scope.set_attr(language.dtype, "to_ir", lambda self, b: self if self.name in fnuz else to_ir(self, b))

    def repaired_argument(arg: object) -> object:
        # A Python float is an fp32 scalar on a GPU; stock keeps 64 bits.
        is_float = isinstance(arg, float)
        return tensor(np.array(arg, np.float32), tl.float32) if is_float else convert(arg)

    def repaired_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, *rest, **options):
        # 3.6 expects constexpr formats and the interpreter passes plain strings
        a_format, b_format = (tl.constexpr(getattr(f, "value", f)) for f in (a_format, b_format))
        return scaled(self, a, a_scale, a_format, b, b_scale, b_format, *rest, **options)

    stock._patch_lang_tensor, stock._patch_lang_core = repaired_tensor, repaired_core
    stock._implicit_cvt = repaired_argument
    semantic.TritonSemantic.dot_scaled = repaired_dot_scaled
