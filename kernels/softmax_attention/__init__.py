"""Causal softmax attention, the baseline."""

from mixassay.kernels.softmax_attention.op import softmax_attention, softmax_attention_step

__all__ = ["softmax_attention", "softmax_attention_step"]
