"""How far rounding alone takes a step from float32's, by `train.precision`: losses, and gradients of a model, relative and
Euclidean."""

LIMITS = {"fp32": (1e-4, 1e-3), "tf32": (2e-3, 2e-2), "fp16": (2e-3, 2e-2), "bf16": (2e-2, 1e-1)}
