from turbo_ops.swiglu.op import swiglu, swiglu_bwd, swiglu_fwd

__all__ = ["swiglu", "swiglu_bwd", "swiglu_fwd"]
