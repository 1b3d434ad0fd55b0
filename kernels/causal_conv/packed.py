"""Packed sequences [1, T, D] with bounds [N + 1]: each begins with its own W - 1 earlier inputs."""

from collections.abc import Callable

import torch
from torch import Tensor


def spread(
    form: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """`form` on one long sequence in which the W - 1 inputs before each packed one stand in front of it."""
    N, T, kept = len(cu_seqlens) - 1, x.shape[1], weight.shape[1] - 1
    n = torch.arange(N, device=x.device)
    before = (cu_seqlens[:-1] + kept * n)[:, None] + torch.arange(kept, device=x.device)  # [N, W - 1]
    token = torch.arange(T, device=x.device)
    place = token + kept * torch.searchsorted(cu_seqlens[1:], token, right=True) + kept
    state = x.new_zeros(N, kept, x.shape[2]) if initial_state is None else initial_state
    dtype = torch.promote_types(x.dtype, state.dtype)
    seen = torch.cat([state.flatten(0, 1), x[0]]).to(dtype)[torch.cat([before.flatten(), place]).argsort()]
    y, _ = form(seen[None], weight, bias, seen.new_zeros(1, kept, x.shape[2]))
    return y[:, place], seen[before + (cu_seqlens.diff())[:, None]]


def last_inputs(x: Tensor, initial_state: Tensor | None, W: int, cu_seqlens: Tensor | None) -> Tensor:
    """The final state: the last W - 1 inputs of each sequence, of its initial state (or zeros) if it is shorter."""
    B, T, D = x.shape
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if cu_seqlens is None and T >= W - 1:
        last = x[:, T - (W - 1) :]
        return last if initial_state is None else last.to(torch.promote_types(x.dtype, initial_state.dtype))
    state = x.new_zeros(N, W - 1, D) if initial_state is None else initial_state
    if cu_seqlens is None:
        return torch.cat([state[:, T:], x], dim=1)
    token = cu_seqlens.diff()[:, None] + torch.arange(1 - W, 0, device=x.device)  # [N, W - 1]; < 0: before the first
    row = cu_seqlens[:-1, None] + token
    earlier = state.gather(1, (token + (W - 1)).clamp(max=W - 2)[..., None].expand(N, W - 1, D))
    return torch.where((token >= 0)[..., None], x[0, row.clamp(min=0)], earlier)
