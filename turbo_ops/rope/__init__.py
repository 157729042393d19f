from turbo_ops.rope.op import rope, rope_backend, rope_bwd, rope_fwd

__all__ = ["rope", "rope_backend", "rope_bwd", "rope_fwd"]
