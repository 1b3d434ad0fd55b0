"""The arguments that the operators over sequences share: their checks, and packed sequences for the torch forms."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from mixassay.kernels.common.shapes import Axes

WIDEST = 256  # head sizes, K and V, that the Triton kernels were built and tested for


def check_sequences(
    axes: Axes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: dict[str, tuple[Tensor | None, str]],
    initial_state: Tensor | None,
    chunk_size: int | None,
    cu_seqlens: Tensor | None,
) -> None:
    """q, k [B, T, G, K] and v [B, T, H, V], `others` by name with their axes, initial_state [B, H, K, V]; with packed
    sequences B is 1 and initial_state has one row for each of them."""
    axes.check("q", q, "BTGK")
    axes.check("k", k, "BTGK")
    axes.check("v", v, "BTHV")
    for name, (x, letters) in others.items():
        if x is not None:
            axes.check(name, x, letters)
    if cu_seqlens is not None:
        check_packed(axes, cu_seqlens, "q", q)
    if initial_state is not None:
        axes.check("initial_state", initial_state, "BHKV" if cu_seqlens is None else "NHKV")
    axes.check_groups("q", "v")
    axes.check_positive("T", q.shape[1])
    axes.check_positive("chunk_size", chunk_size)


def check_packed(axes: Axes, cu_seqlens: Tensor, name: str, x: Tensor) -> None:
    """N sequences in the one row of x [1, T, ...]. On a GPU the values are checked there, without waiting: a wrong one
    ends the program at the next wait."""
    B, T = x.shape[:2]
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype != torch.int64:
        axes.fail(f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, expected int64 [N + 1]")
    if cu_seqlens.device != x.device:
        axes.fail(f"cu_seqlens is on {cu_seqlens.device}, expected {x.device}, where {name} is")
    if B != 1:
        axes.fail(f"{name} has B = {B} rows, expected 1: with cu_seqlens all sequences lie in one row, in turn")
    axes.size["N"] = len(cu_seqlens) - 1
    if cu_seqlens.is_meta:
        return
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == T) & (cu_seqlens.diff() >= 0).all()
    if cu_seqlens.is_cuda:
        torch.ops.aten._assert_async.msg(right, f"{axes.op}: cu_seqlens must start at 0, never fall and end at T = {T}")
    elif not right:
        axes.fail(f"cu_seqlens is {cu_seqlens.tolist()}, expected to start at 0, never to fall and to end at T = {T}")


def each_sequence(
    form: Callable[..., tuple[Tensor, Tensor | None]],
    cu_seqlens: Tensor | None,
    tokens: tuple[Tensor | None, ...],
    state: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`form(*tokens, state) -> o, state` on one packed sequence after the other, tokens being q, k, v and more. An
    empty sequence hands on its state. Without `cu_seqlens` all is one call."""
    if cu_seqlens is None:
        return form(*tokens, state)
    os, states = [], []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        last: Tensor | None = None if state is None else state[n : n + 1]
        if end > begin:
            o, last = form(*(None if x is None else x[:, begin:end] for x in tokens), last)
            os.append(o)
        elif last is None:
            q, _, v, *_ = tokens
            assert q is not None
            assert v is not None
            last = v.new_zeros(1, v.shape[2], q.shape[3], v.shape[3])
        states.append(last)
    kept = [x for x in states if x is not None]
    return torch.cat(os, dim=1), torch.cat(kept) if len(kept) == len(states) else None


def wide_heads(q: Tensor, v: Tensor) -> str | None:
    """Why Triton kernels cannot serve heads of these sizes, or None."""
    K, V = q.shape[-1], v.shape[-1]
    return f"its heads are K = {K} and V = {V} wide, more than {WIDEST}" if max(K, V) > WIDEST else None
