"""Keys or values of all tokens so far, which grow by a few at a time.

To copy a cache of T tokens for each further one costs as much as attention itself. So where nothing needs a gradient
it lies in a larger buffer, and what comes is written behind it: a copy every T / 8 tokens. The cache of before is not
touched, and if it is lengthened a second time, that is a copy: nobody sees another's tokens.
"""

import torch
from torch import Tensor

SPARE = 64  # tokens that a buffer has room for, at least


class Room:
    """A buffer [B, capacity, ...], and how many of its tokens are taken."""

    def __init__(self, cache: Tensor, more: int) -> None:
        B, T, *each = cache.shape
        self.buffer = cache.new_empty(B, T + more + max(SPARE, T // 8), *each)
        self.buffer[:, :T] = cache
        self.taken = T

    def fits(self, T: int, more: int) -> bool:
        """Whether tokens may be written behind the first T."""
        closed = self.buffer.is_inference() and not torch.is_inference_mode_enabled()
        return self.taken == T and T + more <= self.buffer.shape[1] and not closed


def longer(cache: Tensor, new: Tensor) -> Tensor:
    """cache [B, T, ...] and new [B, N, ...] -> [B, T + N, ...]; in the wider dtype of both."""
    if cache.dtype != new.dtype or _followed(cache, new):
        return torch.cat([cache, new], dim=1)
    T, N = cache.shape[1], new.shape[1]
    room: Room | None = getattr(cache, "room", None)
    if room is None or not room.fits(T, N):
        room = Room(cache, N)
    room.buffer[:, T : T + N] = new
    room.taken = T + N
    whole = room.buffer[:, : T + N]
    whole.room = room  # type: ignore[attr-defined]
    return whole


def _followed(cache: Tensor, new: Tensor) -> bool:
    """Whether autograd, vmap or a compiler watches what happens, and wants new tensors."""
    gradients = torch.is_grad_enabled() and (cache.requires_grad or new.requires_grad)
    return gradients or torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling()
