"""The residual stream with a branch added, and its norm for the next branch, in one pass."""

from mixassay.kernels.residual_norm.op import residual_norm

__all__ = ["residual_norm"]
