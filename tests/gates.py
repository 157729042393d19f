"""What each Triton kernel must compile to on gfx942, gfx950 and sm90, whatever case launches it."""

from dataclasses import dataclass

TRITON = "3.6.0"  # the pair of torch 2.11; other versions allocate registers differently and only report


# Matrix instructions by the type of the operands; an FP8 type that a GPU lacks is emulated through bf16 ones.
MATRIX = {"*fp8": r"fp8|bf8|f8f6f4", "*bf16": r"_bf16", "*fp16": r"_f16", "*fp32": r"x(2|4)_?f32"}


# Casts of 128x128 are held to 168 registers, of which three programs fit; ptxas then spills up to 32 bytes.
SPILLED_BYTES = {"sm90": 32}


@dataclass(frozen=True)
class Gate:
    """No spills, no scratch and LDS that fits hold for every kernel; the rest is asked here."""

    operand: str | None = None  # the parameter whose type says which matrix instructions there must be


GATES = {
    "amax_kernel": Gate(),
    "amax_rows_kernel": Gate(),
    "block_cast_kernel": Gate(),
    "cast_kernel": Gate(),
    "cross_entropy_kernel": Gate(),
    "delayed_cast_kernel": Gate(),
    "dequantize_kernel": Gate(),
    "gemm_kernel": Gate(operand="a"),
    "group_amax_kernel": Gate(),
    "group_cast_kernel": Gate(),
    "grouped_gemm_kernel": Gate(operand="a"),
    "grouped_wgrad_kernel": Gate(operand="a"),
    "row_cast_kernel": Gate(),
    "gated_block_cast_kernel": Gate(),
    "gated_delayed_cast_kernel": Gate(),
    "loss_block_cast_kernel": Gate(),
    "loss_cast_kernel": Gate(),
    "loss_kernel": Gate(),
    "clear_kernel": Gate(),
    "combine_kernel": Gate(),
    "count_kernel": Gate(),
    "dot_kernel": Gate(),
    "gather_kernel": Gate(),
    "place_kernel": Gate(),
    "rms_norm_bwd_kernel": Gate(),
    "rms_norm_fwd_kernel": Gate(),
    "rope_kernel": Gate(),
    "router_bwd_kernel": Gate(),
    "router_fwd_kernel": Gate(),
    "sum_partials_kernel": Gate(),
    "swiglu_bwd_kernel": Gate(),
    "swiglu_fwd_kernel": Gate(),
}


def matrix_pattern(
    gate: Gate, types: dict[str, str], constants: dict[str, object], target: str
) -> str | None:
    """The pattern that some matrix instruction of a kernel with these types and constants must match."""
    if gate.operand is None:
        return None
    if target == "sm90":
        return None if types[gate.operand].startswith("*fp32") else "wgmma"
    upcast = (
        constants.get("SCALE") == "mx" and not constants["MX_NATIVE"]
    )  # no scaled matrix instruction there
    kind = "*bf16" if upcast else types[gate.operand]
    return next(pattern for prefix, pattern in MATRIX.items() if kind.startswith(prefix))
