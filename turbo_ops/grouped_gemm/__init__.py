from turbo_ops.grouped_gemm.op import grouped_gemm, grouped_gemm_wgrad, grouped_linear

__all__ = ["grouped_gemm", "grouped_gemm_wgrad", "grouped_linear"]
