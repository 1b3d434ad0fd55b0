"""What a token's weights are at the ranks of earlier tokens, with a gradient that is the same bits on every run."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def at_ranks(weights: Tensor, rank: Tensor) -> Tensor:
    """weights [..., R] at rank, int64 [..., n], which falls along n: [..., n]."""
    found: Tensor = _AtRanks.apply(weights, rank)  # type: ignore[no-untyped-call]
    return found


class _AtRanks(torch.autograd.Function):
    """A gather. Its own gradient would be added up by atomics on a GPU; tokens of one rank lie side by side, so here it
    is a difference of running sums."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, rank: Tensor) -> Tensor:
        return weights.gather(-1, rank)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        weights, rank = inputs
        ctx.save_for_backward(rank)
        ctx.R = weights.shape[-1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (rank,) = ctx.saved_tensors
        sums = pad(grad_outputs[0].cumsum(-1), (1, 0))
        r = torch.zeros_like(rank[..., :1]) + torch.arange(ctx.R, device=rank.device)
        # How many are of a rank above r.
        older = rank.shape[-1] - torch.searchsorted(rank.flip(-1).contiguous(), r.contiguous(), right=True)
        before = sums.gather(-1, older)
        return torch.cat((sums[..., -1:], before[..., :-1]), dim=-1) - before, None
