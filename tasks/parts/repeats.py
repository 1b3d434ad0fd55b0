"""Where an id of a row has stood before."""

import torch
from torch import Tensor

from mixassay import draws


def first(ids: Tensor) -> Tensor:
    """The place of the first id of the row that equals this one: ids [N, P] below 2^32 -> int64 [N, P]."""
    order, new = _grouped(ids)
    begun = torch.where(new, torch.arange(ids.shape[1], device=ids.device), 0).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, begun))


def previous(ids: Tensor) -> Tensor:
    """The place of the last id before this one that equals it, or -1."""
    order, new = _grouped(ids)
    return torch.empty_like(order).scatter_(1, order, order.roll(1, dims=1).masked_fill(new, -1))


def _grouped(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Places in the order of their ids, equal ones from left to right, and which of them begins an id."""
    ranked, order = draws.ranked(ids)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    return order, new
