"""What float16 training multiplies each model's loss by, so that the format holds its gradients.

float16 has all its digits down to 6e-5 and ends at 65,504. A loss that is a mean over labels is first multiplied by a
quarter of their number, which gives each label a gradient of some 1e-2 to 1 at a layer. Behind a norm of something
small that can still be too much. Then, as usual (Micikevicius et al. 2018, "Mixed Precision Training"), the model
leaves out the step, goes on at half the scale, and doubles it again after a thousand steps that were fine, up to 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CALM = 1000
"""Steps without an overflow after which a scale is doubled."""

LEAST = 2.0**-16
"""A model whose gradients are not finite at this scale has diverged: it is not the format that fails."""


@dataclass
class LossScale:
    """Of M models. Changed in place and without waiting for the device, as a captured step must."""

    value: Tensor  # [M], powers of two up to 1
    calm: Tensor  # int64 [M], steps since it was changed
    skipped: Tensor  # int64 [M], steps left out

    @classmethod
    def start(cls, M: int, device: str) -> "LossScale":
        counts = torch.zeros(2, M, dtype=torch.int64, device=device)
        return cls(torch.ones(M, device=device), counts[0], counts[1])

    def adjust(self, overflowed: Tensor) -> Tensor:
        """After a step, whose gradient was not finite in the models `overflowed` [M]: which of them may go on, [M]."""
        self.calm.add_(1).masked_fill_(overflowed, 0)
        self.skipped += overflowed
        double = (self.calm >= CALM) & (self.value < 1)
        self.calm.masked_fill_(double, 0)
        self.value.mul_(torch.where(overflowed, 0.5, 1 + double))
        return overflowed & (self.value >= LEAST)

    def keep(self, rows: list[int]) -> None:
        """Drop all models but these."""
        self.value, self.calm, self.skipped = self.value[rows], self.calm[rows], self.skipped[rows]
