"""What tiles read of the tree, in Triton: outputs, and the gradients of queries and weights.

Tile n reads, from its own start back, the largest node that ends there and lies within one slot, or, where not even a
tile does, that tile's pairs, as it does its own (`weights_triton.py`). With S the state of a node and, for the tile's
tokens t,

    w[t] = rank_scale[t, rank of the node's slot at t] e^{decay from the node's end to t}

each node gives

    o_t += scale w[t] S^T q_t          drank_scale[t, rank] += scale e^{decay} q_t^T S do_t
    dq_t += scale w[t] S do_t

Sums of each rank come from running sums over the tokens: what lies up to the start of a slot, less what lies up to that
of the next older one.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import weight
from mixassay.kernels.dla.heads_triton import load_heads, store_heads
from mixassay.kernels.dla.slot_states_triton import dot, state_at
from mixassay.kernels.dla.tree_triton import decay_since, kernel, share
from mixassay.kernels.dla.weights_triton import (
    by_rank,
    by_slot,
    inner_starts,
    rank_of,
    up_to_starts,
    weighed,
    weight_at,
)


@triton.jit
def _node(begin, p, NT, HEIGHTS, C: tl.constexpr):
    """Height (-1: not even a tile) and place in the tree of the largest node that ends with tile p - 1 and lies within
    the slot that begins at token `begin`."""
    h = tl.full([], -1, dtype=tl.int32)
    offset = tl.zeros([], dtype=tl.int32)
    if (p - 1) * C >= begin:
        h += 1
        while (h + 1 < HEIGHTS) & ((p >> h) & 1 == 0) & ((p - (2 << h)) * C >= begin):
            offset += NT >> h
            h += 1
    return h, offset + (p >> tl.maximum(h, 0)) - 1


@triton.jit
def _older(end, starts, row, h, n, NT, H, HEIGHTS, SLOTS: tl.constexpr, BS: tl.constexpr, C: tl.constexpr):
    """What tile n, whose first row this is, reads of the tokens before `end`: the node (-1: a tile's pairs), and the
    first token that it has."""
    r = tl.arange(0, BS)
    begins = tl.load(starts + (row * H + h) * SLOTS + r, mask=r < SLOTS, other=0)
    node = tl.full([], -1, dtype=tl.int32)
    begin = (end - 1) // C * C
    # The reduction stands outside of the condition: inside, ptxas 12.8 let another predicate than that decide.
    start = tl.max(tl.where(begins < end, begins, 0))
    if end <= n * C:
        height, place = _node(start, end // C, NT, HEIGHTS, C)
        if height >= 0:
            node = place
            begin = end - (C << height)
    return node, begin


@triton.jit
def _load_node(tree, head, node, SPACE, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    at, keep = state_at(K, V, BK, BV)
    return tl.load(tree + (head * SPACE + node) * K * V + at, mask=keep, other=0.0)


@triton.jit
def _queries(q, starts, first, h, n, T, H, R, K: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr, BS: tl.constexpr,
             C: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Of tile n of a sequence: its first row, the tokens from there on and their numbers, where their slots start, by
    rank, and their queries."""
    row = first + n * C
    left = T - n * C
    i = tl.arange(0, C)
    r = tl.arange(0, BS)
    st = by_rank(starts, row, h, i[:, None], left, r[None, :], H, SLOTS)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    return row, left, i, st, qs


@triton.jit
def _decayed(A, to, G, P, head, n, p, T, NT, C: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr):
    """A [t, j] of tiles n and p times e^{G_t - G_j} for j <= t, else 0; `to` is what G has of tile n."""
    t = n * C + tl.arange(0, C)
    j = p * C + tl.arange(0, C)
    if DECAY:
        since = (tl.load(P + head * (NT + 1) + n) - tl.load(P + head * (NT + 1) + p)).to(to.dtype)
        since -= tl.load(G + head * T + j, mask=j < T, other=0.0)
        A *= weight(to[:, None] + since[None, :], ACC)
    return tl.where(t[:, None] >= j[None, :], A, 0.0)


@kernel
def tree_output_kernel(
    q,
    k,
    v,
    rank_scale,  # [B, T, H, SLOTS]
    starts,
    until,  # [B, T, H]
    G,
    P,  # [B H, NT + 1]: log decay before each tile, float64
    news,
    tree,
    o,
    scale,
    T,
    NT,
    H,
    R,
    ROOM,
    SPACE,
    HEIGHTS,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    head, b, h, part, last, parts = share(NT, news, H, NT, ROOM)
    first = b * T
    for n in range(part, last, parts):
        row, left, i, st, qs = _queries(q, starts, first, h, n, T, H, R, K, BK, SLOTS, BS, C, DOT)
        to = tl.zeros([C], dtype=ACC)
        if DECAY:
            to = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
        out = tl.zeros([C, BV], dtype=ACC)
        end = (n + 1) * C
        while end > 0:
            node, begin = _older(end, starts, row, h, n, NT, H, HEIGHTS, SLOTS, BS, C)
            if node >= 0:
                w = weight_at(rank_of(end - 1, st, 1), rank_scale, row, h, i, left, H, SLOTS)
                S = _load_node(tree, head, node, SPACE, K, V, BK, BV)
                if DECAY:
                    w *= weight(decay_since(end, n, P, head, NT, C, to.dtype) + to, ACC)
                out += tl.dot(qs, S.to(DOT), input_precision=PREC, out_dtype=ACC) * w[:, None]
            else:
                p = begin // C
                ks = load_heads(k, first + p * C, h // R, i, T - p * C, H // R, K, BK).to(DOT)
                A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
                A = _decayed(A, to, G, P, head, n, p, T, NT, C, DECAY, ACC)
                opened = inner_starts(until, first + p * C, h, i, T - p * C, H)
                AM = weighed(A, st, rank_scale, opened, row, h, left, n * C, p * C, H, C, BS, SLOTS)
                vs = load_heads(v, first + p * C, h, i, T - p * C, H, V, BV).to(DOT)
                out = tl.dot(AM.to(DOT), vs, acc=out, input_precision=PREC, out_dtype=ACC)
            end = begin
        store_heads(o, out * scale, row, h, i, left, H, V, BV)


@kernel
def tree_query_kernel(
    q,
    k,
    v,
    rank_scale,
    starts,
    until,
    G,
    P,
    news,
    tree,
    do,
    dq,  # [B, T, H, K]
    drank_scale,
    scale,
    T,
    NT,
    H,
    R,
    ROOM,
    SPACE,
    HEIGHTS,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    TWICE: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    head, b, h, part, last, parts = share(NT, news, H, NT, ROOM)
    first = b * T
    for n in range(part, last, parts):
        row, left, i, st, qs = _queries(q, starts, first, h, n, T, H, R, K, BK, SLOTS, BS, C, DOT)
        dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
        to = tl.zeros([C], dtype=ACC)
        if DECAY:
            to = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
        dqs = tl.zeros([C, BK], dtype=ACC)
        before = tl.zeros([C, BS], dtype=ACC)  # sums of F up to where each slot starts, and of all tokens
        total = tl.zeros([C], dtype=ACC)
        end = (n + 1) * C
        while end > 0:
            node, begin = _older(end, starts, row, h, n, NT, H, HEIGHTS, SLOTS, BS, C)
            if node >= 0:
                w = weight_at(rank_of(end - 1, st, 1), rank_scale, row, h, i, left, H, SLOTS)
                S = _load_node(tree, head, node, SPACE, K, V, BK, BV)
                x = dot(dos, tl.trans(S), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC)
                if DECAY:
                    x *= weight(decay_since(end, n, P, head, NT, C, to.dtype) + to, ACC)[:, None]
                dqs += x * w[:, None]
                read = tl.sum(x * qs.to(ACC), 1)
                before += tl.where(st >= end, read[:, None], 0.0)
                total += read
            else:
                p = begin // C
                ks = load_heads(k, first + p * C, h // R, i, T - p * C, H // R, K, BK).to(DOT)
                vs = load_heads(v, first + p * C, h, i, T - p * C, H, V, BV).to(DOT)
                dA = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC)
                dA = _decayed(dA, to, G, P, head, n, p, T, NT, C, DECAY, ACC)
                F = dA * tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
                opened = inner_starts(until, first + p * C, h, i, T - p * C, H)
                total += tl.sum(F, 1)
                before += up_to_starts(F, st, opened, n * C, p * C, C)
                dAM = weighed(dA, st, rank_scale, opened, row, h, left, n * C, p * C, H, C, BS, SLOTS)
                dqs = tl.dot(dAM.to(DOT), ks, acc=dqs, input_precision=PREC, out_dtype=ACC)
            end = begin
        store_heads(dq, dqs * scale, row, h, i, left, H, K, BK)
        store_heads(drank_scale, by_slot(before, total, C, BS) * scale, row, h, i, left, H, SLOTS, BS)
