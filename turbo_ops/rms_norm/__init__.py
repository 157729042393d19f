from turbo_ops.rms_norm.op import rms_norm, rms_norm_backend, rms_norm_bwd, rms_norm_fwd

__all__ = ["rms_norm", "rms_norm_backend", "rms_norm_bwd", "rms_norm_fwd"]
