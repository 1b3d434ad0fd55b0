"""The tree, in Triton: what heads with very many boundaries read of the past instead of states of slots.

Slots only ever meet, so tiles that lie in one slot once do so for good. A binary tree has the states of 2^h tiles side
by side; tile n reads, from its own start back, the largest node that ends there and lies within one slot, or, where not
even a tile does, that tile's pairs (`weights_triton.py`). Who reads a node is one run of tiles: from the first that
finds it in one slot (`span_kernel`) to the last that does not find its parent so. A tile's gradient is the sum over the
nodes that it is part of.

Nodes lie in `tree` [B H, SPACE, K, V] by their height, the lowest first. Heads whose states have room (`fits`) take no
part: their programs do nothing.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import weight
from mixassay.kernels.dla.heads_triton import load_heads, store_heads
from mixassay.kernels.dla.slot_states_triton import dot, fits, state_at
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

TILES = tl.constexpr(8)  # of a program, or nodes: heads with states of slots, most or all, are to be done with soon

# Compiled once, whatever the sizes.
kernel = triton.jit(do_not_specialize=["T", "NT", "H", "R", "N", "NODES", "HEIGHT", "ROOM", "SPACE"])


@triton.jit
def _share(count, news, H, NT, ROOM):
    """Head in all, its batch row and number; a program's first of `count` tiles (or nodes), the end, and the step."""
    parts = tl.cdiv(count, TILES)
    index = tl.program_id(0).to(tl.int64)
    head = index // parts
    last = tl.where(fits(news, head, NT, ROOM), 0, count)
    return head, head // H, head % H, (index % parts).to(tl.int32), last, parts


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
    head, b, h, part, last, parts = _share(NT, news, H, NT, ROOM)
    for n in range(part, last, parts):
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
def _since(end, n, P, head, NT, C: tl.constexpr, SUM: tl.constexpr):
    """Log decay from token `end`, the first of a tile, to tile n."""
    at = P + head * (NT + 1)
    return (tl.load(at + n) - tl.load(at + end // C)).to(SUM)


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
    head, b, h, part, last, parts = _share(NT, news, H, NT, ROOM)
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
                    w *= weight(_since(end, n, P, head, NT, C, to.dtype) + to, ACC)
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
    head, b, h, part, last, parts = _share(NODES, news, H, NT, ROOM)
    for node in range(part, last, parts):
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
                    D *= weight(_since(end, n, P, head, NT, C, to.dtype) + to, ACC)
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
    head, b, h, part, last, parts = _share(NT, news, H, NT, ROOM)
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
                    x *= weight(_since(end, n, P, head, NT, C, to.dtype) + to, ACC)[:, None]
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


@kernel
def tree_key_kernel(
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
):
    """For the tokens of tile m: tiles that read them one by one, then the nodes that they are part of."""
    head, b, h, part, last, parts = _share(NT, news, H, NT, ROOM)
    first = b * T
    for m in range(part, last, parts):
        i = tl.arange(0, C)
        j = m * C + i
        here = T - m * C
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
        for n in range(m, tl.load(spans + head * NODES + m)):
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
        more = N.to(tl.int64) * SPACE * K * V
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
                    x = dtree + (head * SPACE + offset + number) * K * V + at
                    dS += tl.load(x, mask=keep, other=0.0) * e
                    if GATE:
                        dS_up += tl.load(x + more, mask=keep, other=0.0) * e
                        dS_down += tl.load(x + 2 * more, mask=keep, other=0.0) * e
            offset += NT >> height
        e = tl.full([C], 1.0, dtype=ACC)
        if DECAY:
            e = weight((tl.load(at_P + m + 1) - tl.load(at_P + m)).to(since.dtype) - since, ACC)
        x = dot(vs, tl.trans(dS), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC) * e[:, None]
        dks += x
        dvs += tl.dot(ks, dS.to(DOT), input_precision=PREC, out_dtype=ACC) * e[:, None]
        column += tl.sum(x * ks.to(ACC), 1)
        if GATE:
            x = dot(vs, tl.trans(dS_up), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC)
            column_up += tl.sum(x * ks.to(ACC), 1) * e
            x = dot(vs, tl.trans(dS_down), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC)
            column_down += tl.sum(x * ks.to(ACC), 1) * e
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
