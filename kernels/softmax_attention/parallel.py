"""All tokens at once, through torch's own attention, which on CPU beats explicit matrices at all lengths tried.

Under `torch.func.vmap` torch has no batching rule for it on CPU and would loop and warn. A stack of models is only a
larger batch, so here it is folded into one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    if torch._C._are_functorch_transforms_active():
        o: Tensor = _Foldable.apply(q, k, v, scale, window)  # type: ignore[no-untyped-call]
        return o
    return _attend(q, k, v, scale, window)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    near = None if window is None or window >= q.shape[1] else ~_hidden(q, window)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H or G, T, .]
    grouped = k.shape[1] != q.shape[1]
    o = scaled_dot_product_attention(q, k, v, near, is_causal=near is None, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)


def _hidden(q: Tensor, window: int | None) -> Tensor:
    """[T, T], True where row i must not see column j."""
    T = q.shape[1]
    every = torch.ones(T, T, dtype=torch.bool, device=q.device)
    return every.triu(1) if window is None else every.triu(1) | every.tril(-window)


class _Foldable(torch.autograd.Function):
    """Attention that knows its batching rule. `backward` serves `torch.func.grad` alone: with an ordinary backward
    pass after `vmap`, autograd sees the folded attention of the rule."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        return _attend(q, k, v, scale, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale, ctx.window = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        (do,) = grad_outputs
        G = k.shape[2]
        q, do = (x.reshape(*x.shape[:2], G, -1, x.shape[-1]) for x in (q, do))  # [B, T, G, H/G, .]
        scores = ctx.scale * torch.einsum("bigrk,bjgk->bgrij", q, k)
        P = scores.masked_fill(_hidden(q, ctx.window), -torch.inf).softmax(-1)
        dP = torch.einsum("bigrv,bjgv->bgrij", do, v)
        dS = ctx.scale * P * (dP - (P * dP).sum(-1, keepdim=True))
        dq = torch.einsum("bgrij,bjgk->bigrk", dS, k).flatten(2, 3)
        dk = torch.einsum("bgrij,bigrk->bjgk", dS, q)
        dv = torch.einsum("bgrij,bigrv->bjgv", P, do)
        return dq, dk, dv, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        M = info.batch_size
        *tensors, scale, window = args
        q, k, v = (
            (x.expand(M, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
            for x, dim in zip(tensors, in_dims, strict=False)
        )
        o = softmax_attention(q, k, v, scale, window)
        return o.reshape(M, -1, *o.shape[1:]), 0
