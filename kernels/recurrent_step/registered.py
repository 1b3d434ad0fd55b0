"""The step kernel as a torch operator: fake tensors and vmap (the mapped axis joins the batch). It has no backward."""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import on_device, vmap_joins
from mixassay.kernels.recurrent_step import triton


@torch.library.custom_op("mixassay::recurrent_step", mutates_args=())
def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    level_scale: Tensor | None,
    log_decay: Tensor | None,
    slots: Tensor,
    position: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o and the new slots."""
    with on_device(q):
        return triton.step(q, k, v, beta, level_scale, log_decay, slots, position, scale)


@step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    level_scale: Tensor | None,
    log_decay: Tensor | None,
    slots: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), slots.new_empty(slots.shape)


vmap_joins(step)
