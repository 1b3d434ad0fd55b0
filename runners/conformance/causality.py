"""No output depends on a later token: y_t is the same whatever x_s is, s > t.

One batch for all cuts t: its row t has other tokens from t on. The two runs compared have one shape, so that the same
operations are done in the same order; what is left is information.
"""

import torch
from torch import Tensor

from mixassay.runners.conformance.outcome import Measured
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward


def check(subject: Subject) -> Measured:
    m = subject.build().requires_grad_(False)
    lengths = (65, 130, 257) if subject.full else (130,)

    def fault(x: Tensor) -> str | None:
        T = x.shape[1]
        rows, early = x[:1].expand(T, -1, -1), earlier(T, x.device)
        ys = [
            forward(m, torch.where(early.unsqueeze(-1), rows, 2 * subject.tokens(T, T, seed, x.dtype)))
            for seed in (2, 3)
        ]
        moved = torch.where(early, (ys[0] - ys[1]).abs().amax(-1), 0)  # [cut, t]
        allowed = subject.rounding * float(ys[0].abs().max())
        if bool(moved.max() <= allowed):
            return None
        cut, t = divmod(int(moved.argmax()), T)
        return f"y[0, {t}] moves by {moved[cut, t].item():.2g} when x[0, {cut}:] changes"

    holds(fault, (subject.tokens(1, T) for T in lengths))
    return {"T": lengths[-1]}


def earlier(T: int, device: torch.device) -> Tensor:
    """bool [cut, t]: t < cut."""
    t = torch.arange(T, device=device)
    return t < t.unsqueeze(1)
