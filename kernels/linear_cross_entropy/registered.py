"""The Triton kernels as torch operators on a stack of models [M, ...]: under vmap the mapped axis joins the stack's."""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import folded, on_device, operand_dtype, unfolded
from mixassay.kernels.linear_cross_entropy import triton


def linear_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    dtype = operand_dtype(h, h, weight)
    loss: Tensor = forward(h.to(dtype)[None], weight.to(dtype)[None], labels[None], ignore_index)[0]
    return loss.squeeze(0)


def linear_cross_entropy_score(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    dtype = operand_dtype(h, h, weight)
    loss, right = score(h.to(dtype)[None], weight.to(dtype)[None], labels[None], ignore_index)
    return loss.squeeze(0), right.squeeze(0)


@torch.library.custom_op("mixassay::linear_cross_entropy", mutates_args=())
def forward(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """loss and lse [M, R], and the gradient of h [M, R, D] for a gradient of 1."""
    with on_device(h):
        return triton.rows(h.contiguous(), weight.contiguous(), labels.contiguous(), ignore_index, gradient=True)


@torch.library.custom_op("mixassay::linear_cross_entropy_words", mutates_args=())
def backward(h: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, ignore_index: int) -> Tensor:
    """The gradient of weight [M, V, D]."""
    with on_device(h):
        h, weight, labels, lse = h.contiguous(), weight.contiguous(), labels.contiguous(), lse.contiguous()
        return triton.words(h, weight, labels, lse, dloss.to(lse.dtype).contiguous(), ignore_index).contiguous()


@torch.library.custom_op("mixassay::linear_cross_entropy_score", mutates_args=())
def score(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    with on_device(h):
        made = triton.rows(h.contiguous(), weight.contiguous(), labels.contiguous(), ignore_index, gradient=False)
    return made[0], made[1]


def _wide(h: Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32


@forward.register_fake
def _(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    loss, lse = (h.new_empty(h.shape[:2], dtype=_wide(h)) for _ in range(2))
    return loss, lse, h.new_empty(h.shape)


@backward.register_fake
def _(h: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(weight.shape)


@score.register_fake
def _(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape[:2], dtype=_wide(h)), h.new_empty(h.shape[:2], dtype=torch.bool)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    h, weight, labels, ctx.ignore_index = inputs
    ctx.save_for_backward(h, weight, labels, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    h, weight, labels, lse, dh = ctx.saved_tensors
    wanted_h, wanted_weight = ctx.needs_input_grad[:2]
    dweight = backward(h, weight, labels, lse, dloss, ctx.ignore_index) if wanted_weight else None
    return (dh * dloss.unsqueeze(-1)).to(h.dtype) if wanted_h else None, dweight, None, None


forward.register_autograd(_gradients, setup_context=_remember)


@forward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return unfolded(info, forward(*folded(info, in_dims, args)))


@backward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    (dweight,), (dim,) = unfolded(info, (backward(*folded(info, in_dims, args)),))
    return dweight, dim


@score.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return unfolded(info, score(*folded(info, in_dims, args)))
