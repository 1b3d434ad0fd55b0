"""How far rounding alone takes a step from float32's, by `train.precision`: a loss, and a model's gradient (Euclidean).
Relative."""

LIMITS = {"fp32": (1e-4, 1e-3), "tf32": (2e-3, 2e-2), "fp16": (2e-3, 2e-2), "bf16": (2e-2, 1e-1)}

ERROR = "train/first_gradient_error"
BY_TORCH = "train/first_gradient_error_by_torch"
"""In a record: how far the first gradient was from float32's, and how far rounding takes that of torch's operators
(`runners.first_step.by_rounding`), which is asked only where the first is beyond its limit."""

LAST = {ERROR: "train/last_gradient_error", BY_TORCH: "train/last_gradient_error_by_torch"}
"""The same behind the training of a language model."""


def beyond(gradient_error: float, precision: str) -> bool:
    """Whether the digits of `precision` do not explain it."""
    return gradient_error > LIMITS.get(precision, LIMITS["fp32"])[1]


def explained(error: float, by_torch: float) -> bool:
    """Whether rounding explains it: of errors of one size, one is seldom twice the other."""
    return 2 * by_torch >= error
