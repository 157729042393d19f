from turbo_ops.gemm.op import gemm, gemm_accumulate_, matmul

__all__ = ["gemm", "gemm_accumulate_", "matmul"]
