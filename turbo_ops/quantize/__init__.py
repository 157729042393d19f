from turbo_ops.quantize.groups import ALIGN, UNWANTED, cast_groups, quantize_both_groups, quantize_groups
from turbo_ops.quantize.op import (
    cast,
    cast_arguments,
    cast_both,
    dequantize,
    quantize,
    quantize_both,
    quantize_both_cross_entropy,
    quantize_both_delayed,
    quantize_both_swiglu,
    quantize_both_swiglu_delayed,
    quantize_delayed,
)

__all__ = [
    "ALIGN",
    "UNWANTED",
    "cast",
    "cast_arguments",
    "cast_both",
    "cast_groups",
    "dequantize",
    "quantize",
    "quantize_both",
    "quantize_both_cross_entropy",
    "quantize_both_delayed",
    "quantize_both_groups",
    "quantize_both_swiglu",
    "quantize_both_swiglu_delayed",
    "quantize_delayed",
    "quantize_groups",
]
