"""States of the log-linear operators, composed around forms that know none.

The tokens are cut into dyadic pieces: [5, 25) is [5, 6) [6, 8) [8, 16) [16, 24) [24, 25). Within a piece the levels are
those of a sequence that starts there, so its tokens read each other as the form without a state says. And all of them
see a given token before the piece at the same level: after the merge for the first of them, every one reads slot l with
level l's weight. What a piece does to the slots, decay or overwrite, is what the parent operator, which has one state,
does to it: the slots are the state of one call of it, side by side as columns of values.

The last token is a piece of its own, because slots are kept as the last token sees them.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mixassay.kernels import resolve
from mixassay.kernels.common.fenwick import FenwickState, empty_state, merge, past
from mixassay.kernels.common.precision import accumulator, no_autocast
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.sequences import check_sequences, wide_heads
from mixassay.kernels.common.shapes import Axes

Tokens = dict[str, Any]
"""q, k, v, level_scale and the gates by name, each [B, T, ...] or None."""


class Forms(NamedTuple):
    """Implementations of an operator, called with its tokens by name."""

    definition: Callable[..., tuple[Tensor, FenwickState]]
    """(**tokens, initial_state)"""
    core: Callable[..., Tensor]
    """(**tokens), from an empty state"""
    parent: Callable[..., tuple[Tensor, Any]]
    """(**tokens without level_scale, initial_state [B, H, K, V]) with one state, unweighted; returns the final one"""


class Operator(NamedTuple):
    """A log-linear operator as `serve` needs it. Each is called with the tokens by name."""

    name: str
    definition: Callable[..., tuple[Tensor, FenwickState]]
    """(**tokens, scale, initial_state)"""
    chunked: Callable[..., Tensor]
    """(**tokens, scale, chunk_size)"""
    triton: Callable[..., Tensor]
    """(**tokens, scale, cu_seqlens)"""
    parent: Callable[..., tuple[Tensor, Any]]
    """The public function of the operator with one state."""


def serve(
    op: Operator,
    tokens: Tokens,
    scale: float | None,
    initial_state: FenwickState | None,
    output_final_state: bool,
    chunk_size: int | None,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, FenwickState | None]:
    """A call of the public function: its checks, its backend, and states around the forms that know none."""
    axes, (q, k, v) = Axes(op.name), (tokens[name] for name in "qkv")
    others = {n: (x, "BTHL" if n == "level_scale" else "BTH") for n, x in tokens.items() if n not in ("q", "k", "v")}
    check_sequences(axes, q, k, v, others, None, chunk_size, cu_seqlens)
    axes.check_positive("L", tokens["level_scale"].shape[-1])
    if initial_state is not None:
        check_state(axes, initial_state, "B" if cu_seqlens is None else "N")
    against = against_triton(*tokens.values(), initial_state and initial_state.slots) or wide_heads(q, v)
    chosen = resolve(op.name, backend, against_triton=against)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if chosen == "triton" and initial_state is None and not output_final_state:
        return op.triton(**tokens, scale=scale, cu_seqlens=cu_seqlens), None
    forms = Forms(
        definition=partial(op.definition, scale=scale),
        core=partial(op.triton, scale=scale, cu_seqlens=None)
        if chosen == "triton"
        else partial(op.chunked, scale=scale, chunk_size=chunk_size),
        parent=partial(
            op.parent,
            scale=scale,
            chunk_size=chunk_size,
            output_final_state=True,
            # With the slots beside them, values may be too wide for the parent's kernels.
            backend="auto" if chosen == "triton" else chosen,
        ),
    )
    return run(forms, tokens, initial_state, output_final_state, cu_seqlens, chosen == "reference")


def check_state(axes: Axes, state: FenwickState, rows: str) -> None:
    """`rows` is "B", or "N" for packed sequences."""
    slots, position = state
    axes.check("the state's slots", slots, f"{rows}HLKV")
    if position.shape != slots.shape[:1] or position.dtype != torch.int64:
        axes.fail(
            f"the state's position has shape {list(position.shape)} and dtype {position.dtype}, "
            f"expected int64 [{rows}] = [{len(slots)}]"
        )


def run(
    forms: Forms,
    tokens: Tokens,
    state: FenwickState | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    by_definition: bool,
) -> tuple[Tensor, FenwickState | None]:
    """o in v's dtype and the final state. All is computed in the accumulator's dtype."""
    q, v, L = tokens["q"], tokens["v"], tokens["level_scale"].shape[-1]
    dtype = accumulator(*tokens.values(), None if state is None else state.slots)
    tokens = {n: None if x is None else x.to(dtype) for n, x in tokens.items()}
    if state is not None:
        state = FenwickState(state.slots.to(dtype), state.position)
    elif output_final_state:
        N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = empty_state(tokens["v"], N, v.shape[2], L, q.shape[-1], v.shape[-1])

    def form(tokens: Tokens, state: FenwickState | None) -> tuple[Tensor, FenwickState | None]:
        if by_definition:
            return forms.definition(**tokens, initial_state=state)
        return (forms.core(**tokens), None) if state is None else _batch(forms, tokens, state)

    with no_autocast(q):
        o, state = form(tokens, state) if cu_seqlens is None else _packed(form, tokens, state, cu_seqlens)
    return o.to(v.dtype), state if output_final_state else None


def _packed(
    form: Callable[..., tuple[Tensor, Any]], tokens: Tokens, state: FenwickState | None, cu_seqlens: Tensor
) -> tuple[Tensor, FenwickState | None]:
    """One sequence after the other; an empty one hands on its state."""
    os, states = [], []
    for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        last = None if state is None else FenwickState(*(x[n : n + 1] for x in state))
        if end > begin:
            o, last = form(_span(tokens, begin, end), last)
            os.append(o)
        states.append(last)
    final = None if state is None else FenwickState(*(torch.cat(xs) for xs in zip(*states, strict=True)))
    return torch.cat(os, dim=1), final


def _batch(forms: Forms, tokens: Tokens, state: FenwickState) -> tuple[Tensor, FenwickState]:
    """The rows at one position together, one position after the other."""
    positions: list[int] = state.position.tolist()
    parts, order = [], []
    for p in sorted(set(positions)):
        rows = [row for row, at in enumerate(positions) if at == p]
        theirs = {n: None if x is None else x[rows] for n, x in tokens.items()}
        parts.append(_advance(forms, theirs, state.slots[rows], p))
        order += rows
    back = sorted(range(len(order)), key=order.__getitem__)
    o, slots = (torch.cat(xs)[back] for xs in zip(*parts, strict=True))
    return o, FenwickState(slots, state.position + o.shape[1])


def _advance(forms: Forms, tokens: Tokens, slots: Tensor, position: int) -> tuple[Tensor, Tensor]:
    os = []
    for begin, end in _pieces(position, position + tokens["v"].shape[1]):
        slots = merge(slots, torch.full((1,), begin, device=slots.device))
        now = _span(tokens, begin - position, end - position)
        o, slots = _piece(forms, now, slots, past(begin, slots.shape[2]))
        os.append(o)
    return torch.cat(os, dim=1), slots


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """[begin, end - 1) in as few aligned powers of two as there are, and the last token."""
    while begin < end - 1:
        length = 1 << (end - 1 - begin).bit_length() - 1
        if begin:
            length = min(length, begin & -begin)
        yield begin, begin + length
        begin += length
    yield end - 1, end


def _piece(forms: Forms, tokens: Tokens, slots: Tensor, levels: list[int]) -> tuple[Tensor, Tensor]:
    """`levels` are those of the slots [B, H, L, K, V] that hold tokens. The piece's own tokens go to slot 0."""
    v, level_scale = tokens["v"], tokens["level_scale"]
    V = v.shape[-1]
    given = {n: x for n, x in tokens.items() if n != "level_scale"} | {"v": pad(v, (0, len(levels) * V))}
    before = slots[:, :, levels].movedim(2, 3).flatten(3)  # [B, H, K, slots V]
    read, final = forms.parent(**given, initial_state=pad(before, (V, 0)))
    _, *reads = torch.split(read, V, dim=-1)
    own, *kept = torch.split(final, V, dim=-1)
    o = forms.core(**tokens)
    after = [own] + [torch.zeros_like(own)] * (slots.shape[2] - 1)
    for level, y, S in zip(levels, reads, kept, strict=True):
        o = o + level_scale[..., level, None] * y
        after[level] = after[level] + S
    return o, torch.stack(after, dim=2)


def _span(tokens: Tokens, begin: int, end: int) -> Tokens:
    return {n: None if x is None else x[:, begin:end] for n, x in tokens.items()}
