"""BaseConv's elementwise part: a causal convolution times a projection, plus its input."""

from mixassay.kernels.gated_conv.op import gated_conv

__all__ = ["gated_conv"]
