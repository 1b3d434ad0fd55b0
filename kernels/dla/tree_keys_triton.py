"""Who reads the tree, in Triton, and the gradients of what is read: of nodes, then of keys and values.

Who reads a node is one run of tiles: from the first that finds it in one slot (`span_kernel`) to the last that does not
find its parent so. Tiles before that run read its tokens in smaller nodes or, before the run of a tile, pair by pair.
With w[t] as in tree_reads_triton.py,

    dS of a node = scale sum of w[t] q_t do_t^T over its readers' tokens t
    dS of a tile = sum of e^{decay from the tile's end to the node's} dS over the nodes that it is part of
    dk_j = the pairs' share + e^{G_end - G_j} dS v_j          dv_j = the pairs' share + e^{G_end - G_j} dS^T k_j

A gate's gradient takes dS and the pairs twice more, with the steps up and down in place of the weights.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import weight
from mixassay.kernels.dla.heads_triton import load_heads, store_heads
from mixassay.kernels.dla.slot_states_triton import dot, state_at
from mixassay.kernels.dla.tree_triton import decay_since, kernel, share
from mixassay.kernels.dla.weights_triton import (
    by_rank,
    inner,
    inner_starts,
    pick,
    rank_of,
    ranks,
    weights_at,
)


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
    head, b, h, part, last, parts = share(NODES, news, H, NT, ROOM)
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
                    D *= weight(decay_since(end, n, P, head, NT, C, to.dtype) + to, ACC)
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
    head, b, h, part, last, parts = share(NT, news, H, NT, ROOM)
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
