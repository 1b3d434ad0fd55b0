"""Accumulator policy: sums and states in float32, in float64 if an input is, whatever autocast says."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce

import torch
from torch import Tensor


def accumulator(*xs: Tensor | None) -> torch.dtype:
    """The dtype to compute in: the widest of the inputs, at least float32."""
    return reduce(torch.promote_types, (x.dtype for x in xs if x is not None), torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would send the float32 matrix products inside an operator through bfloat16."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on where x is. Asking torch which devices know it would break a compiled graph."""
    kind = x.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def cast(device: str, precision: str) -> AbstractContextManager[object]:
    """For a forward pass: the autocast that `precision` asks for, which is none but for bf16."""
    return torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext()


@contextmanager
def ten_bits(on: bool) -> Iterator[None]:
    """For forward and backward pass: a GPU rounds what float32 products multiply to tf32, with ten bits behind the
    point, here if `on` and only then. Sums stay float32; a CPU multiplies in float32 always."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def narrow(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Autocast's dtype where it is on, to which the product behind an operator would round in a pass of its own; else
    `dtype`."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else dtype
