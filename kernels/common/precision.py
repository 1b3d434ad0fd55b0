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


def cast(device: str, precision: str, cached: bool = True) -> AbstractContextManager[object]:
    """For a forward pass: the autocast that `precision` asks for, which is none but for bf16 and fp16.

    cached: a weight is cast once until the outermost autocast ends, and not for each product.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device, dtype, cache_enabled=cached)


@contextmanager
def rounding(precision: str) -> Iterator[None]:
    """For forward and backward pass: whether a GPU may round what float32 products multiply to tf32, which has ten bits
    behind the point (a CPU never does). Sums of all products are float32."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    for name, on in zip(names, (precision == "tf32", False, False), strict=True):
        setattr(matmul, name, on)
    try:
        yield
    finally:
        for name, on in zip(names, before, strict=True):
            setattr(matmul, name, on)


def narrow(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Autocast's dtype where it is on, to which the product behind an operator would round in a pass of its own; else
    `dtype`."""
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else dtype
