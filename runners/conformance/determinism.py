"""The same seed gives the same bits again: parameters at the start, outputs and gradients."""

import torch

from mixassay.runners.conformance.outcome import Failed, Measured
from mixassay.runners.conformance.subject import Subject, forward

T = 70


def check(subject: Subject) -> Measured:
    x, runs = subject.tokens(2, T), []
    for _ in range(3 if subject.full else 2):
        m = subject.build()
        y = forward(m, x)
        grads = torch.autograd.grad(y.square().sum(), list(m.parameters()), materialize_grads=True)
        names = [name for name, _ in m.named_parameters()]
        runs.append({"y": y} | {f"parameter {n}": p for n, p in m.named_parameters()})
        runs[-1] |= {f"the gradient of {n}": g for n, g in zip(names, grads, strict=True)}
    for name, first in runs[0].items():
        if not all(torch.equal(first, run[name]) for run in runs[1:]):
            raise Failed(f"{name} differs between two runs with one seed", f"x {list(x.shape)}")
    return {}
