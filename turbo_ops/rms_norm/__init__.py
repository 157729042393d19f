from turbo_ops.rms_norm.op import (
    add_rms_norm,
    rms_norm,
    rms_norm_add_bwd,
    rms_norm_add_fwd,
    rms_norm_backend,
    rms_norm_bwd,
    rms_norm_fwd,
)

__all__ = [
    "add_rms_norm",
    "rms_norm",
    "rms_norm_add_bwd",
    "rms_norm_add_fwd",
    "rms_norm_backend",
    "rms_norm_bwd",
    "rms_norm_fwd",
]
