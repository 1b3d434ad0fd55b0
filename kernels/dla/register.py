"""The soft gate as a mask: how much of each token every rank holds, when a boundary happens with probability p.

    w_t = (1 - p_t) w_{t-1} + p_t P_{opening_t} w_{t-1},  and token t itself at rank 0
    M[t, s] = rank_scale_t . w_t[., s]

With p of 0 and 1 this is the hard mask. T steps, T^2 R numbers a head: for short sequences and few slots.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mixassay.kernels.dla.boundaries import lanes
from mixassay.kernels.dla.slots import Rule, Schedule, keep_older, move, opening, units


def mask(rank_scale: Tensor, gate: Tensor, opening: Tensor) -> Tensor:
    """M [N, T, T] of rank_scale [N, T, R], gate and opening [N, T]."""
    N, T, R = rank_scale.shape
    first = one_hot(torch.zeros((), dtype=torch.int64, device=gate.device), R).to(gate.dtype)[:, None]
    w, rows = gate.new_zeros(N, R, T), []
    for t, here in enumerate(torch.eye(T, dtype=gate.dtype, device=gate.device)):
        w = w + gate[:, t, None, None] * (move(w, opening[:, t]) - w) + first * here
        rows.append(rank_scale[:, t, None] @ w)
    return torch.cat(rows, dim=1)


def openings(schedule: Schedule, score: Tensor, rule: Rule, k: Tensor, v: Tensor) -> Tensor:
    """int64 [B, T, H]: the shift that a boundary at each token would make, whether there is one or not. k [B, T, G, K]
    and v [B, T, H, V] as for `slots`."""
    B, T, H, R = schedule.starts.shape
    shift, score = lanes(schedule.shift), units(lanes(score))
    k, v = (lanes(x).double() for x in (k.repeat_interleave(H // k.shape[2], 2), v))
    sums = {"n": torch.ones_like(score), "I": score}
    if rule == "ward":
        sums |= {"S": k[..., :, None] * v[..., None, :], "Q": k.square().sum(-1) * v.square().sum(-1)}
    first = torch.arange(R, device=v.device) == 0
    held = {name: x.new_zeros(B * H, R, *x.shape[2:]) for name, x in sums.items()}
    divide, found = score.new_zeros(B * H, R), []
    for t in range(T):
        found.append(opening(rule, held, divide))
        divide = keep_older(divide, shift[:, t], score[:, t])
        for name, x in held.items():
            new = x.new_zeros(()) + sums[name][:, t, None]
            held[name] = move(x, shift[:, t]) + torch.where(first.view(-1, *[1] * (x.dim() - 2)), new, 0)
    return torch.stack(found, dim=1).view(B, H, T).transpose(1, 2)
