from turbo_ops.router.op import Routing, router, router_bwd, router_fwd, router_losses

__all__ = ["Routing", "router", "router_bwd", "router_fwd", "router_losses"]
