"""Mamba's time step: what a token writes, and how much it forgets."""

from mixassay.kernels.time_step.op import time_step

__all__ = ["time_step"]
