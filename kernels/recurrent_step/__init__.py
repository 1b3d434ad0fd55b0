"""The fast path of the step functions: one Triton kernel for four recurrences, for inference."""

from mixassay.kernels.recurrent_step.op import fused

__all__ = ["fused"]
