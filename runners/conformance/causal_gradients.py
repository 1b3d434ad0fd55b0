"""No gradient flows from an output to a later token: d y_t / d x_s = 0 for s > t.

One backward for all cuts: row t of the batch holds the same tokens, and a loss of its outputs before t alone.
"""

import torch
from torch import Tensor

from mixassay.runners.conformance.causality import earlier
from mixassay.runners.conformance.outcome import Measured
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward


def check(subject: Subject) -> Measured:
    m = subject.build().requires_grad_(False)
    T = 130 if subject.full else 70

    def fault(x: Tensor) -> str | None:
        T = x.shape[1]
        rows, early = x[:1].expand(T, -1, -1).clone().requires_grad_(), earlier(T, x.device)
        loss = (forward(m, rows) * subject.tokens(T, T, 2, x.dtype) * early.unsqueeze(-1)).sum()
        (grad,) = torch.autograd.grad(loss, rows, materialize_grads=True)
        leaked = torch.where(early, 0, grad.abs().amax(-1))
        if bool(leaked.max() <= subject.rounding * float(grad.abs().max())):
            return None
        cut, t = divmod(int(leaked.argmax()), T)
        return f"d y[0, :{cut}] / d x[0, {t}] is {leaked[cut, t].item():.2g}"

    holds(fault, [subject.tokens(1, T)])
    return {"T": T}
