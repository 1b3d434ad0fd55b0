"""What the operators' step functions call first."""

import torch
from torch import Tensor

from mixassay.kernels import resolve
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.sequences import wide_heads


def fused(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    level_scale: Tensor | None,
    log_decay: Tensor | None,
    slots: Tensor,
    position: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor] | None:
    """o [B, H, V] and the new slots [B, H, L, K, V] from the Triton kernel, or None: the torch form is to serve.

    The kernel is for inference: tensors that require gradients go to the torch form.
    """
    given = (q, k, v, beta, level_scale, log_decay, slots)
    against = against_triton(*given) or wide_heads(q, v)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        against = against or "its tensors require gradients, and the step kernel is for inference"
    if resolve(op, None, against_triton=against) != "triton":
        return None
    from mixassay.kernels.recurrent_step import registered  # the package triton may not be there

    o, new = registered.step(q, k, v, beta, level_scale, log_decay, slots, position, scale)
    return o, new
