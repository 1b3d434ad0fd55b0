"""Causal softmax attention, the baseline."""

from mixassay.kernels.softmax_attention.op import packed_attention, softmax_attention, softmax_attention_step

__all__ = ["packed_attention", "softmax_attention", "softmax_attention_step"]
