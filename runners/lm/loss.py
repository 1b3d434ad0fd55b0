"""Cross-entropy of all positions, of which never more logits are held than `LOGITS_AT_ONCE`.

A row's loss is the mean over its labels, a batch's the mean over its rows. So a row of which ten tokens are scored
counts as much as one of four thousand, and the loss is the same however the rows are dealt out.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mixassay.kernels.linear_cross_entropy import linear_cross_entropy
from mixassay.model import Head
from mixassay.tasks import IGNORE

LOGITS_AT_ONCE = 2**26
"""256 MiB in float32; behind it the logits of a piece are made again for its gradient."""


def row_losses(labels: Tensor) -> Head:
    """Labels int64 [B, T], IGNORE where nothing is scored -> the loss of every row [B], in at least float32."""

    def head(h: Tensor, weight: Tensor) -> Tensor:
        each = token_losses(h.flatten(0, 1), weight, labels.flatten()).view_as(labels)
        return each.sum(1) / (labels != IGNORE).sum(1)

    return head


def token_losses(h: Tensor, weight: Tensor, labels: Tensor, at_once: int = LOGITS_AT_ONCE) -> Tensor:
    """h [R, D], weight [V, D], labels int64 [R] -> loss [R], 0 where the label is IGNORE."""
    rows = max(1, at_once // len(weight))
    if len(h) <= rows:
        return linear_cross_entropy(h, weight, labels, ignore_index=IGNORE)
    pieces = zip(torch.split(h, rows), torch.split(labels, rows), strict=True)
    return torch.cat([_again(piece, weight, its) for piece, its in pieces])


def _again(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = checkpoint(linear_cross_entropy, h, weight, labels, ignore_index=IGNORE, use_reentrant=False)
    return loss
