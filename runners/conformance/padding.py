"""Padding is inert: what stands behind the end of a row in a batch changes neither its outputs nor any gradient."""

import torch
from torch import Tensor

from mixassay.runners.conformance.outcome import Measured
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward, gap

ENDS = (5, 13, 37)


def check(subject: Subject) -> Measured:
    m = subject.build()

    def fault(x: Tensor) -> str | None:
        T = x.shape[1]
        real = torch.arange(T, device=x.device) < torch.tensor(ENDS[: len(x)], device=x.device).unsqueeze(1)
        real = real.unsqueeze(-1)  # [B, T, 1]
        weight = subject.tokens(len(x), T, 2, x.dtype) * real
        found = []
        for padding in (torch.zeros_like(x), 10 * subject.tokens(len(x), T, 3, x.dtype)):
            padded = torch.where(real, x, padding).requires_grad_()
            y = forward(m, padded)
            grads = torch.autograd.grad((y * weight).sum(), [padded, *m.parameters()], materialize_grads=True)
            found.append([torch.where(real, y, 0), *grads])
        names = ["y", "the gradient of x", *(f"the gradient of {name}" for name, _ in m.named_parameters())]
        for name, zeros, others in zip(names, *found, strict=True):
            off = gap(others, zeros)
            if off > subject.tolerance:
                return f"{name} moves by {off:.2g} with what stands in the padding"
        return None

    holds(fault, [subject.tokens(len(ENDS), 48)])
    return {}
