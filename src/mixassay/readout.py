"""A row read back from one vector: the decoder of MAD's compression task (Poli et al. 2024, arXiv 2403.17844).

The q-th answer is made of the same hidden vector h and of q alone, by two layers as wide as the model:

    y = RMS(gelu(W2 RMS(gelu(W1 (h + sinusoid(q))))))        sinusoid(q) = sin(q w_i), cos(q w_i),  w_i = 10000^(-i/n)

A task asks for it by its attribute `decodes`, and repeats the position of h once for each answer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixassay.mixers.parts.norm import RMSNorm

INIT_STD = 0.02


class Decoder(nn.Module):
    """[B, Q, D], the same vector Q times -> [B, Q, D], what the head reads Q tokens from. Layers start as in MAD."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(d_model) for _ in range(2))
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, std=INIT_STD)
            nn.init.zeros_(layer.bias)

    def forward(self, h: Tensor) -> Tensor:
        h = h + sinusoids(h.shape[1], h.shape[2], h)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = norm(F.gelu(layer(h)))
        return h


def sinusoids(Q: int, D: int, like: Tensor) -> Tensor:
    """[Q, D]; the last channel of an odd width is 0."""
    n = D // 2
    w = 10000.0 ** -(torch.arange(n, device=like.device, dtype=torch.float64) / max(1, n - 1))
    angle = torch.arange(Q, device=like.device, dtype=torch.float64)[:, None] * w
    both = torch.cat((angle.sin(), angle.cos(), angle.new_zeros(Q, D - 2 * n)), dim=1)
    return both.to(like.dtype)
