from turbo_ops.cross_entropy.op import cross_entropy, cross_entropy_, option_problem

__all__ = ["cross_entropy", "cross_entropy_", "option_problem"]
