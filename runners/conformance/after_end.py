"""Memory behind the end is not read: x may be a view into a longer buffer whose other tokens are NaN."""

import torch
from torch import Tensor

from mixassay.runners.conformance.outcome import Measured
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward, gap

BEHIND = 64


def check(subject: Subject) -> Measured:
    m = subject.build()

    def fault(x: Tensor) -> str | None:
        B, T, D = x.shape
        longer = x.new_full((B, T + BEHIND, D), torch.nan)
        longer[:, :T] = x
        view = longer[:, :T].requires_grad_()
        y, wanted = forward(m, view), forward(m, x)
        (grad,) = torch.autograd.grad(y.sum(), view, materialize_grads=True)
        if not bool(grad.isfinite().all()):
            return "the gradient of a view in front of NaN is not finite"
        off = gap(y, wanted)
        return f"y of a view in front of NaN is off by {off:.2g}" if off > subject.tolerance else None

    holds(fault, (subject.tokens(2, T) for T in (1, 37, 64)))
    return {}
