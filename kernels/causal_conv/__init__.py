"""Depthwise causal short convolution."""

from mixassay.kernels.causal_conv.op import causal_conv, causal_conv_step

__all__ = ["causal_conv", "causal_conv_step"]
