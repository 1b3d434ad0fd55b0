"""The sum that `gate` is made of, apart, as real packages have more files than one."""

import torch
from torch import Tensor


def decayed_sums(u: Tensor, log_g: Tensor, segment: Tensor | None = None) -> Tensor:
    """h_t = exp(log_g_t) h_{t-1} + u_t, densely: u and log_g [B, T, D]; `segment` int [T], where to begin anew."""
    T = u.shape[1]
    since = log_g.cumsum(1)
    lag = since.unsqueeze(2) - since.unsqueeze(1)  # [B, t, s, D]
    sees = torch.ones(T, T, dtype=torch.bool, device=u.device).tril()
    if segment is not None:
        sees = sees & (segment.unsqueeze(1) == segment)
    return (lag.masked_fill(~sees.unsqueeze(-1), -torch.inf).exp() * u.unsqueeze(1)).sum(2)
