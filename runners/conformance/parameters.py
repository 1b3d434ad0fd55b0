"""Every parameter is used: near the start each gets a finite gradient that is not zero."""

import torch

from mixassay.runners.conformance.outcome import Failed, Measured
from mixassay.runners.conformance.subject import Subject, forward


def check(subject: Subject) -> Measured:
    m, x = subject.build(), subject.tokens(2, 40)
    named = dict(m.named_parameters())
    grads = torch.autograd.grad(
        (forward(m, x) * subject.tokens(2, 40, seed=2)).sum(), list(named.values()), allow_unused=True
    )
    for name, grad in zip(named, grads, strict=True):
        if grad is None or not bool(grad.any()):
            raise Failed(f"parameter {name} {list(named[name].shape)} gets no gradient", f"x {list(x.shape)}")
        if not bool(grad.isfinite().all()):
            raise Failed(f"the gradient of parameter {name} is not finite", f"x {list(x.shape)}")
    return {"parameters": sum(p.numel() for p in named.values()), "d_model": subject.d_model}
