"""Norms over the last axis, computed in at least float32."""

import torch
from torch import Tensor, nn

from mixassay.mixers.parts.precision import wide

EPS_RMS = 1e-5
EPS_L2 = 1e-6


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), weight 1 at first.

    With `groups` the mean is taken over each of so many equal parts of the last axis.
    """

    def __init__(self, width: int, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        parts = wide(x) if self.groups == 1 else torch.unflatten(wide(x), -1, (self.groups, -1))
        parts = parts * ((parts * parts).mean(-1, keepdim=True) + EPS_RMS).rsqrt()
        return parts.reshape(x.shape) * self.weight


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + eps): unit vectors, and zero with a finite gradient where x is zero."""
    x = wide(x)
    return x * ((x * x).sum(-1, keepdim=True) + EPS_L2).rsqrt()
