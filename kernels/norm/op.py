"""Norms over the last axis: the public functions."""

import torch
from torch import Tensor

from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator, autocasts
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.norm import reference

WIDEST = 8192  # numbers in a group that the Triton kernels were built for: a program has a whole one in registers


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    before: Tensor | None = None,
    after: Tensor | None = None,
    groups: int = 1,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), with x silu(before) for x, all times silu(after).

    x, before, after   [..., D]
    weight             [D]
    groups             the mean is taken over each of so many equal parts of D
    returns            [..., D] in float32 or wider; the Triton kernels under autocast return autocast's dtype, to which
                       the product behind the norm would round it in a pass of its own

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    axes = Axes("rms_norm")
    D = x.shape[-1]
    if weight.shape != (D,):
        axes.fail(f"weight has shape {list(weight.shape)}, expected [D] = [{D}]")
    for name, gate in (("before", before), ("after", after)):
        if gate is not None and gate.shape != x.shape:
            axes.fail(f"{name} has shape {list(gate.shape)}, expected that of x, {list(x.shape)}")
    if groups < 1 or D % groups:
        axes.fail(f"groups = {groups} does not divide D = {D}")
    narrow = torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
    return _norm("rms_norm", x, weight, before, after, groups, eps, True, narrow, backend)


def l2_norm(x: Tensor, *, eps: float = 1e-6, backend: str | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis: unit vectors, and zero with a finite gradient where x is zero.

    Returns float32 or wider; the Triton kernels under autocast return x's dtype.
    """
    return _norm("l2_norm", x, None, None, None, 1, eps, False, x.dtype, backend)


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    groups: int,
    eps: float,
    mean: bool,
    narrow: torch.dtype,
    backend: str | None,
) -> Tensor:
    dtype = accumulator(x, weight, before, after)
    against = against_triton(x, weight, before, after) or _wide(x.shape[-1] // groups)
    if resolve(op, backend, against_triton=against) == "triton":
        from mixassay.kernels.norm import registered  # the package triton may not be there

        return registered.norm(x, weight, before, after, groups, eps, mean, narrow if autocasts(x) else dtype)
    before, after = (None if gate is None else gate.to(dtype) for gate in (before, after))
    return reference.norm(x.to(dtype), weight, before, after, groups, eps, mean)


def _wide(N: int) -> str | None:
    return f"its groups of {N} are wider than {WIDEST}" if N > WIDEST else None
