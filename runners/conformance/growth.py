"""Outputs stay within a power of T: their size (root mean square over rows and channels) at token t is about t^p.

Measured as it starts, on standard normal tokens. A sum of T terms has p = 0.5 or 1, a norm p = 0; a state that is
multiplied by more than 1 at every token has none, and ends in infinities.
"""

import torch

from mixassay.runners.conformance.outcome import Failed, Measured
from mixassay.runners.conformance.subject import Subject, forward

FASTEST = 3.5
"""Third-order sums without a norm reach 3."""


@torch.no_grad()
def check(subject: Subject) -> Measured:
    T = 1024 if subject.full else 256
    y = forward(subject.build(dtype=torch.float32, nudge=0), subject.tokens(2, T, dtype=torch.float32)).double()
    if not bool(y.isfinite().all()):
        first = int((~y.isfinite()).any(-1).any(0).nonzero()[0, 0])
        raise Failed(f"y is not finite from token {first} on", f"x [2, {T}, {subject.d_model}], standard normal")
    late, half = (float(part.square().mean().sqrt()) for part in (y[:, -T // 8 :], y[:, T // 2 - T // 8 : T // 2]))
    if half == 0:
        return {"rms at T": late, "T": T}
    exponent = float(torch.tensor(late / half).log2())
    if exponent > FASTEST:
        raise Failed(f"from token {T // 2} to {T} y grows from {half:.2g} to {late:.2g}: faster than t^{FASTEST:g}")
    return {"exponent": round(exponent, 2) + 0.0, "rms": late, "T": T}
