"""AdamW (Loshchilov & Hutter 2019) for a stack: one pass over a flat [M, P] buffer, every row its own model.

    m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p = p (1 - lr wd) - lr m^ / (sqrt(v^) + eps)

with lr, wd, clipping and an `active` flag per row. A row that is not active, or whose gradient is not finite, keeps
its parameters bit for bit, and no other row sees it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mixassay.kernels.common.registered import against_triton

EPS = 1e-8


def one_pass(params: Tensor, grads: Tensor | None = None) -> bool:
    """Whether a kernel updates or copies them; the torch form reads and writes them a dozen times."""
    return params.is_cuda and against_triton(params, grads) is None


def paces(shares: Sequence[float], betas: tuple[float, float]) -> Tensor:
    """float64 [steps, 3], for each update n = 1, 2, ... by its share of the learning rate: that share, the share over
    1 - b1^n, and the root of 1 - b2^n."""
    share, n = torch.tensor(shares, dtype=torch.float64), torch.arange(1, len(shares) + 1, dtype=torch.float64)
    b1, b2 = betas
    return torch.stack((share, share / (1 - b1**n), (1 - b2**n).sqrt()), dim=1)


@dataclass
class AdamW:
    """`lr`, `weight_decay`: [M]. `decay_mask`: [P], 1 where a parameter is decayed. No update waits for the device."""

    lr: Tensor
    weight_decay: Tensor
    decay_mask: Tensor
    betas: tuple[float, float]
    clip: float | None
    mean: Tensor  # [M, P], first moment
    square: Tensor  # [M, P], second moment

    @torch.no_grad()
    def update(self, params: Tensor, grads: Tensor, pace: Tensor, active: Tensor) -> Tensor:
        """Move `params` [M, P] in place by `grads` at each row's lr and `pace` [3], the update's row of `paces`; says
        which rows are finite, [M]."""
        norm = torch.linalg.vector_norm(grads, dim=1)  # [M]
        finite: Tensor = norm < math.inf
        go = active & finite
        kept = 1.0 if self.clip is None else (self.clip / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(go, kept, 0.0).to(grads.dtype)
        b1, b2 = self.betas
        if one_pass(params, grads):
            from mixassay.kernels.adamw import triton  # the package triton may not be there

            options = {"lr": self.lr, "weight_decay": self.weight_decay, "factor": factor, "pace": pace}
            triton.update(params, grads, self.mean, self.square, self.decay_mask, **options, betas=self.betas, eps=EPS)
            return finite
        # where() and not a product: 0 * inf is nan
        grads = torch.where(go[:, None], grads, 0.0) * factor[:, None]
        self.mean.lerp_(grads, 1 - b1)
        self.square.mul_(b2).addcmul_(grads, grads, value=1 - b2)
        lr = torch.where(go, self.lr, 0.0)[:, None]
        denominator = (self.square.sqrt() / pace[2]).add_(EPS)
        params.sub_(params * (lr * pace[0] * self.weight_decay[:, None] * self.decay_mask))
        params.sub_(lr * pace[1] * self.mean / denominator)
        return finite

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.lr, self.weight_decay = self.lr[rows], self.weight_decay[rows]
        self.mean, self.square = self.mean[rows], self.square[rows]
