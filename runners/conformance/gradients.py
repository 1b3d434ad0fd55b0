"""Autograd's gradient is the derivative, by finite differences in float64 along a random direction of every leaf.

    <dL/dp, u> = (L(p + h u) - L(p - h u)) / 2h,   L = <w, y>

Leaves that `Mixer.straight_through` names have other gradients on purpose, and are left out.
"""

import torch
from torch import Tensor

from mixassay.runners.conformance.outcome import Failed, Measured
from mixassay.runners.conformance.shrink import describe
from mixassay.runners.conformance.subject import Subject, forward

H = 1e-6
TOLERANCE = 1e-5


def check(subject: Subject) -> Measured:
    worst, left_out = 0.0, subject.build().straight_through
    for T in (5, 37, 70) if subject.full else (5, 37):
        m, x = subject.build(dtype=torch.float64), subject.tokens(1, T, dtype=torch.float64).requires_grad_()
        weight = subject.tokens(1, T, seed=2, dtype=torch.float64)
        leaves: dict[str, Tensor] = {"x": x, **dict(m.named_parameters())}
        grads = torch.autograd.grad((forward(m, x) * weight).sum(), list(leaves.values()), materialize_grads=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            if name in left_out:
                continue
            draw = torch.Generator().manual_seed(3)
            u = torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf.device)
            kept, losses = leaf.detach().clone(), []
            with torch.no_grad():
                for sign in (1, -1):
                    leaf.copy_(kept + sign * H * u)
                    losses.append(float((forward(m, x) * weight).sum()))
                leaf.copy_(kept)
            found, wanted = float((grad * u).sum()), (losses[0] - losses[1]) / (2 * H)
            size = float(grad.norm() * u.norm()) or 1.0
            worst = max(worst, off := abs(found - wanted) / max(size, 1e-6))
            if not off <= TOLERANCE:
                raise Failed(
                    f"along a random direction of {name} the gradient is {found:.6g}, finite differences give"
                    f" {wanted:.6g}",
                    describe(x.detach()),
                )
    return {"error": worst, **({"left out": ", ".join(left_out)} if left_out else {})}
