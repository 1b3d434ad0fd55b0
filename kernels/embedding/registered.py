"""The Triton kernels as torch operators: autograd, fake tensors, and vmap with a table for each member.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, present, vmap_joins
from mixassay.kernels.embedding import triton


def embedding(
    tokens: Tensor,
    table: Tensor,
    position: Tensor | None,
    keep: Tensor | None,
    p: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    tokens, table, weight = tokens.unsqueeze(0), table.unsqueeze(0), weight.unsqueeze(0)
    position, keep, bias = (None if x is None else x.unsqueeze(0) for x in (position, keep, bias))
    x, h = forward(tokens, table, position, keep, p, weight, bias, eps, dtype)
    return x.squeeze(0), h.squeeze(0)


@torch.library.custom_op("mixassay::embedding", mutates_args=())
def forward(
    tokens: Tensor,
    table: Tensor,
    position: Tensor | None,
    keep: Tensor | None,
    p: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """tokens [M, B, T], table [M, V, D], position [M, T, D], keep [M, B, T, D], weight and bias [M, D] of M members."""
    with on_device(table):
        return triton.forward(tokens, table, position, keep, p, weight, bias, eps, dtype)


@torch.library.custom_op("mixassay::embedding_backward", mutates_args=())
def backward(
    x: Tensor,
    tokens: Tensor,
    keep: Tensor | None,
    p: float,
    weight: Tensor,
    bias: Tensor | None,
    dx: Tensor | None,
    dh: Tensor,
    V: int,
    eps: float,
    positioned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with on_device(x):
        dtable, *others = triton.backward(x, tokens, keep, p, weight, bias, dx, dh, V, eps, positioned)
    dposition, dweight, dbias = (nothing(x) if v is None else v for v in others)
    return dtable, dposition, dweight, dbias


@forward.register_fake
def _(tokens: Tensor, table: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    shape = (*tokens.shape, table.shape[-1])
    return table.new_empty(shape), table.new_empty(shape, dtype=others[-1])


@backward.register_fake
def _(
    x: Tensor,
    tokens: Tensor,
    keep: Tensor | None,
    p: float,
    weight: Tensor,
    bias: Tensor | None,
    dx: Tensor | None,
    dh: Tensor,
    V: int,
    eps: float,
    positioned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    M, _, T, D = x.shape
    dweight, dbias = (nothing(x) if v is None else v.new_empty(v.shape) for v in (weight, bias))
    dposition = x.new_empty((M, T, D)) if positioned else nothing(x)
    return x.new_empty((M, V, D)), dposition, dweight, dbias


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tokens, table, position, keep, ctx.p, weight, bias, ctx.eps, _ = inputs
    ctx.V, ctx.positioned = table.shape[-2], position is not None
    ctx.save_for_backward(output[0], tokens, keep, weight, bias)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dx: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    x, tokens, keep, weight, bias = ctx.saved_tensors
    dh = torch.zeros_like(x) if dh is None else dh
    given = x, tokens, keep, ctx.p, weight, bias, dx, dh, ctx.V, ctx.eps, ctx.positioned
    dtable, dposition, dweight, dbias = map(present, backward(*given))
    return None, dtable, dposition, None, None, dweight, dbias, None, None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward)
