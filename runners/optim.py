"""AdamW (Loshchilov & Hutter 2019) for a stack: one pass over a flat [M, P] buffer, every row its own model.

    m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p = p (1 - lr wd) - lr m^ / (sqrt(v^) + eps)

with lr, wd, clipping and an `active` flag per row. A row that is not active, or whose gradient is not finite, keeps
its parameters bit for bit, and no other row sees it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mixassay.kernels.common.registered import against_triton

EPS = 1e-8


def one_pass(params: Tensor, grads: Tensor | None = None) -> bool:
    """Whether a kernel updates or copies them; the torch form reads and writes them a dozen times."""
    return params.is_cuda and against_triton(params, grads) is None


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
    count: Tensor  # float64 [], updates made

    @torch.no_grad()
    def update(self, params: Tensor, grads: Tensor, scale: float | Tensor, active: Tensor) -> Tensor:
        """Move `params` [M, P] in place by `grads` at `scale` times each row's lr; says which rows are finite, [M]."""
        norm = torch.linalg.vector_norm(grads, dim=1)  # [M]
        finite = torch.isfinite(norm)
        go = active & finite
        factor = go.to(grads.dtype)
        if self.clip is not None:
            factor = factor * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(go, factor, 0.0)
        b1, b2 = self.betas
        self.count += 1
        lr = torch.where(go, self.lr * scale, 0.0)
        if one_pass(params, grads):
            from mixassay.kernels.adamw import triton  # the package triton may not be there

            options = {"lr": lr, "weight_decay": self.weight_decay, "factor": factor, "count": self.count}
            moved = params, grads, self.mean, self.square, self.decay_mask
            triton.update(*moved, **options, betas=self.betas, eps=EPS)
            return finite
        # where() and not a product: 0 * inf is nan
        grads = torch.where(go[:, None], grads, 0.0) * factor[:, None]
        self.mean.lerp_(grads, 1 - b1)
        self.square.mul_(b2).addcmul_(grads, grads, value=1 - b2)
        lr = lr[:, None]
        denominator = (self.square.sqrt() / (1 - b2**self.count).sqrt()).add_(EPS)
        params.sub_(params * (lr * self.weight_decay[:, None] * self.decay_mask))
        params.sub_(lr / (1 - b1**self.count) * self.mean / denominator)
        return finite

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.lr, self.weight_decay = self.lr[rows], self.weight_decay[rows]
        self.mean, self.square = self.mean[rows], self.square[rows]
