"""The pairs of a tile with itself, in Triton, and with them all that its tokens get: outputs and gradients.

With s, G, D and M as in triton.py, for the rows of one tile, `past` being what it reads of states
(`slot_reads_triton.py`):

    A  = (Q K^T) . D . M           o = s (A V + past)
    dA = (dO V^T) . D . M          dQ = s (dA K + past)
    F  = (Q K^T) . (dO V^T) . D    drank_scale[t, r] = s sum of F[t, j] over the tokens j of rank r at t

Token j is an own token of one state (`slot_states_triton.py`) or, in the last tile, of none. With dS that state's
gradient:

    dk_j = s (dA^T Q)_j + e^{G_end - G_j} dS v_j
    dv_j = s (A^T dO)_j + e^{G_end - G_j} dS^T k_j
    column sum of u_j = s (sum over t of F[t, j] M[t, j]) + e^{G_end - G_j} k_j^T dS v_j

A gate's gradient takes F and dS twice more, with the steps up and down in place of the weights.

Of heads that take the tree nothing is read or stored here.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import load_log_decay, weight
from mixassay.kernels.dla.heads_triton import load_heads, store_heads
from mixassay.kernels.dla.slot_states_triton import BEGIN, END, dot, field, fits, kernel, state_at, tile_of
from mixassay.kernels.dla.weights_triton import inner_starts, own_columns, own_sums, own_weighed


@kernel
def decay_kernel(log_decay, G, totals, T, NT, H, C: tl.constexpr, SUM: tl.constexpr):
    """G [B H, T] from the start of each tile, and whole tiles [B H, NT]; base 2."""
    head, b, h, n = tile_of(H, NT)
    i = tl.arange(0, C)
    left = T - n * C
    g = load_log_decay(log_decay + (b * T + n * C) * H + h, i, left, H, SUM)
    tl.store(G + head * T + n * C + i, tl.cumsum(g), mask=i < left)
    tl.store(totals + head * NT + n, tl.sum(g))


@triton.jit
def _own_tile(news, T, NT, H, ROOM, C: tl.constexpr):
    """A program's tile, for its pairs with itself: head in all and in its row, the tile, its first row and the tokens
    from there on. Heads that take the tree have none."""
    head, b, h, n = tile_of(H, NT)
    return head, h, n, b * T + n * C, tl.where(fits(news, head, NT, ROOM), T - n * C, 0)


@triton.jit
def _decays(G, head, n, t, j, left, T, C: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr):
    """e^{G_t - G_j} of the tokens of tile n, 0 where j is behind t: [t, j] or [j, t], as t and j are."""
    D = (t >= j).to(ACC)
    if DECAY:
        G += head * T + n * C
        to = tl.load(G + t, mask=t < left, other=0.0)
        D = tl.where(t >= j, weight(to - tl.load(G + j, mask=j < left, other=0.0), ACC), 0.0)
    return D


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
    past,
    o,
    scale,
    T,
    NT,
    H,
    R,
    ROOM,
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
    head, h, n, row, left = _own_tile(news, T, NT, H, ROOM, C)
    i = tl.arange(0, C)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
    vs = load_heads(v, row, h, i, left, H, V, BV).to(DOT)
    opened = inner_starts(until, row, h, i, left, H)
    A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
    A *= _decays(G, head, n, i[:, None], i[None, :], left, T, C, DECAY, ACC)
    A = own_weighed(A, starts, rank_scale, opened, row, h, left, n * C, H, C, BS, SLOTS)
    out = load_heads(past, row, h, i, left, H, V, BV)
    out += tl.dot(A.to(DOT), vs, input_precision=PREC, out_dtype=ACC)
    store_heads(o, out * scale, row, h, i, left, H, V, BV)


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
    head, h, n, row, left = _own_tile(news, T, NT, H, ROOM, C)
    i = tl.arange(0, C)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
    vs = load_heads(v, row, h, i, left, H, V, BV).to(DOT)
    dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
    opened = inner_starts(until, row, h, i, left, H)
    dA = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC)
    dA *= _decays(G, head, n, i[:, None], i[None, :], left, T, C, DECAY, ACC)
    F = dA * tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
    dw = own_sums(F, starts, opened, row, h, left, n * C, H, C, BS, SLOTS)
    store_heads(drank_scale, dw * scale, row, h, i, left, H, SLOTS, BS)
    dA = own_weighed(dA, starts, rank_scale, opened, row, h, left, n * C, H, C, BS, SLOTS)
    dqs = load_heads(past, row, h, i, left, H, K, BK)
    dqs += tl.dot(dA.to(DOT), ks, input_precision=PREC, out_dtype=ACC)
    store_heads(dq, dqs * scale, row, h, i, left, H, K, BK)


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
    news,
    table,
    ends,
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
    ROOM,
    SPACE,
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
    """For the tokens of tile m: its own tiles' pairs, then the states that have own tokens of it."""
    head, h, m, row, left = _own_tile(news, T, NT, H, ROOM, C)
    i = tl.arange(0, C)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
    vs = load_heads(v, row, h, i, left, H, V, BV).to(DOT)
    dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
    opened = inner_starts(until, row, h, i, left, H)
    D = _decays(G, head, m, i[None, :], i[:, None], left, T, C, DECAY, ACC)
    A = tl.dot(ks, tl.trans(qs), input_precision=PREC, out_dtype=ACC) * scale  # [j, t]
    dA = tl.dot(vs, tl.trans(dos), input_precision=PREC, out_dtype=ACC) * D
    F = A * dA
    AM, dAM, column, column_up, column_down = own_columns(
        A * D, dA, F, starts, rank_scale, opened, row, h, left, m * C, H, C, BS, SLOTS, GATE
    )
    dvs = tl.dot(AM.to(DOT), dos, input_precision=PREC, out_dtype=ACC)
    dks = tl.dot(dAM.to(DOT), qs, input_precision=PREC, out_dtype=ACC) * scale
    at, keep = state_at(K, V, BK, BV)
    more = N.to(tl.int64) * SPACE * K * V
    if DECAY:
        within = tl.load(G + head * T + m * C + i, mask=i < left, other=0.0)
        before = tl.load(P + head * (NT + 1) + m)
    last = tl.load(news + head * (NT + 2) + m + 2, mask=left > 0, other=0)
    for state in range(tl.load(news + head * (NT + 2) + m + 1), last):
        begin = field(table, head, state, ROOM, BEGIN)
        end = field(table, head, state, ROOM, END)
        if end > m * C:
            e = tl.where((m * C + i >= begin) & (m * C + i < end), 1.0, 0.0).to(ACC)
            if DECAY:
                e *= weight((tl.load(ends + head * ROOM + state) - before).to(within.dtype) - within, ACC)
            x = dtree + (head * SPACE + state) * K * V + at
            dS = tl.load(x, mask=keep, other=0.0)
            dvs += tl.dot(ks, dS.to(DOT), input_precision=PREC, out_dtype=ACC) * e[:, None]
            y = dot(vs, tl.trans(dS), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC) * e[:, None]
            dks += y
            column += tl.sum(y * ks.to(ACC), 1)
            if GATE:
                dS = tl.load(x + more, mask=keep, other=0.0)
                y = dot(vs, tl.trans(dS), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC)
                column_up += tl.sum(y * ks.to(ACC), 1) * e
                dS = tl.load(x + 2 * more, mask=keep, other=0.0)
                y = dot(vs, tl.trans(dS), tl.zeros([C, BK], dtype=ACC), TWICE, DOT, ACC, PREC)
                column_down += tl.sum(y * ks.to(ACC), 1) * e
    store_heads(dk, dks, row, h, i, left, H, K, BK)
    store_heads(dv, dvs, row, h, i, left, H, V, BV)
    each = N.to(tl.int64) * T
    u += head * T + m * C + i
    if DECAY:
        tl.store(u, tl.load(u, mask=i < left, other=0.0) - column, mask=i < left)
    if GATE:
        tl.store(u + each, tl.load(u + each, mask=i < left, other=0.0) - column_up, mask=i < left)
        tl.store(u + 2 * each, tl.load(u + 2 * each, mask=i < left, other=0.0) - column_down, mask=i < left)
