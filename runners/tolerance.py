"""How far rounding alone takes a step from float32's, by `train.precision`: a loss, and a model's gradient (Euclidean).
Relative."""

LIMITS = {"fp32": (1e-4, 1e-3), "tf32": (2e-3, 2e-2), "fp16": (2e-3, 2e-2), "bf16": (2e-2, 1e-1)}
