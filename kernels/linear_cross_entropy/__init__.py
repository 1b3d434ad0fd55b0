"""A linear head and its cross-entropy in one; the maths is in README.md."""

from mixassay.kernels.linear_cross_entropy.op import linear_cross_entropy, linear_cross_entropy_score

__all__ = ["linear_cross_entropy", "linear_cross_entropy_score"]
