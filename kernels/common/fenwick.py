"""The Fenwick tree of log-linear attention (Guo et al. 2025): which level a past token has, and the slots of a state.

The level of token s as token t >= s sees it is bit_length(t xor s): 0 for itself, then ever larger aligned blocks of
1, 2, 4 ... tokens. Level l >= 1 exists at t exactly where bit l - 1 of t is set, so at most log2(t) + 2 levels do.

A model has L level weights. Levels beyond share the last one, hence a slot of the state: to add their states up is
the same as to keep more slots and weigh all of them by the last weight. A state never grows.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class FenwickState(NamedTuple):
    """What a log-linear operator carries from token to token."""

    slots: Tensor
    """[B, H, L, K, V], float32 or wider. Slot l holds the tokens that the last token sees at level l."""
    position: Tensor
    """[B] int64, tokens seen so far: sequences of a batch may be at different places."""


def levels(T: int) -> int:
    """How many levels T tokens have: ceil(log2 T) + 1."""
    return (T - 1).bit_length() + 1


def level(t: Tensor, s: Tensor, L: int) -> Tensor:
    """bit_length(t xor s), at most L - 1, of int64 positions below 2^48."""
    # frexp of a whole number below 2^53 is exact, and its exponent is the bit length.
    length = torch.frexp((t ^ s).double()).exponent
    return length.long().clamp(max=L - 1)


def merge(slots: Tensor, position: Tensor) -> Tensor:
    """What token `position` does first to the slots [B, H, L, K, V]: all levels below lssb(position) + 1 become it."""
    L = slots.shape[2]
    lowest = torch.frexp((position & -position).double()).exponent.long()  # lssb + 1; 0 before the first token
    target = lowest.clamp(max=L - 1).view(-1, 1, 1, 1, 1)
    index = torch.arange(L, device=slots.device).view(-1, 1, 1)
    merged = torch.where(index < target, slots, 0.0).sum(2, keepdim=True)
    return torch.where(index < target, 0.0, slots) + torch.where(index == target, merged, 0.0)


def write_and_read(slots: Tensor, k: Tensor, v: Tensor, q: Tensor, level_scale: Tensor) -> tuple[Tensor, Tensor]:
    """A token's last two acts: k v^T into slot 0, then its output, of k, q [B, H, K], v [B, H, V], level_scale
    [B, H, L]. Returns o [B, H, V] and the slots."""
    new = k[..., None] * v[..., None, :]
    slots = slots + pad(new.unsqueeze(2), (0, 0, 0, 0, 0, slots.shape[2] - 1))
    weighted = level_scale[..., None] * q[..., None, :]  # [B, H, L, K]
    return (weighted.flatten(2).unsqueeze(2) @ slots.flatten(2, 3)).squeeze(2), slots


def past(t: int, L: int) -> list[int]:
    """The levels at which token t sees earlier tokens, ascending."""
    return sorted({min(bit + 1, L - 1) for bit in range(t.bit_length()) if t >> bit & 1})


def live(tokens: int, L: int) -> list[int]:
    """The slots that hold something after so many tokens, ascending."""
    return sorted({0, *past(tokens - 1, L)}) if tokens else []


def empty_state(like: Tensor, B: int, H: int, L: int, K: int, V: int) -> FenwickState:
    """Before the first token, in the dtype and on the device of `like`."""
    return FenwickState(like.new_zeros(B, H, L, K, V), torch.zeros(B, dtype=torch.int64, device=like.device))
