"""The Triton kernels as torch operators on a stack of models [M, ...]: under vmap the mapped axis joins the stack's."""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.precision import autocasts
from mixassay.kernels.common.registered import on_device, vmap_joins
from mixassay.kernels.linear_cross_entropy import triton


def linear_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    loss: Tensor = forward(*_stack_of_one(h, weight), labels[None], ignore_index, _operand(h, weight))[0]
    return loss.squeeze(0)


def linear_cross_entropy_score(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    loss, right = score(*_stack_of_one(h, weight), labels[None], ignore_index, _operand(h, weight))
    return loss.squeeze(0), right.squeeze(0)


def _stack_of_one(h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(h.dtype, weight.dtype)
    return h.to(dtype)[None], weight.to(dtype)[None]


def _operand(h: Tensor, weight: Tensor) -> torch.dtype:
    """What is multiplied: what is given, but under autocast, or where tf32 may stand for float32, float16, which has as
    many bits and is faster (docs/log.md)."""
    dtype = torch.promote_types(h.dtype, weight.dtype)
    ten = autocasts(h) or (h.is_cuda and torch.backends.cuda.matmul.allow_tf32)
    return torch.float16 if ten and dtype == torch.float32 else dtype


@torch.library.custom_op("mixassay::linear_cross_entropy", mutates_args=())
def forward(
    h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, operand: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """loss and lse [M, R], and the gradient of h [M, R, D] for a gradient of 1, all in float32 or wider."""
    with on_device(h):
        h, weight, labels = h.contiguous(), weight.to(operand).contiguous(), labels.contiguous()
        return triton.rows(h, weight, labels, ignore_index, gradient=True)


@torch.library.custom_op("mixassay::linear_cross_entropy_words", mutates_args=())
def backward(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    dloss: Tensor,
    ignore_index: int,
    operand: torch.dtype,
) -> Tensor:
    """The gradient of weight [M, V, D]."""
    with on_device(h):
        h, weight, labels, lse = h.to(operand).contiguous(), weight.contiguous(), labels.contiguous(), lse.contiguous()
        dweight = triton.words(h, weight, labels, lse, dloss.to(lse.dtype).contiguous(), ignore_index)
        return dweight.to(weight.dtype).contiguous()


@torch.library.custom_op("mixassay::linear_cross_entropy_score", mutates_args=())
def score(h: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, operand: torch.dtype) -> tuple[Tensor, Tensor]:
    with on_device(h):
        h, weight, labels = h.contiguous(), weight.to(operand).contiguous(), labels.contiguous()
        made = triton.rows(h, weight, labels, ignore_index, gradient=False)
    return made[0], made[1]


def _wide(h: Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32


@forward.register_fake
def _(h: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss, lse = (h.new_empty(h.shape[:2], dtype=_wide(h)) for _ in range(2))
    return loss, lse, h.new_empty(h.shape, dtype=_wide(h))


@backward.register_fake
def _(h: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(weight.shape)


@score.register_fake
def _(h: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape[:2], dtype=_wide(h)), h.new_empty(h.shape[:2], dtype=torch.bool)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    h, weight, labels, *ctx.others = inputs
    ctx.save_for_backward(h, weight, labels, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    h, weight, labels, lse, dh = ctx.saved_tensors
    wanted_h, wanted_weight = ctx.needs_input_grad[:2]
    dweight = backward(h, weight, labels, lse, dloss, *ctx.others) if wanted_weight else None
    return (dh * dloss.unsqueeze(-1)).to(h.dtype) if wanted_h else None, dweight, None, None, None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward, score)
