"""How far rounding alone takes a step from float32's, by `train.precision`: a loss, and a model's gradient (Euclidean).
Relative."""

LIMITS = {"fp32": (1e-4, 1e-3), "tf32": (2e-3, 2e-2), "fp16": (2e-3, 2e-2), "bf16": (2e-2, 1e-1)}

ERROR = "train/first_gradient_error"
BY_TORCH = "train/first_gradient_error_by_torch"
"""In a record: how far the first gradient was from float32's, and how far that of torch's operators in the same
precision is, which is asked only where the first is beyond its limit."""

LAST = {ERROR: "train/last_gradient_error", BY_TORCH: "train/last_gradient_error_by_torch"}
"""The same behind the training of a language model."""


def beyond(gradient_error: float, precision: str) -> bool:
    """Whether rounding does not explain it."""
    return gradient_error > LIMITS.get(precision, LIMITS["fp32"])[1]
