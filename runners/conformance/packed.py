"""Sequences packed into one row are computed as each alone: forward(x [1, N, D], cu_seqlens=int64 [n + 1]).

Offered by a `forward` with a keyword `cu_seqlens`: sequence i is the tokens cu_seqlens[i] ... cu_seqlens[i + 1] - 1.
"""

import inspect

import torch

from mixassay.runners.conformance.outcome import Failed, Measured, NotOffered
from mixassay.runners.conformance.subject import Subject, gap

LENGTHS = (3, 1, 64, 17)


def check(subject: Subject) -> Measured:
    if "cu_seqlens" not in inspect.signature(subject.cls.forward).parameters:
        raise NotOffered("forward has no argument cu_seqlens")
    m = subject.build()
    ends = torch.tensor([0, *LENGTHS], device=subject.device).cumsum(0)
    x = subject.tokens(1, sum(LENGTHS)).requires_grad_()
    weight = subject.tokens(1, sum(LENGTHS), seed=2)
    together = m(x, cu_seqlens=ends)
    alone = torch.cat([m(part) for part in torch.split(x, list(LENGTHS), dim=1)], dim=1)
    off = gap(together, alone)
    grads = [
        torch.autograd.grad((y * weight).sum(), [x, *m.parameters()], materialize_grads=True) for y in (together, alone)
    ]
    off_grad = max(gap(a, b) for a, b in zip(*grads, strict=True))
    if max(off, off_grad) > subject.tolerance:
        raise Failed(f"packed sequences of {LENGTHS} tokens: y is off by {off:.2g}, a gradient by {off_grad:.2g}")
    return {"error": off, "gradient error": off_grad}
