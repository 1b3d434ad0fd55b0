"""The gradient of a boundary that is one already: forward hard, backward the slope of the soft register at p = b.

A boundary at j moves what tokens t >= j read of tokens s < j up by one rank, and its absence down by one. So with
A v the output before the weights, and the weights' differences between neighbouring ranks

    up[t, r] = w[t, r + 1] - w[t, r]    where no boundary is (0 at the last rank)
    down[t, r] = w[t, r] - w[t, r - 1]  where one is         (0 at rank 0)

the derivative by p_j is the sum of up or down[t, rank of s at t] over these pairs (times A[t, s] v_s): exact as long as
no slots meet after j, a surrogate where they do. c = cumsum(p - p's value), which is 0, has the slope of a sum over
all j up to there: the pairs' factor is c_t - c_s.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad


def slopes(weights: Tensor, boundary: Tensor, gate: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """up and down, like weights [..., t, R], each with its c [..., t]."""
    difference = weights.detach().diff(dim=-1)
    zero = gate - gate.detach()
    yield pad(difference, (0, 1)), torch.where(boundary, 0.0, zero).cumsum(-1)
    yield pad(difference, (1, 0)), torch.where(boundary, zero, 0.0).cumsum(-1)


def with_gate(
    form: Callable[[Tensor, Tensor], Tensor], weights: Tensor, v: Tensor, boundary: Tensor, gate: Tensor
) -> Tensor:
    """`form(weights, v)`, linear in both, with the gradient of the gate: weights [B, T, H, R], v [B, T, H, V],
    boundary and gate [B, T, H]. Two more calls, on values twice as wide."""
    o = form(weights, v)
    for slope, c in slopes(*(x.transpose(1, 2) for x in (weights, boundary, gate))):
        slope, c = slope.transpose(1, 2), c.transpose(1, 2).unsqueeze(-1)
        since, before = form(slope, torch.cat((v, c * v), dim=-1)).chunk(2, dim=-1)
        o = o + c * since - before
    return o
