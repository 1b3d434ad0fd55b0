"""Scores with a gradient to the token: by k_t and v_t of its own, the segment it is held against being a constant.

    score = sqrt(2 - 2 c),  c = <C, s_t> / (|k_t| |v_t| |C|),  d score = -dc / max(score, 0.05)

The bound on the slope is ours: at a score of 0 it has none. All pairs of tokens, for sequences of moderate length.
"""

import torch
from torch import Tensor

from mixassay.kernels.dla.boundaries import Reading, lanes

STEEPEST = 0.05


def with_gradient(
    score: Tensor, k: Tensor, v: Tensor, boundary: Tensor, log_decay: Tensor | None, reading: Reading
) -> Tensor:
    """score [B, T, H] as it is, of keys k [B, T, H, K] and values v [B, T, H, V] that are cut at `boundary`."""
    (B, T, H, _), at = v.shape, torch.arange(v.shape[1], device=v.device)
    earlier = at[:, None] > at  # [t, s]
    k, v = lanes(k), lanes(v)
    g = v.new_zeros(B * H, T) if log_decay is None else lanes(log_decay.detach().to(v.dtype))
    after = g.clamp(min=-708.0 if v.dtype == torch.float64 else -87.0).double().cumsum(1)
    number = lanes(boundary.detach()).long().cumsum(1)
    before = torch.cat((number[:, :1] - 1, number[:, :-1]), dim=1)  # the segment that token t finds open
    seen = (earlier & (before[:, :, None] == number[:, None])) if reading != "token" else at[:, None] == at + 1
    since = torch.cat((after[:, :1], after[:, :-1]), dim=1)[:, :, None] - after[:, None]
    decay = seen.to(v.dtype) if reading == "token" else since.masked_fill(~seen, -torch.inf).exp().to(v.dtype)
    inner = (decay * (k @ k.detach().mT) * (v @ v.detach().mT)).sum(-1)  # [N, t]
    own = k.square().sum(-1) * v.square().sum(-1)
    opens = torch.cat((torch.ones_like(number[:, :1]), number.diff(dim=1)), dim=1) > 0
    grown = own + torch.where(opens | (reading == "token"), 0.0, 2 * g.exp() * inner)
    memory = (decay.square() @ grown.detach()[..., None])[..., 0]
    return attached(lanes(score), inner, own, memory).view(B, H, T).transpose(1, 2)


def attached(score: Tensor, inner: Tensor, own: Tensor, memory: Tensor) -> Tensor:
    """The score as it is, with the gradient of <C, s_t> and |s_t|^2; |C|^2 is a constant."""
    valid = (own > 0) & (memory > 0)
    cosine = inner / torch.where(valid, own * memory.detach(), 1.0).sqrt()
    zero = torch.where(valid, cosine - cosine.detach(), 0.0)
    return score.detach() - zero / score.detach().clamp(min=STEEPEST)
