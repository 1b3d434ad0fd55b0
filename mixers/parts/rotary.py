"""Rotary position embedding (Su et al. 2021): q and k turn by angles proportional to their positions, so that their
product depends on the distance between them only."""

import torch
from torch import Tensor

from mixassay.mixers.parts.precision import wide


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn x [..., T, H, K], K even, by the positions [..., T]. Channel i is paired with channel i + K/2 (GPT-NeoX).

    The pair's angle is position * base^(-2 i / K).
    """
    out, x = x.dtype, wide(x)
    half = x.shape[-1] // 2
    frequency = base ** -(torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = positions[..., None, None] * frequency  # [..., T, 1, K/2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(out)
