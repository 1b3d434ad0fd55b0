"""Of [B, T, D], any B and T >= 1, forward makes as many finite numbers, in the same dtype and on the same device."""

from torch import Tensor

from mixassay.runners.conformance.outcome import Measured
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward


def check(subject: Subject) -> Measured:
    m = subject.build()

    def fault(x: Tensor) -> str | None:
        y = forward(m, x)
        if y.shape != x.shape or y.dtype != x.dtype or y.device != x.device:
            found, wanted = (f"{list(t.shape)} {t.dtype} {t.device}" for t in (y, x))
            return f"forward returns {found} for {wanted}"
        return None if y.isfinite().all() else "forward returns numbers that are not finite"

    sizes = [(1, 1), (3, 2), (2, 33), (1, 70)]
    holds(fault, (subject.tokens(B, T) for B, T in sizes))
    return {}
