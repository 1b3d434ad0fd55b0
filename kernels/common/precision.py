"""Accumulator policy: sums and states in float32, in float64 if an input is, whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor


def accumulator(*xs: Tensor | None) -> torch.dtype:
    """The dtype to compute in: the widest of the inputs, at least float32."""
    return reduce(torch.promote_types, (x.dtype for x in xs if x is not None), torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would send the float32 matrix products inside an operator through bfloat16."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
