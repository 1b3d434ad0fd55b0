"""What the log-linear mixers share: the level weights (Guo et al. 2025), and the bytes of a state with empty slots.

    lambda_t = softplus(P . (W x_t)),   one weight a token, head and level; P [H, L] starts at 1 and is not decayed

The authors' code adds the factor P to the paper's linear map, and softplus keeps weights positive.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from mixassay.kernels.common.fenwick import FenwickState, live
from mixassay.mixers import Mixer, nbytes
from mixassay.mixers.parts.decay import spared
from mixassay.mixers.parts.precision import wide

LEVELS = 15
"""The authors' number: all levels of 16384 tokens."""


class LevelScale(nn.Module):
    """[..., H L] raw weights -> [..., H, L] in at least float32. Raw weights of 0 give log 2."""

    def __init__(self, heads: int, levels: int) -> None:
        super().__init__()
        self.factor = spared(torch.ones(heads, levels))

    def forward(self, raw: Tensor) -> Tensor:
        return softplus(self.factor * torch.unflatten(wide(raw), -1, self.factor.shape))


class FenwickMixer(Mixer):
    """A mixer whose state is (the convolution's last inputs, a `FenwickState`)."""

    def state_bytes(self, T: int) -> int:
        """All L slots, whether they hold tokens or not: the same for every T."""
        return nbytes(self.init_state(1))

    def live_state_bytes(self, T: int) -> int:
        """Without the slots that hold no token: after T tokens 1 + popcount(T - 1) do, at most L."""
        slots = cast(tuple[Tensor, FenwickState], self.init_state(1))[1].slots
        L = slots.shape[2]
        return self.state_bytes(T) - nbytes(slots) // L * (L - len(live(T, L)))
