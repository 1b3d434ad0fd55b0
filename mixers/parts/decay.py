"""Selective decay (Mamba, Gu and Dao 2023): each head forgets at a rate of its own, over a time step that the token
chooses. Mamba-2 and Gated DeltaNet share it.

    dt = softplus(raw + dt_bias);   log_decay = -A dt,   A = exp(A_log)
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from mixassay.mixers.parts.precision import wide

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4
A_FLOOR = 1e-4  # a draw of exactly 0 would be a log of -inf, which no gradient moves


class SelectiveDecay(nn.Module):
    """[..., H] raw time steps -> dt and log_decay <= 0, both [..., H] in at least float32.

    At first A is uniform in `a_range`, and a raw step of 0 gives a dt log-uniform in [1e-3, 1e-1] (the reference
    implementations of both papers). Weight decay spares both parameters.
    """

    def __init__(self, heads: int, a_range: tuple[float, float]) -> None:
        super().__init__()
        dt = torch.empty(heads).uniform_(math.log(DT_MIN), math.log(DT_MAX)).exp().clamp(min=DT_FLOOR)
        self.dt_bias = spared(dt + (-torch.expm1(-dt)).log())  # the inverse of softplus
        self.A_log = spared(torch.empty(heads).uniform_(*a_range).clamp(min=A_FLOOR).log())

    def forward(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        dt = softplus(wide(raw) + self.dt_bias)
        return dt, -self.A_log.exp() * dt


def spared(value: Tensor) -> nn.Parameter:
    """A parameter that is marked as spared by weight decay."""
    p = nn.Parameter(value)
    p.no_weight_decay = True  # type: ignore[attr-defined]  # the mark that the optimiser looks for
    return p
