"""`torch.compile` changes no number: outputs and gradients of the compiled mixer are those of the mixer as written.

Quick: traced by the compiler and run as traced ("eager"). Full: compiled by Inductor.
"""

import warnings

import torch

from mixassay.runners.conformance.outcome import Failed, Measured
from mixassay.runners.conformance.subject import Subject, forward, gap

T = 7


def check(subject: Subject) -> Measured:
    m, x, weight = subject.build(), subject.tokens(2, T).requires_grad_(), subject.tokens(2, T, seed=2)
    backend = "inductor" if subject.full else "eager"
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        compiled = torch.compile(m, backend=backend)
        assert callable(compiled)
        leaves = [x, *m.parameters()]
        results = []
        for call in (compiled, m):
            y = forward(call, x)  # type: ignore[arg-type]
            results.append([y, *torch.autograd.grad((y * weight).sum(), leaves, materialize_grads=True)])
    torch.compiler.reset()
    names = ["y", "the gradient of x", *(f"the gradient of {name}" for name, _ in m.named_parameters())]
    worst = 0.0
    for name, found, wanted in zip(names, *results, strict=True):
        off = gap(found, wanted)
        if not off <= subject.tolerance:
            raise Failed(f"{name} of the compiled mixer is off by {off:.2g}", f"x {list(x.shape)}, backend {backend}")
        worst = max(worst, off)
    return {"error": worst, "backend": backend}
