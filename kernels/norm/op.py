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
    skip: tuple[Tensor, Tensor] | None = None,
    groups: int = 1,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), with x silu(before) for x, all times silu(after).

    x, before, after   [..., D]
    weight             [D]
    skip               s [..., D] and gain [H], H dividing D: x + gain s stands for x, one gain for each head of D / H
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
    s, gain = skip or (None, None)
    if s is not None and gain is not None and (s.shape != x.shape or gain.ndim != 1 or D % len(gain)):
        axes.fail(f"skip has shapes {list(s.shape)} and {list(gain.shape)}, expected {list(x.shape)} and [H], H | {D}")
    if groups < 1 or D % groups:
        axes.fail(f"groups = {groups} does not divide D = {D}")
    narrow = torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
    return _norm("rms_norm", x, weight, None, before, after, s, gain, groups, eps, True, False, narrow, backend)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis (Ba et al. 2016).

    x              [..., D]
    weight, bias   [D]
    returns        [..., D] in float32 or wider; the Triton kernels under autocast return its dtype, as in `rms_norm`

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    axes = Axes("layer_norm")
    D = x.shape[-1]
    for name, p in (("weight", weight), ("bias", bias)):
        if p.shape != (D,):
            axes.fail(f"{name} has shape {list(p.shape)}, expected [D] = [{D}]")
    narrow = torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
    return _norm("layer_norm", x, weight, bias, None, None, None, None, 1, eps, True, True, narrow, backend)


def l2_norm(x: Tensor, *, eps: float = 1e-6, backend: str | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis: unit vectors, and zero with a finite gradient where x is zero.

    Returns float32 or wider; the Triton kernels under autocast return x's dtype.
    """
    return _norm("l2_norm", x, None, None, None, None, None, None, 1, eps, False, False, x.dtype, backend)


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    skip: Tensor | None,
    gain: Tensor | None,
    groups: int,
    eps: float,
    mean: bool,
    centre: bool,
    narrow: torch.dtype,
    backend: str | None,
) -> Tensor:
    dtype = accumulator(x, weight, bias, before, after, skip, gain)
    against = against_triton(x, weight, bias, before, after, skip, gain) or too_wide(x.shape[-1] // groups)
    chosen = resolve(op, backend, against_triton=against)
    if chosen == "triton":
        from mixassay.kernels.norm import registered  # the package triton may not be there

        return registered.norm(
            x, weight, bias, before, after, skip, gain, groups, eps, mean, centre, narrow if autocasts(x) else dtype
        )
    if chosen == "torch" and centre:  # torch's own is faster than the definition
        return torch.nn.functional.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, eps)
    before, after = (None if gate is None else gate.to(dtype) for gate in (before, after))
    return reference.norm(x.to(dtype), weight, bias, before, after, skip, gain, groups, eps, mean, centre)


def too_wide(N: int) -> str | None:
    """Why the kernels cannot serve groups of N."""
    return f"its groups of {N} are wider than {WIDEST}" if N > WIDEST else None
