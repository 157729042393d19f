from turbo_ops.grouped_gemm.op import (
    grouped_gemm,
    grouped_gemm_accumulate_,
    grouped_gemm_clear_,
    grouped_gemm_wgrad,
)

__all__ = ["grouped_gemm", "grouped_gemm_accumulate_", "grouped_gemm_clear_", "grouped_gemm_wgrad"]
