"""Log-linear attention, with an optional scalar decay per token and head; the maths is in README.md."""

from mixassay.kernels.log_linear_attention.op import log_linear_attention, log_linear_attention_step

__all__ = ["log_linear_attention", "log_linear_attention_step"]
