"""The definition: -log softmax(E h)_y for every row, 0 where a row is not labelled."""

import torch
from torch import Tensor


def linear_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    logits = h @ weight.t()  # [R, V]
    labelled = labels != ignore_index
    word = torch.where(labelled, labels, 0).unsqueeze(1)
    loss = torch.logsumexp(logits, dim=1) - logits.gather(1, word).squeeze(1)
    return torch.where(labelled, loss, 0.0)
