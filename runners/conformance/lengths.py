"""Where a sequence ends does not matter to what came before: forward(x)[:, :T] = forward(x[:, :T]) for every T.

So neither a partial chunk nor the number of chunks changes a number.
"""

import torch
from torch import Tensor

from mixassay.runners.conformance.outcome import Measured
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward, gap

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 70)
LONGER = (1, 37)


def check(subject: Subject) -> Measured:
    m = subject.build().requires_grad_(False)
    worst = 0.0

    def fault(x: Tensor) -> str | None:
        nonlocal worst
        T, more = x.shape[1], subject.tokens(len(x), max(LONGER), 2, x.dtype)
        short = forward(m, x)
        for n in LONGER:
            off = gap(forward(m, torch.cat([x, more[:, :n]], dim=1))[:, :T], short)
            if off > subject.tolerance:
                return f"y of {T} tokens is off by {off:.2g} from the same tokens with {n} more behind them"
            worst = max(worst, off)
        return None

    lengths = range(1, 140) if subject.full else LENGTHS
    holds(fault, (subject.tokens(1, T) for T in lengths))
    return {"error": worst}
