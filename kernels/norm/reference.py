"""The definition: y = (n weight + bias) silu(after), n = u / sqrt(mean(u^2) + eps) over each group, u = x silu(before),
for a layer norm less its mean. With a skip it is x + gain skip that is normed."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    skip: Tensor | None,
    gain: Tensor | None,
    groups: int,
    eps: float,
    mean: bool,
    centre: bool,
) -> Tensor:
    if skip is not None and gain is not None:
        heads = (len(gain), -1)
        x = (torch.unflatten(x, -1, heads) + gain.unsqueeze(-1) * torch.unflatten(skip, -1, heads)).flatten(-2)
    if before is not None:
        x = x * silu(before)
    parts = x if groups == 1 else torch.unflatten(x, -1, (groups, -1))
    if centre:
        parts = parts - parts.mean(-1, keepdim=True)
    squares = parts * parts
    parts = parts * ((squares.mean(-1, keepdim=True) if mean else squares.sum(-1, keepdim=True)) + eps).rsqrt()
    y = parts.reshape(x.shape)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y if after is None else y * silu(after)
