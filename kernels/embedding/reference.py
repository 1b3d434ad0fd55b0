"""The definition: x = (E[token] + P[t]) keep / (1 - p), h = norm(x)."""

import torch
from torch import Tensor

from mixassay.kernels.norm import layer_norm, rms_norm


def embedding(
    tokens: Tensor,
    table: Tensor,
    position: Tensor | None,
    keep: Tensor | None,
    p: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    x = torch.nn.functional.embedding(tokens, table)
    if position is not None:
        x = x + position
    if keep is not None:
        x = x * (keep.to(x.dtype) / (1 - p))
    if bias is None:
        return x, rms_norm(x, weight, eps=eps, backend=backend)
    return x, layer_norm(x, weight, bias, eps=eps, backend=backend)
