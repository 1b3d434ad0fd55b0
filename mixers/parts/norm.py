"""Norms over the last axis, computed in at least float32."""

import torch
from torch import Tensor, nn

from mixassay.kernels.norm import l2_norm, layer_norm, rms_norm

EPS_LAYER = 1e-5
EPS_RMS = 1e-5
EPS_L2 = 1e-6


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), weight 1 at first.

    With `groups` the mean is taken over each of so many equal parts of the last axis. A gate of x's shape stands before
    the norm (the norm of x silu(before)) or behind it (the norm times silu(after)). With a skip s and its gain [H] for
    each of H parts, x + gain s stands for x.
    """

    def __init__(self, width: int, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(width))

    def forward(
        self,
        x: Tensor,
        *,
        before: Tensor | None = None,
        after: Tensor | None = None,
        skip: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        return rms_norm(x, self.weight, before=before, after=after, skip=skip, groups=self.groups, eps=EPS_RMS)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016), weight 1 and bias 0 at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=EPS_LAYER)


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + eps): unit vectors, and zero with a finite gradient where x is zero."""
    return l2_norm(x, eps=EPS_L2)
