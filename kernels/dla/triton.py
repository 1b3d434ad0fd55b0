"""Dynamic linear attention on bases with a scalar decay, in Triton: long sequences, forward and backward.

Tokens are cut into tiles of C. With s the scale, G the inclusive cumulative log decay, D[t, j] = e^{G_t - G_j} for
j <= t (else 0), M[t, j] = rank_scale[t, rank of j at t] the mask and F = s (Q K^T) . (dO V^T) . D:

    A  = s (Q K^T) . D . M            O  = A V
    dA = s (dO V^T) . D . M           dQ = dA K     dK = dA^T Q     dV = A^T dO
    drank_scale[t, r] = sum of F[t, j] over the tokens j of rank r at t
    dlog_decay_i = sum of u_t over t >= i,   u = row sums less column sums of F . M
    dgate_i = the same of F . up (no boundary at i) or F . down (one at i): straight_through.py

Up to 1024 tokens all pairs of tiles are computed (`pairs_triton.py`). Beyond, tile n has pairs with itself only, and
reads each slot that its first token finds before it as one state, wherever in a tile the slot begins: most are what the
tile before found too (`slot_states_triton.py`). Slots that meet within the tile are two states with one weight. Who
reads a state is one run of tiles, and its gradient one sum over them.

A head with so many boundaries that there is no room for its states takes a tree instead. Slots only ever meet, so tiles
that lie in one slot once do so for good. A binary tree has the states of 2^h tiles side by side; tile n reads, from its
own start back, the largest node that ends there and lies within one slot, or, where not even a tile does, that tile's
pairs (`weights_triton.py`). Who reads a node is again one run of tiles: from the first that finds it in one slot
(`span_kernel`) to the last that does not find its parent so. A tile's gradient is the sum over the nodes that it is
part of.

The two sides of u are sums over differently made states, and cancel: where u is wanted, products with states are of two
bfloat16 parts, high and low, so that both sides hold the same numbers.

A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import (
    half,
    load_log_decay,
    operands,
    sum_dtype,
    tile,
    weight,
)
from mixassay.kernels.dla import pairs_triton
from mixassay.kernels.dla.heads_triton import load_heads, store_heads
from mixassay.kernels.dla.mask_triton import sums
from mixassay.kernels.dla.slot_reads_triton import (
    pull_kernel,
    push_kernel,
    rank_kernel,
    read_kernel,
    tile_of,
    weight_kernel,
)
from mixassay.kernels.dla.slot_states_triton import (
    BEGIN,
    END,
    FIELDS,
    FIRST,
    STOP,
    decay_to,
    dot,
    field,
    find_kernel,
    fits,
    join_kernel,
    own_kernel,
    state_at,
)
from mixassay.kernels.dla.weights_triton import (
    by_rank,
    by_slot,
    inner,
    inner_starts,
    pick,
    rank_of,
    ranks,
    up_to_starts,
    weighed,
    weight_at,
    weights_at,
)

# Compiled once, whatever the sizes.
kernel = triton.jit(do_not_specialize=["T", "NT", "H", "R", "N", "NODES", "HEIGHT", "ROOM", "SPACE"])


@kernel
def decay_kernel(log_decay, G, totals, T, NT, H, C: tl.constexpr, SUM: tl.constexpr):
    """G [B H, T] from the start of each tile, and whole tiles [B H, NT]; base 2."""
    head, b, h, n = tile_of(H, NT)
    i = tl.arange(0, C)
    left = T - n * C
    g = load_log_decay(log_decay + (b * T + n * C) * H + h, i, left, H, SUM)
    tl.store(G + head * T + n * C + i, tl.cumsum(g), mask=i < left)
    tl.store(totals + head * NT + n, tl.sum(g))


@kernel
def leaf_kernel(
    k,
    v,
    G,
    P,
    news,
    tree,  # [B H, SPACE, K, V]
    T,
    NT,
    H,
    R,
    ROOM,
    SPACE,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    TWICE: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """A tile's own state at its end."""
    head, b, h, n = tile_of(H, NT)
    if not fits(news, head, NT, ROOM):
        row = b * T + n * C
        left = T - n * C
        i = tl.arange(0, C)
        ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
        vs = load_heads(v, row, h, i, left, H, V, BV).to(ACC)
        if DECAY:
            at_P = P + head * (NT + 1) + n
            total = tl.load(at_P + 1) - tl.load(at_P)
            Gs = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
            vs *= weight(total.to(Gs.dtype) - Gs, ACC)[:, None]
        S = dot(tl.trans(ks), vs, tl.zeros([BK, BV], dtype=ACC), TWICE, DOT, ACC, PREC)
        at, keep = state_at(K, V, BK, BV)
        tl.store(tree + (head * SPACE + n) * K * V + at, S, mask=keep)


@kernel
def up_kernel(
    tree,
    P,
    news,
    NT,
    HEIGHT,
    below,
    here,
    ROOM,
    SPACE,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
):
    """The nodes of 2^HEIGHT tiles; `below` and `here` are where the nodes of a height begin."""
    count = NT >> HEIGHT
    index = tl.program_id(0).to(tl.int64)
    block, index = index % tl.cdiv(SIZE, BLOCK), index // tl.cdiv(SIZE, BLOCK)
    head, node = index // count, index % count
    at = block * BLOCK + tl.arange(0, BLOCK)
    keep = at < SIZE
    if not fits(news, head, NT, ROOM):
        child = tree + (head * SPACE + below + 2 * node) * SIZE + at
        S = tl.load(child, mask=keep, other=0.0)
        if DECAY:
            at_P = P + head * (NT + 1) + (2 * node + 1 << HEIGHT - 1)
            S *= weight(tl.load(at_P + (1 << HEIGHT - 1)) - tl.load(at_P), S.dtype)
        S += tl.load(child + SIZE, mask=keep, other=0.0)
        tl.store(tree + (head * SPACE + here + node) * SIZE + at, S, mask=keep)


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
def _older(end, begins, n, NT, HEIGHTS, C: tl.constexpr):
    """What tile n reads of the tokens before `end`: the node (-1: a tile's pairs), and the first token that it has.
    `begins` are the slots that the tile's first token finds."""
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
def _rows(filled, n, T, C: tl.constexpr, TREE: tl.constexpr):
    """How many rows of tile n a kernel for one way of reading has: none of a head that takes the other way."""
    mine = (filled == 0) if TREE else filled
    return tl.where(mine, T - n * C, 0)


@triton.jit
def _since(end, n, G, P, head, T, NT, C: tl.constexpr, SUM: tl.constexpr):
    """Log decay from token `end` to tile n."""
    return (tl.load(P + head * (NT + 1) + n) - decay_to(end, G, P, head, T, NT, C)).to(SUM)


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


@triton.jit
def _read_pairs(
    out, qs, st, to, k, v, rank_scale, until, G, P, head, b, h, n, p, left, T, NT, H, R,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SLOTS: tl.constexpr, BS: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """out of tile n and what its tokens, of which there are `left`, read of those of tile p."""
    i = tl.arange(0, C)
    there = b * T + p * C
    ks = load_heads(k, there, h // R, i, T - p * C, H // R, K, BK).to(DOT)
    A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
    A = _decayed(A, to, G, P, head, n, p, T, NT, C, DECAY, ACC)
    opened = inner_starts(until, there, h, i, T - p * C, H)
    AM = weighed(A, st, rank_scale, opened, b * T + n * C, h, left, n * C, p * C, H, C, BS, SLOTS)
    vs = load_heads(v, there, h, i, T - p * C, H, V, BV).to(DOT)
    return tl.dot(AM.to(DOT), vs, acc=out, input_precision=PREC, out_dtype=ACC)


@kernel
def output_kernel(
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
    past,
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
    TREE: tl.constexpr,
):
    head, b, h, n = tile_of(H, NT)
    first = b * T
    row = first + n * C
    left = _rows(fits(news, head, NT, ROOM), n, T, C, TREE)
    i = tl.arange(0, C)
    r = tl.arange(0, BS)
    st = by_rank(starts, row, h, i[:, None], left, r[None, :], H, SLOTS)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    to = tl.zeros([C], dtype=ACC)
    if DECAY:
        to = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
    out = tl.zeros([C, BV], dtype=ACC)
    if not TREE:
        out = _read_pairs(
            out, qs, st, to, k, v, rank_scale, until, G, P, head, b, h, n, n, left, T, NT, H, R,
            K, V, BK, BV, SLOTS, BS, C, DECAY, DOT, ACC, PREC,
        )  # fmt: skip
        out += load_heads(past, row, h, i, left, H, V, BV)
    else:
        end = tl.where(left > 0, (n + 1) * C, 0)
        while end > 0:
            begins = tl.load(starts + (row * H + h) * SLOTS + r, mask=r < SLOTS, other=0)
            node, begin = _older(end, begins, n, NT, HEIGHTS, C)
            if node >= 0:
                w = weight_at(rank_of(end - 1, st, 1), rank_scale, row, h, i, left, H, SLOTS)
                at, keep = state_at(K, V, BK, BV)
                S = tl.load(tree + (head * SPACE + node) * K * V + at, mask=keep, other=0.0)
                if DECAY:
                    w *= weight(_since(end, n, G, P, head, T, NT, C, to.dtype) + to, ACC)
                out += tl.dot(qs, S.to(DOT), input_precision=PREC, out_dtype=ACC) * w[:, None]
            else:
                out = _read_pairs(
                    out, qs, st, to, k, v, rank_scale, until, G, P, head, b, h, n, begin // C, left, T, NT, H, R,
                    K, V, BK, BV, SLOTS, BS, C, DECAY, DOT, ACC, PREC,
                )  # fmt: skip
            end = begin
    store_heads(o, out * scale, row, h, i, left, H, V, BV)


@kernel
def span_kernel(
    starts,
    spans,  # [B H, NODES]
    T,
    NT,
    H,
    NODES,
    HEIGHTS,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first tile that finds each node within one slot (NT: none does), by bisection."""
    index = tl.program_id(0).to(tl.int64)
    head, index = index // tl.cdiv(NODES, BLOCK), index % tl.cdiv(NODES, BLOCK)
    b, h = head // H, head % H
    r = tl.arange(0, BS)
    node = (index * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    height = tl.zeros([BLOCK], dtype=tl.int32)
    number = node
    offset = tl.zeros([], dtype=tl.int32)
    for m in range(1, HEIGHTS):
        offset += NT >> m - 1
        height = tl.where(node >= offset, m, height)
        number = tl.where(node >= offset, node - offset, number)
    low = number + 1 << height
    high = tl.zeros([BLOCK], dtype=tl.int32) + NT
    begin = (number << height) * C
    end = low * C
    step = NT
    while step > 0:
        middle = (low + high) // 2
        searched = low < high
        at = starts + ((b * T + middle.to(tl.int64) * C) * H + h) * SLOTS
        slots = tl.load(
            at[:, None] + r[None, :], mask=(searched & (node < NODES))[:, None] & (r < SLOTS)[None, :], other=0
        )
        cut = tl.sum(((slots > begin[:, None]) & (slots < end[:, None])).to(tl.int32), 1) > 0
        low = tl.where(searched & cut, middle + 1, low)
        high = tl.where(searched & (cut == 0), middle, high)
        step = step // 2
    tl.store(spans + head * NODES + node, low, mask=node < NODES)


@triton.jit
def _readers(spans, height, number, offset, NT, HEIGHTS):
    """The tiles that read a node, from the first to before the last, if it were for its parent."""
    stop = tl.full([], 0, dtype=tl.int32) + NT
    if (height + 1 < HEIGHTS) & ((number >> 1) < (NT >> height + 1)):
        stop = tl.load(spans + offset + (NT >> height) + (number >> 1))
    return tl.load(spans + offset + number), stop


@kernel
def node_kernel(
    q,
    do,
    rank_scale,
    starts,
    G,
    P,
    spans,
    news,
    dtree,  # [3 or 1, B H, SPACE, K, V]
    scale,
    T,
    NT,
    H,
    R,
    N,
    NODES,
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
    GATE: tl.constexpr,
    TWICE: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The gradient of a node by those who read it; with a gate, also what it were with weights up and down."""
    index = tl.program_id(0).to(tl.int64)
    head, node = index // NODES, NODES - 1 - (index % NODES).to(tl.int32)  # those that most tiles read come first
    b, h = head // H, head % H
    start = tl.zeros([], dtype=tl.int32)
    stop = tl.zeros([], dtype=tl.int32)
    end = tl.zeros([], dtype=tl.int32)
    if not fits(news, head, NT, ROOM):
        height = tl.zeros([], dtype=tl.int32)
        offset = tl.zeros([], dtype=tl.int32)
        while node - offset >= (NT >> height):
            offset += NT >> height
            height += 1
        number = node - offset
        start, stop = _readers(spans + head * NODES, height, number, offset, NT, HEIGHTS)
        end = (number + 1 << height) * C
    if start < stop:
        i = tl.arange(0, C)
        r = tl.arange(0, BS)
        dS = tl.zeros([BK, BV], dtype=ACC)
        if GATE:
            dS_up = tl.zeros([BK, BV], dtype=ACC)
            dS_down = tl.zeros([BK, BV], dtype=ACC)
        for n in range(start, stop):
            row = b * T + n * C
            left = T - n * C
            st = by_rank(starts, row, h, i[:, None], left, r[None, :], H, SLOTS)
            qs = tl.trans(load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT))
            dos = load_heads(do, row, h, i, left, H, V, BV).to(ACC)
            w, up, down = weights_at(rank_of(end - 1, st, 1), rank_scale, row, h, i, left, H, SLOTS)
            D = tl.zeros([C], dtype=ACC) + scale
            if DECAY:
                to = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
                D *= weight(_since(end, n, G, P, head, T, NT, C, to.dtype) + to, ACC)
            w, up, down = w * D, up * D, down * D
            dS = dot(qs, dos * w[:, None], dS, TWICE, DOT, ACC, PREC)
            if GATE:
                dS_up = dot(qs, dos * up[:, None], dS_up, TWICE, DOT, ACC, PREC)
                dS_down = dot(qs, dos * down[:, None], dS_down, TWICE, DOT, ACC, PREC)
        at, keep = state_at(K, V, BK, BV)
        at += dtree + (head * SPACE + node) * K * V
        tl.store(at, dS, mask=keep)
        if GATE:
            each = N.to(tl.int64) * SPACE * K * V
            tl.store(at + each, dS_up, mask=keep)
            tl.store(at + 2 * each, dS_down, mask=keep)


@triton.jit
def _pull_pairs(
    dqs, before, total, qs, dos, st, to, k, v, rank_scale, until, G, P, head, b, h, n, p, left, T, NT, H, R,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SLOTS: tl.constexpr, BS: tl.constexpr,
    C: tl.constexpr, DECAY: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradients of that: of q, and the sums of F up to where each slot starts and of all tokens."""
    i = tl.arange(0, C)
    there = b * T + p * C
    ks = load_heads(k, there, h // R, i, T - p * C, H // R, K, BK).to(DOT)
    vs = load_heads(v, there, h, i, T - p * C, H, V, BV).to(DOT)
    dA = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC)
    dA = _decayed(dA, to, G, P, head, n, p, T, NT, C, DECAY, ACC)
    F = dA * tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
    opened = inner_starts(until, there, h, i, T - p * C, H)
    total += tl.sum(F, 1)
    before += up_to_starts(F, st, opened, n * C, p * C, C)
    dAM = weighed(dA, st, rank_scale, opened, b * T + n * C, h, left, n * C, p * C, H, C, BS, SLOTS)
    return tl.dot(dAM.to(DOT), ks, acc=dqs, input_precision=PREC, out_dtype=ACC), before, total


@kernel
def query_kernel(
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
    past,
    do,
    dq,  # [B, T, H, K]
    drank_scale,  # but for the reads of states
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
    TREE: tl.constexpr,
):
    head, b, h, n = tile_of(H, NT)
    first = b * T
    row = first + n * C
    left = _rows(fits(news, head, NT, ROOM), n, T, C, TREE)
    i = tl.arange(0, C)
    r = tl.arange(0, BS)
    st = by_rank(starts, row, h, i[:, None], left, r[None, :], H, SLOTS)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
    to = tl.zeros([C], dtype=ACC)
    if DECAY:
        to = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
    dqs = tl.zeros([C, BK], dtype=ACC)
    before = tl.zeros([C, BS], dtype=ACC)  # sums of F up to where each slot starts, and of all tokens
    total = tl.zeros([C], dtype=ACC)
    if not TREE:
        dqs, before, total = _pull_pairs(
            dqs, before, total, qs, dos, st, to, k, v, rank_scale, until, G, P, head, b, h, n, n, left, T, NT, H, R,
            K, V, BK, BV, SLOTS, BS, C, DECAY, DOT, ACC, PREC,
        )  # fmt: skip
        dqs += load_heads(past, row, h, i, left, H, K, BK)
    else:
        end = tl.where(left > 0, (n + 1) * C, 0)
        while end > 0:
            begins = tl.load(starts + (row * H + h) * SLOTS + r, mask=r < SLOTS, other=0)
            node, begin = _older(end, begins, n, NT, HEIGHTS, C)
            if node >= 0:
                w = weight_at(rank_of(end - 1, st, 1), rank_scale, row, h, i, left, H, SLOTS)
                at, keep = state_at(K, V, BK, BV)
                S = tl.load(tree + (head * SPACE + node) * K * V + at, mask=keep, other=0.0)
                x = dot(dos, tl.trans(S), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC)
                if DECAY:
                    x *= weight(_since(end, n, G, P, head, T, NT, C, to.dtype) + to, ACC)[:, None]
                dqs += x * w[:, None]
                read = tl.sum(x * qs.to(ACC), 1)
                before += tl.where(st >= end, read[:, None], 0.0)
                total += read
            else:
                dqs, before, total = _pull_pairs(
                    dqs, before, total, qs, dos, st, to, k, v, rank_scale, until, G, P, head, b, h, n, begin // C, left,
                    T, NT, H, R, K, V, BK, BV, SLOTS, BS, C, DECAY, DOT, ACC, PREC,
                )  # fmt: skip
            end = begin
    store_heads(dq, dqs * scale, row, h, i, left, H, K, BK)
    store_heads(drank_scale, by_slot(before, total, C, BS) * scale, row, h, i, left, H, SLOTS, BS)


@kernel
def key_kernel(
    q,
    k,
    v,
    rank_scale,
    starts,
    until,
    G,
    P,
    spans,
    news,
    table,
    dtree,
    do,
    dk,  # [B, T, H, K]
    dv,
    u,  # row sums on entry, less column sums on return
    scale,
    T,
    NT,
    H,
    R,
    N,
    NODES,
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
    GATE: tl.constexpr,
    TWICE: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
    TREE: tl.constexpr,
):
    """For the tokens of tile m: tiles that read them one by one, then the nodes that they are part of."""
    index = tl.program_id(0).to(tl.int64)
    head, m = index // NT, (index % NT).to(tl.int32)
    b, h = head // H, head % H
    first = b * T
    i = tl.arange(0, C)
    j = m * C + i
    here = _rows(fits(news, head, NT, ROOM), m, T, C, TREE)
    r = tl.arange(0, BS)
    ks = load_heads(k, first + m * C, h // R, i, here, H // R, K, BK).to(DOT)
    vs = load_heads(v, first + m * C, h, i, here, H, V, BV).to(DOT)
    if DECAY:
        at_P = P + head * (NT + 1)
        since = tl.load(G + head * T + j, mask=i < here, other=0.0)
    opened = inner_starts(until, first + m * C, h, i, here, H)
    latest = tl.max(opened)
    dks = tl.zeros([C, BK], dtype=ACC)
    dvs = tl.zeros([C, BV], dtype=ACC)
    column = tl.zeros([C], dtype=ACC)
    column_up = tl.zeros([C], dtype=ACC)
    column_down = tl.zeros([C], dtype=ACC)
    stop = m + 1
    if TREE:
        stop = tl.load(spans + head * NODES + m, mask=here > 0, other=0)
    for n in range(m, stop):
        t = n * C + i
        left = T - n * C
        row = first + n * C
        qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
        dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
        A = tl.dot(ks, tl.trans(qs), input_precision=PREC, out_dtype=ACC) * scale  # [j, t]
        dA = tl.dot(vs, tl.trans(dos), input_precision=PREC, out_dtype=ACC)
        D = t[None, :] >= j[:, None]
        if DECAY:
            to = tl.load(G + head * T + t, mask=t < T, other=0.0)
            to += (tl.load(at_P + n) - tl.load(at_P + m)).to(to.dtype)
            D = tl.where(D, weight(to[None, :] - since[:, None], ACC), 0.0)
        else:
            D = D.to(ACC)
        dA *= D
        F = A * dA
        A *= D
        st = by_rank(starts, row, h, i[None, :], left, r[:, None], H, SLOTS)  # [r, t]
        W = by_rank(rank_scale, row, h, i[None, :], left, r[:, None], H, SLOTS)
        rank = rank_of(m * C, st, 0)
        place, several = inner(opened, n * C, C)
        if several:
            each = ranks(rank, opened, t, j, 0)
            M = tl.gather(W, each, 0)
            if GATE:
                column_up += tl.sum(F * (tl.gather(W, tl.minimum(each + 1, SLOTS - 1), 0) - M), 1)
                column_down += tl.sum(F * (M - tl.gather(W, tl.maximum(each - 1, 0), 0)), 1)
            if DECAY:
                column += tl.sum(F * M, 1)
            A *= M
            dA *= M
        else:
            w = pick(W, r[:, None], rank, 0)
            up = pick(W, r[:, None], tl.minimum(rank + 1, SLOTS - 1), 0) - w
            newer = pick(W, r[:, None], tl.maximum(rank - 1, 0), 0)
            open = latest > t
            within = i[:, None] >= place
            M = tl.where(within, tl.where(open, newer, w)[None, :], w[None, :])
            if GATE:
                newest = pick(W, r[:, None], tl.maximum(rank - 2, 0), 0)
                down = w - newer
                column_up += tl.sum(F * tl.where(within, tl.where(open, down, up)[None, :], up[None, :]), 1)
                step = tl.where(open, newer - newest, down)
                column_down += tl.sum(F * tl.where(within, step[None, :], down[None, :]), 1)
            if DECAY:
                column += tl.sum(F * M, 1)
            A *= M
            dA *= M
        dvs = tl.dot(A.to(DOT), dos, acc=dvs, input_precision=PREC, out_dtype=ACC)
        dks = tl.dot(dA.to(DOT), qs, acc=dks, input_precision=PREC, out_dtype=ACC)
    dks *= scale
    at, keep = state_at(K, V, BK, BV)
    dtree += head * SPACE * K * V
    more = N.to(tl.int64) * SPACE * K * V
    state = tl.zeros([], dtype=tl.int32)
    last = state + (here > 0)
    if not TREE:
        state = tl.load(news + head * (NT + 2) + m + 1)
        last = tl.load(news + head * (NT + 2) + m + 2, mask=here > 0, other=0)
    while state < last:  # states that have own tokens of this tile, or once all nodes that it is part of
        begin = m * C
        end = m * C + C
        if not TREE:
            begin = field(table, head, state, ROOM, BEGIN)
            end = field(table, head, state, ROOM, END)
        if end > m * C:
            if not TREE:
                x = dtree + state.to(tl.int64) * K * V + at
                dS = tl.load(x, mask=keep, other=0.0)
                if GATE:
                    dS_up = tl.load(x + more, mask=keep, other=0.0)
                    dS_down = tl.load(x + 2 * more, mask=keep, other=0.0)
            else:
                dS = tl.zeros([BK, BV], dtype=ACC)
                if GATE:
                    dS_up = tl.zeros([BK, BV], dtype=ACC)
                    dS_down = tl.zeros([BK, BV], dtype=ACC)
                offset = tl.zeros([], dtype=tl.int32)
                for height in range(0, HEIGHTS):
                    number = m >> height
                    if number < (NT >> height):
                        reads, stops = _readers(spans + head * NODES, height, number, offset, NT, HEIGHTS)
                        if reads < stops:
                            e = tl.full([], 1.0, dtype=ACC)
                            if DECAY:
                                e = weight(tl.load(at_P + (number + 1 << height)) - tl.load(at_P + m + 1), ACC)
                            x = dtree + (offset + number).to(tl.int64) * K * V + at
                            dS += tl.load(x, mask=keep, other=0.0) * e
                            if GATE:
                                dS_up += tl.load(x + more, mask=keep, other=0.0) * e
                                dS_down += tl.load(x + 2 * more, mask=keep, other=0.0) * e
                    offset += NT >> height
            e = tl.where((j >= begin) & (j < end), 1.0, 0.0).to(ACC)
            if DECAY:
                e *= weight((decay_to(end, G, P, head, T, NT, C) - tl.load(at_P + m)).to(since.dtype) - since, ACC)
            x = dot(vs, tl.trans(dS), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC) * e[:, None]
            dks += x
            dvs += tl.dot(ks, dS.to(DOT), input_precision=PREC, out_dtype=ACC) * e[:, None]
            column += tl.sum(x * ks.to(ACC), 1)
            if GATE:
                x = dot(vs, tl.trans(dS_up), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC)
                column_up += tl.sum(x * ks.to(ACC), 1) * e
                x = dot(vs, tl.trans(dS_down), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC)
                column_down += tl.sum(x * ks.to(ACC), 1) * e
        state += 1
    store_heads(dk, dks, first + m * C, h, i, here, H, K, BK)
    store_heads(dv, dvs, first + m * C, h, i, here, H, V, BV)
    if DECAY or GATE:
        at_u = u + head * T + j
    if DECAY:
        tl.store(at_u, tl.load(at_u, mask=i < here, other=0.0) - column, mask=i < here)
    if GATE:
        at_u += N.to(tl.int64) * T
        tl.store(at_u, tl.load(at_u, mask=i < here, other=0.0) - column_up, mask=i < here)
        at_u += N.to(tl.int64) * T
        tl.store(at_u, tl.load(at_u, mask=i < here, other=0.0) - column_down, mask=i < here)


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a tile
    dense: int  # tokens up to which all pairs are computed
    num_warps: int
    pull_warps: int  # of `query` and `key`, which hold most
    num_stages: int
    states: int  # of slots, for each tile, that a head has room for: if it has more, it takes the tree
    life: int = 256  # tiles that read one state at most


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if half(dtype):
        if max(K, V) <= 16:
            return Plan(32, 1024, 2, 2, 2, 3)
        return Plan(64, 1024, 4, 4, 2, 4) if max(K, V) <= 64 else Plan(64, 1024, 8, 8, 2, 4)
    exact = operands(dtype)[2] == "ieee"  # without tensor cores, whose tiles want more rows
    return Plan(16, 1024, 8, 8, 1, 2) if exact else Plan(32, 1024, 4, 4, 1, 3)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    starts: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    scale: float,
    how: Plan | None = None,
) -> Tensor:
    """o; rank_scale and log_decay in the accumulator's dtype or narrower, starts and until of the schedule."""
    how = how or plan(q.dtype, q.shape[3], v.shape[3])
    if q.shape[1] <= how.dense:
        return pairs_triton.forward(q, k, v, rank_scale, until, log_decay, scale)
    call = _Call(q, k, v, rank_scale, starts, until, log_decay, scale, how)
    tree, states = call.tree(False)
    weights = call.weights(None, GATE=False)
    o = torch.empty_like(call.v)
    past = torch.empty_like(o, dtype=call.acc)
    call.launch(read_kernel, call.tiles, states=states, weights=weights, past=past)
    for TREE in (False, True):
        call.launch(output_kernel, call.tiles, tree=tree, past=past, o=o, TREE=TREE)
    return o


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    starts: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    gated: bool,
    do: Tensor,
    scale: float,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, rank_scale, log_decay and, where there is one, of the boundaries' gate."""
    how = how or plan(q.dtype, q.shape[3], v.shape[3])
    if q.shape[1] <= how.dense:
        return pairs_triton.backward(q, k, v, rank_scale, until, log_decay, gated, do, scale)
    call = _Call(q, k, v, rank_scale, starts, until, log_decay, scale, how)
    do, decays = do.to(v.dtype).contiguous(), log_decay is not None
    wanted = {"GATE": gated, "TWICE": (gated or decays) and v.dtype == torch.bfloat16}
    alone = call.R == 1  # else the heads that share a key are added
    dq, dk = (call.new(call.B, call.T, call.H, call.K, dtype=q.dtype if alone else call.acc) for _ in range(2))
    dv, dweights = torch.empty_like(call.v), torch.empty_like(call.rank_scale)
    u = call.new(3 if gated else 1, call.N, call.T)
    tree, states = call.tree(wanted["TWICE"])
    turned = call.new(len(u), call.N, call.NT * call.given["SLOTS"], how.C)
    weights = call.weights(turned, **wanted)
    spans = call.new(call.N, call.nodes, dtype=torch.int32)
    call.launch(span_kernel, call.N * triton.cdiv(call.nodes, 64), spans=spans, BLOCK=64, num_warps=4)
    dtree = call.new(len(u), *tree.shape)
    call.launch(push_kernel, call.N * call.room, turned=turned, dtree=dtree, do=do, **wanted)
    call.launch(node_kernel, call.N * call.nodes, spans=spans, dtree=dtree, do=do, **wanted)
    call.join(dtree, None, True)
    reads, past = torch.empty_like(weights), torch.empty_like(dq, dtype=call.acc)
    call.launch(pull_kernel, call.tiles, states=states, weights=weights, past=past, reads=reads, do=do, **wanted)
    pull = wanted | {"num_warps": call.pull_warps}
    for TREE in (False, True):
        pull["TREE"] = TREE
        call.launch(query_kernel, call.tiles, tree=tree, past=past, do=do, dq=dq, drank_scale=dweights, **pull)
    call.launch(rank_kernel, call.tiles, reads=reads, drank_scale=dweights, u=u, **wanted)
    for TREE in (False, True):
        pull["TREE"] = TREE
        call.launch(key_kernel, call.tiles, spans=spans, dtree=dtree, do=do, dk=dk, dv=dv, u=u, **pull)
    dg, dgate = sums(u, None, call.log_decay, call.given["until"], gated)
    if not alone:
        dq, dk = (x.unflatten(2, (-1, call.R)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dweights, dg, dgate


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rank_scale: Tensor,
        starts: Tensor,
        until: Tensor,
        log_decay: Tensor | None,
        scale: float,
        how: Plan | None,
    ) -> None:
        (self.B, self.T, G, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        how = how or plan(q.dtype, self.K, self.V)
        self.q, self.k, self.v, self.scale = q.contiguous(), k.contiguous(), v.contiguous(), scale
        dot, acc, precision = operands(q.dtype)
        self.acc = torch.float64 if acc == tl.float64 else torch.float32
        self.rank_scale = rank_scale.to(self.acc).contiguous()
        self.log_decay = None if log_decay is None else log_decay.to(self.acc).contiguous()
        self.pull_warps = how.pull_warps
        self.N, self.R, self.NT = self.B * self.H, self.H // G, triton.cdiv(self.T, how.C)
        self.tiles = self.N * self.NT
        self.heights = (self.NT - 1).bit_length()
        self.offsets = [sum(self.NT >> m for m in range(h)) for h in range(self.heights + 1)]
        self.nodes = self.offsets[-1]
        self.room = how.states * self.NT
        self.space = max(self.room, self.nodes)
        G_, P = self.decays(how.C, sum_dtype(q.dtype))
        SLOTS = starts.shape[-1]
        self.given: dict[str, Any] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "rank_scale": self.rank_scale,
            "starts": starts.contiguous(),
            "until": until.contiguous(),
            "log_decay": self.log_decay,
            "G": G_,
            "P": P,
            "scale": scale,
            "T": self.T,
            "NT": self.NT,
            "H": self.H,
            "R": self.R,
            "N": self.N,
            "NODES": self.nodes,
            "ROOM": self.room,
            "SPACE": self.space,
            "HEIGHTS": self.heights,
            "K": self.K,
            "V": self.V,
            "BK": tile(self.K),
            "BV": tile(self.V),
            "SLOTS": SLOTS,
            "BS": max(16, triton.next_power_of_2(SLOTS)),  # a gather needs an element for each thread
            "C": how.C,
            "LIFE": how.life,
            "DECAY": log_decay is not None,
            "DOT": dot,
            "ACC": acc,
            "PREC": precision,
            "num_warps": how.num_warps,
            "num_stages": how.num_stages,
        }
        whole = {"numbers": (self.NT, SLOTS), "news": (self.NT + 2,), "table": (FIELDS.value, self.room)}
        self.given |= {name: self.new(self.N, *shape, dtype=torch.int32) for name, shape in whole.items()}
        self.launch(find_kernel, self.N, num_warps=min(16, max(1, self.given["BS"] ** 2 // 1024)))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype or self.acc)

    def launch(self, kernel: Any, programs: int, **more: Any) -> None:
        given = self.given | more
        options = {name: given[name] for name in ("num_warps", "num_stages")}
        kernel[(programs,)](**{name: given[name] for name in kernel.arg_names}, **options)

    def decays(self, C: int, SUM: Any) -> tuple[Tensor | None, Tensor | None]:
        if self.log_decay is None:
            return None, None
        G = self.new(self.N, self.T, dtype={tl.float64: torch.float64}.get(SUM, torch.float32))
        totals = self.new(self.N, self.NT, dtype=G.dtype)
        decay_kernel[(self.tiles,)](self.log_decay, G, totals, self.T, self.NT, self.H, C=C, SUM=SUM, num_warps=1)
        return G, torch.nn.functional.pad(totals.double().cumsum(1), (1, 0))

    def tree(self, twice: bool) -> tuple[Tensor, Tensor]:
        """States of slots or, of a head that has too many, the nodes of the tree; and the states as products take them:
        in the operands' dtype or, `twice`, in two parts."""
        tree = self.new(self.N, self.space, self.K, self.V)
        states = tree
        if half(self.v.dtype):
            states = self.new(1 + twice, *tree.shape, dtype=self.v.dtype)
        self.given["fades"] = self.new(self.N, self.room)
        self.launch(own_kernel, self.N * self.room, tree=tree, TWICE=twice)
        self.join(tree, None if states is tree else states, False, TWICE=twice)
        self.launch(leaf_kernel, self.tiles, tree=tree, TWICE=twice)
        for h in range(1, self.heights):
            where = {"HEIGHT": h, "below": self.offsets[h - 1], "here": self.offsets[h]}
            self.launch(up_kernel, self.blocks * self.N * (self.NT >> h), tree=tree, **where, **self.flat)
        return tree, states

    def weights(self, turned: Tensor | None, **wanted: Any) -> Tensor:
        """With which tiles read states, and into `turned` the same for each state."""
        weights = self.new(self.N, self.NT, self.given["SLOTS"], self.given["C"])
        table = self.given["table"]
        lives = table[:, STOP.value] - table[:, FIRST.value]
        found = torch.arange(self.room, device=lives.device) < self.given["news"][:, -1:]
        before = torch.where(found, lives, 0).cumsum(1, dtype=torch.int32) - lives
        self.given["place"] = before - table[:, FIRST.value]
        self.launch(weight_kernel, self.tiles, weights=weights, turned=turned, **wanted)
        return weights

    @property
    def flat(self) -> dict[str, int]:
        """Of kernels that take a state's numbers one by one."""
        return {"SIZE": self.K * self.V, "BLOCK": 1024, "num_warps": 4}

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.flat["SIZE"], self.flat["BLOCK"])

    def join(self, x: Tensor, states: Tensor | None, back: bool, TWICE: bool = False) -> None:
        rows = x.numel() // (self.space * self.flat["SIZE"])
        self.launch(join_kernel, self.blocks * rows, x=x, states=states, BACK=back, TWICE=TWICE, **self.flat)
