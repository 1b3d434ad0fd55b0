"""The rows of a batch do not meet: forward(x)[i] = forward(x[i])."""

import torch
from torch import Tensor

from mixassay.runners.conformance.outcome import Measured
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward, gap


def check(subject: Subject) -> Measured:
    m = subject.build().requires_grad_(False)

    def fault(x: Tensor) -> str | None:
        off = gap(forward(m, x), torch.cat([forward(m, row) for row in torch.split(x, 1)]))
        return f"a row's y is off by {off:.2g} from that of the row alone" if off > subject.tolerance else None

    holds(fault, [subject.tokens(4, 35)])
    return {}
