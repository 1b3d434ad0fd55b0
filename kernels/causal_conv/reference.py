"""The definition: y_t = sum_w weight_w x_{t - (W - 1) + w} + bias, token by token; the last weight meets the newest."""

import torch
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    T = x.shape[1]
    kept = initial_state  # [B, W - 1, D]: the last W - 1 inputs, oldest first
    y = []
    for t in range(T):
        window = torch.cat([kept, x[:, t : t + 1]], dim=1)  # [B, W, D]
        y_t = torch.einsum("bwd,dw->bd", window, weight)
        y.append(y_t if bias is None else y_t + bias)
        kept = window[:, 1:]
    return torch.stack(y, dim=1), kept
