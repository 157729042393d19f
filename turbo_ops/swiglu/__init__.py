from turbo_ops.swiglu.op import ACTIVATIONS, swiglu, swiglu_backend, swiglu_bwd_, swiglu_fwd

__all__ = ["ACTIVATIONS", "swiglu", "swiglu_backend", "swiglu_bwd_", "swiglu_fwd"]
