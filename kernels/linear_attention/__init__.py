"""Linear attention with an optional scalar decay per token and head; the maths is in README.md."""

from mixassay.kernels.linear_attention.op import linear_attention, linear_attention_step

__all__ = ["linear_attention", "linear_attention_step"]
