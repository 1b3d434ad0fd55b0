"""The gated delta rule in Triton: kernels and their launches, forward and backward.

Within a chunk of C tokens, with G the inclusive cumulative log decay, Gam_ij = e^{G_i - G_j} for j <= i (else 0), b the
write strengths, s the scale, S the state before the chunk, dS the gradient of the state after it (Yang et al. 2025):

    A  = strictly lower part of (b K K^T) . Gam             M  = (I + A)^-1
    u  = M b (V - e^G K S)                                  what the chunk writes under its keys
    O  = s ((Q K^T) . Gam u + e^G Q S)                      S' = e^{G_C} S + (e^{G_C - G} K)^T u

No W = M b e^G K as in the usual form: one product more in the chain, and neither W nor M b V passes through memory.
Backward: (I + A) u = r gives dr = z and dA = -z u^T, where z solves the transposed system, so that

    du = s ((Q K^T) . Gam)^T dO + e^{G_C - G} K dS          z = M^T du
    dS' = e^{G_C} dS + s (e^G Q)^T dO - (b e^G K)^T z       dV = b z
    dQ = s ((dO u^T) . Gam K + e^G dO S^T)
    E  = -(strictly lower part of z u^T) . Gam K - e^G z S^T      its row i, times b_i, is the reader's part of dK_i
    dK = s ((dO u^T) . Gam)^T Q - (strictly lower part of z u^T . Gam)^T b K + e^{G_C - G} u dS^T + b E
    db_i = z_i . v_i + k_i . E_i
    dG_i = q_i . dQ_i - k_i . (dK - b E)_i + b_i k_i . E_i, and at the last row + <S', dS>

Four kernels. `solve` computes M and G of all chunks at once. `forward` and `reverse` walk a segment of one head's
sequence with the state in registers; `gradients` takes all chunks at once. Few heads: a sequence is cut into segments;
a first walk gives each segment's transition (a K x K matrix, its walk from the identity with v = 0) and contribution,
`join` multiplies them up, and the second walk starts from true states. The backward reuses the transitions.

States are held transposed, [V, K]: then each product of the chain S -> u -> S' takes its left operand from registers.
A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import (
    WEAKEST,
    Cut,
    half,
    load_log_decay,
    load_rows,
    operands,
    segment_of,
    store_rows,
    sum_dtype,
    weight,
)

# Compiled once, whatever the sizes: offsets are multiples of K and V, which are known.
kernel = triton.jit(do_not_specialize=["rows", "T", "length", "P", "H", "R"])


@triton.jit
def load_turned(at, rows, live, columns, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`load_rows`, transposed: [BLOCK, C]."""
    keep = (rows < live)[None, :]
    if WIDTH % BLOCK != 0:
        keep = keep & (columns < WIDTH)[:, None]
    return tl.load(at + rows[None, :] * stride + columns[:, None], mask=keep, other=0.0)


@triton.jit
def store_turned(at, x, rows, live, columns, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The transpose of x [BLOCK, C] to rows of memory."""
    keep = (rows < live)[None, :]
    if WIDTH % BLOCK != 0:
        keep = keep & (columns < WIDTH)[:, None]
    tl.store(at + rows[None, :] * stride + columns[:, None], x.to(at.dtype.element_ty), mask=keep)


@triton.jit
def chunk_decay(at, i, live, C: tl.constexpr):
    """Base-2 log decay up to each row of a chunk (dead rows: up to the last live one), and over the whole chunk."""
    total = tl.load(at + tl.minimum(live, C) - 1)
    return tl.where(i < live, tl.load(at + i, mask=i < live, other=0.0), total), total


@triton.jit
def log_decay_of(G, first, h, T, H):
    """Where the cumulative log decay of row `first` and head h lies in G [B, H, T]."""
    return G + (first // T * (H - 1) + h) * T + first


@triton.jit
def sequence_of(index, sequences, P, PACKED: tl.constexpr):
    if PACKED:
        return tl.load(sequences + index)
    return index // P


@triton.jit
def chunk_of(index, table, T, length, P, PACKED: tl.constexpr):
    """`segment_of` for programs too short for its wide division: first row, live rows, and sequence (packed: 0)."""
    if PACKED:
        sequence = 0
        first = tl.load(table + 3 * index)
        live = (tl.load(table + 3 * index + 1) - first).to(tl.int32)
    else:
        sequence = index // P
        first = sequence.to(tl.int64) * T + (index % P).to(tl.int64) * length
        live = tl.minimum(length, T - index % P * length)
    return first, live, sequence


@kernel
def solve_kernel(
    k,
    beta,
    g,
    M,  # [rows, H, C]
    G,  # [B, H, T], base 2
    table,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    PREC: tl.constexpr,
    EXACT: tl.constexpr,
):
    """M of one chunk, in blocks of 16 x 16: first those on the diagonal, then block rows from the blocks above.

    A diagonal block is inverted by doubling: with D the inverse of its blocks of n x n and L what of A lies in its
    blocks of 2 n x 2 n but not in those, the inverse of the latter is D - D L D.
    """
    N: tl.constexpr = C // 16
    index = tl.program_id(0)
    h = (index % H).to(tl.int64)
    first, live, sequence = chunk_of(index // H, table, T, length, P, PACKED)
    if live > 0:
        i = tl.arange(0, 16)
        kk = tl.arange(0, BK)
        keys = (H // R) * K
        at_key = k + first * keys + (h // R) * K
        at_M = M + (first * H + h) * C
        at_G = G + (sequence * (H - 1) + h) * T + first
        bs = ()
        gs = ()
        for a in tl.static_range(N):
            bs += (tl.load(beta + (first + 16 * a + i) * H + h, mask=16 * a + i < live, other=0.0).to(ACC),)
            if DECAY:
                gs += (load_log_decay(g + first * H + h, 16 * a + i, live, H, SUM),)
            else:
                gs += (tl.zeros([16], dtype=SUM),)
        As = ()  # blocks (0, 0), (1, 0), (1, 1), (2, 0), ...
        for start in tl.static_range(0, K, BK):
            ks = ()
            for a in tl.static_range(N):
                ks += (load_rows(at_key, 16 * a + i, live, start + kk, keys, K, BK).to(DOT),)
            sums = ()
            for a in tl.static_range(N):
                for c in tl.static_range(a + 1):
                    before = As[a * (a + 1) // 2 + c] if start > 0 else tl.zeros([16, 16], dtype=ACC)
                    sums += (tl.dot(ks[a], tl.trans(ks[c]), acc=before, input_precision=PREC, out_dtype=ACC),)
            As = sums
        Gs = ()
        total = tl.zeros([], dtype=SUM)
        for a in tl.static_range(N):
            Gs += (total + tl.cumsum(gs[a]),)
            total += tl.sum(gs[a])
            tl.store(at_G + 16 * a + i, Gs[a], mask=16 * a + i < live)
        Ls = ()
        Ds = ()
        for a in tl.static_range(N):
            for c in tl.static_range(a + 1):
                L = As[a * (a + 1) // 2 + c] * (bs[a][:, None] * weight(Gs[a][:, None] - Gs[c][None, :], ACC))
                Ls += (L,)
            pair = (i[:, None] > i[None, :]) & (i[:, None] // 2 == i[None, :] // 2)
            D = tl.where(i[:, None] == i[None, :], 1.0, tl.where(pair, -Ls[a * (a + 1) // 2 + a], 0.0))
            Ds += (D.to(ACC),)
        for level in tl.static_range(1, 4):
            between = (i[:, None] > i[None, :]) & ((i[:, None] >> level) ^ (i[None, :] >> level) == 1)
            LDs = ()
            for a in tl.static_range(N):
                L = tl.where(between, Ls[a * (a + 1) // 2 + a], 0.0)
                LDs += (tl.dot(L, Ds[a], input_precision=EXACT, out_dtype=ACC),)
            doubled = ()
            for a in tl.static_range(N):
                doubled += (Ds[a] - tl.dot(Ds[a], LDs[a], input_precision=EXACT, out_dtype=ACC),)
            Ds = doubled
        Ms = ()
        for a in tl.static_range(N):
            row = 16 * a + i
            for c in tl.static_range(a):
                below = tl.zeros([16, 16], dtype=ACC)
                for d in tl.static_range(c, a):
                    L = Ls[a * (a + 1) // 2 + d]
                    below = tl.dot(L, Ms[d * (d + 1) // 2 + c], acc=below, input_precision=EXACT, out_dtype=ACC)
                Ms += (-tl.dot(Ds[a], below, input_precision=EXACT, out_dtype=ACC),)
            Ms += (Ds[a],)
            for c in tl.static_range(N):
                block = Ms[a * (a + 1) // 2 + c] if c <= a else tl.zeros([16, 16], dtype=ACC)
                store_rows(at_M, block, row, live, 16 * c + i, H * C, C, 16)


@kernel
def forward_kernel(
    q,
    k,
    v,
    beta,
    G,
    M,
    starts,  # [slots, H, K, V] at the segments' starts
    o,
    final,  # [B, H, K, V], written when a sequence is one segment
    u,  # [rows, H, V]
    states,  # [chunks, H, V, K]: the state before every chunk
    contributions,  # [slots, H, K, V]: what a segment alone leaves at the border that it flows to
    transitions,  # [slots, H, K, K]: what it makes of a state at its start
    table,
    sequences,
    scale,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    BORDERS: tl.constexpr,  # the first walk: contributions and transitions only
    OUTERMOST: tl.constexpr,  # the last segment of a sequence is walked too
    OUTPUT: tl.constexpr,
    KEEP: tl.constexpr,  # u and states, for the gradients
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """Walk a segment with BV columns of the state; in the first walk, columns from VALUES on are those of K x K."""
    VALUES: tl.constexpr = (V + BV - 1) // BV
    COLUMNS: tl.constexpr = VALUES + (K + BV - 1) // BV if BORDERS else VALUES
    index = tl.program_id(0).to(tl.int64)
    vb, index = index % COLUMNS, index // COLUMNS
    segment, h = index // H, index % H
    first, live, slot = segment_of(segment, table, T, length, P, PACKED)
    if ((live > 0) | HAS_FINAL) & (OUTERMOST | PACKED | (segment % P != P - 1)):
        i = tl.arange(0, C)
        kk = tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        cc = (vb - VALUES) * BV + tl.arange(0, BV)  # columns of the identity
        keys = (H // R) * K
        place = first // C + sequence_of(segment, sequences, P, PACKED)
        at_G = log_decay_of(G, first, h, T, H)
        at_state = (slot * H + h) * K * V + kk[None, :] * V + vv[:, None]
        keep = (vv < V)[:, None] & (kk < K)[None, :]
        if HAS_START:
            ST = tl.load(starts + at_state, mask=keep, other=0.0).to(ACC)
        elif BORDERS:
            ST = tl.where(cc[:, None] == kk[None, :], 1.0, 0.0).to(ACC)
        else:
            ST = tl.zeros([BV, BK], dtype=ACC)
        for start in range(0, live, C):
            row = first + start
            left = live - start
            at_key = row * keys + (h // R) * K
            at_value = (row * H + h) * V
            ks = load_rows(k + at_key, i, left, kk, keys, K, BK).to(DOT)
            vT = load_turned(v + at_value, i, tl.where(vb < VALUES, left, 0), vv, H * V, V, BV).to(ACC)
            Ms = load_rows(M + (row * H + h) * C, i, left, i, H * C, C, C)
            b = tl.load(beta + (row + i) * H + h, mask=i < left, other=0.0)
            Gs, total = chunk_decay(at_G + start, i, left, C)
            since = weight(Gs, ACC)
            S16 = ST.to(DOT)
            if KEEP:
                at_states = states + ((place + start // C) * H + h) * K * V + vv[:, None] * K + kk[None, :]
                tl.store(at_states, S16, mask=keep)
            seen = tl.dot(S16, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
            r = (b[None, :] * (vT - since[None, :] * seen)).to(DOT)
            uT = tl.dot(r, tl.trans(Ms), input_precision=PREC, out_dtype=ACC)
            if KEEP:
                store_turned(u + at_value, uT, i, left, vv, H * V, V, BV)
            if OUTPUT:
                qT = tl.trans(load_rows(q + at_key, i, left, kk, keys, K, BK).to(DOT))
                oT = tl.dot(S16, qT, input_precision=PREC, out_dtype=ACC) * since[None, :]
                AT = tl.dot(ks, qT, input_precision=PREC, out_dtype=ACC)  # [j, i]
                AT = tl.where(i[:, None] <= i[None, :], AT * weight(Gs[None, :] - Gs[:, None], ACC), 0.0)
                oT = tl.dot(uT.to(DOT), AT.to(DOT), acc=oT, input_precision=PREC, out_dtype=ACC)
                store_turned(o + at_value, oT * scale, i, left, vv, H * V, V, BV)
            ST *= weight(total, ACC)
            written = (uT * weight(total - Gs, ACC)[None, :]).to(DOT)
            ST = tl.dot(written, ks, acc=ST, input_precision=PREC, out_dtype=ACC)
        if HAS_FINAL:
            tl.store(final + at_state, ST, mask=keep)
        if BORDERS:
            tl.store(contributions + H * K * V + at_state, ST, mask=keep)
            at_transition = transitions + (slot * H + h) * K * K + kk[None, :] * K + cc[:, None]
            tl.store(at_transition, ST, mask=((cc >= 0) & (cc < K))[:, None] & (kk < K)[None, :])


@kernel
def join_kernel(
    borders,  # [slots, H, K, V]: contributions on entry, states (or their gradients) on return
    transitions,
    outer,  # the state before the first segment, or the gradient of the one after the last  [N, H, K, V]
    far,  # where the scan ends up  [N, H, K, V]
    slots,  # [N + 1]: first slot of every packed sequence
    P,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_FAR: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
):
    """S <- transition S + contribution along a sequence's segments, or dS <- transition^T dS + contribution back."""
    index = tl.program_id(0).to(tl.int64)
    vb, index = index % tl.cdiv(V, BV), index // tl.cdiv(V, BV)
    n, h = index // H, index % H
    if PACKED:
        begin = tl.load(slots + n)
        P = (tl.load(slots + n + 1) - begin).to(tl.int32) - 1
    else:
        begin = n * (P + 1)
    kk = tl.arange(0, BK)
    vv = vb * BV + tl.arange(0, BV)
    at = kk[None, :] * V + vv[:, None]
    keep = (vv < V)[:, None] & (kk < K)[None, :]
    square = (kk < K)[:, None] & (kk < K)[None, :]
    across = kk[:, None] * K + kk[None, :] if GRADIENT else kk[None, :] * K + kk[:, None]
    if HAS_OUTER:
        ST = tl.load(outer + (n * H + h) * K * V + at, mask=keep, other=0.0)
    else:
        ST = tl.zeros([BV, BK], dtype=ACC)
    tl.store(borders + ((begin + (P if GRADIENT else 0)) * H + h) * K * V + at, ST, mask=keep)
    # Without `far` the last contribution was not computed.
    for step in range(0, P if HAS_FAR else P - 1):
        p = begin + (P - 1 - step if GRADIENT else step)  # the segment crossed
        to = borders + ((p if GRADIENT else p + 1) * H + h) * K * V + at
        # From a state of zeros only the contribution counts: the transition was perhaps not computed.
        known = square & (HAS_OUTER | (step > 0))
        transition = tl.load(transitions + (p * H + h) * K * K + across, mask=known, other=0.0)
        ST = tl.dot(ST, transition, acc=tl.load(to, mask=keep, other=0.0), input_precision=EXACT, out_dtype=ACC)
        tl.store(to, ST, mask=keep)
    if HAS_FAR:
        tl.store(far + (n * H + h) * K * V + at, ST, mask=keep)


@kernel
def reverse_kernel(
    q,
    k,
    beta,
    G,
    M,
    do,
    ends,  # [slots, H, K, V]: gradients of the states at the segments' ends
    dinitial,  # [B, H, K, V], written when a sequence is one segment
    z,  # [rows, H, V]
    dstates,  # [chunks, H, V, K]: the gradient of the state after every chunk
    contributions,  # [slots, H, K, V]
    table,
    sequences,
    scale,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_END: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BORDERS: tl.constexpr,
    OUTERMOST: tl.constexpr,  # the first segment of a sequence is walked too
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """Walk a segment backwards with BV columns of the gradient of the state."""
    VALUES: tl.constexpr = (V + BV - 1) // BV
    index = tl.program_id(0).to(tl.int64)
    vb, index = index % VALUES, index // VALUES
    segment, h = index // H, index % H
    first, live, slot = segment_of(segment, table, T, length, P, PACKED)
    if ((live > 0) | HAS_INITIAL) & (OUTERMOST | PACKED | (segment % P != 0)):
        i = tl.arange(0, C)
        kk = tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        place = first // C + sequence_of(segment, sequences, P, PACKED)
        at_G = log_decay_of(G, first, h, T, H)
        at_state = (slot * H + h) * K * V + kk[None, :] * V + vv[:, None]
        keep = (vv < V)[:, None] & (kk < K)[None, :]
        if HAS_END:
            dST = tl.load(ends + at_state, mask=keep, other=0.0).to(ACC)
        else:
            dST = tl.zeros([BV, BK], dtype=ACC)
        last = (live - 1) // C * C
        for step in range(0, live, C):
            start = last - step
            row = first + start
            left = live - start
            at_key = row * keys + (h // R) * K
            at_value = (row * H + h) * V
            ks = load_rows(k + at_key, i, left, kk, keys, K, BK).to(DOT)
            qs = load_rows(q + at_key, i, left, kk, keys, K, BK).to(DOT)
            doT = load_turned(do + at_value, i, left, vv, H * V, V, BV).to(DOT)
            Ms = load_rows(M + (row * H + h) * C, i, left, i, H * C, C, C)
            b = tl.load(beta + (row + i) * H + h, mask=i < left, other=0.0)
            Gs, total = chunk_decay(at_G + start, i, left, C)
            since = weight(Gs, ACC)
            dS16 = dST.to(DOT)
            if not BORDERS:
                at_dstates = dstates + ((place + start // C) * H + h) * K * V + vv[:, None] * K + kk[None, :]
                tl.store(at_dstates, dS16, mask=keep)
            duT = tl.dot(dS16, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
            duT *= weight(total - Gs, ACC)[None, :]
            A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)  # [i, j]
            A = tl.where(i[:, None] >= i[None, :], A * scale * weight(Gs[:, None] - Gs[None, :], ACC), 0.0)
            duT = tl.dot(doT, A.to(DOT), acc=duT, input_precision=PREC, out_dtype=ACC)
            zT = tl.dot(duT.to(DOT), Ms, input_precision=PREC, out_dtype=ACC)
            if not BORDERS:
                store_turned(z + at_value, zT, i, left, vv, H * V, V, BV)
            dST *= weight(total, ACC)
            read = (doT * (scale * since)[None, :]).to(DOT)
            dST = tl.dot(read, qs, acc=dST, input_precision=PREC, out_dtype=ACC)
            erased = (-zT * (b * since)[None, :]).to(DOT)
            dST = tl.dot(erased, ks, acc=dST, input_precision=PREC, out_dtype=ACC)
        if HAS_INITIAL:
            tl.store(dinitial + at_state, dST, mask=keep)
        if BORDERS:
            tl.store(contributions + at_state, dST, mask=keep)


@triton.jit
def _read(
    xs,  # x, y and S, loaded already if they are one block wide
    ys,
    ST,
    x,
    y,
    states,
    at_value,
    at_state,
    i,
    live,
    kk,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """x S^T [C, BK] and x y^T [C, C] for rows x and y of a chunk and a state S."""
    xS = tl.zeros([C, BK], dtype=ACC)
    xy = tl.zeros([C, C], dtype=ACC)
    for start in tl.static_range(0, V, BV):
        if V > BV:
            vv = start + tl.arange(0, BV)
            keep = (vv < V)[:, None] & (kk < K)[None, :]
            xs = load_rows(x + at_value, i, live, vv, H * V, V, BV).to(DOT)
            ys = load_rows(y + at_value, i, live, vv, H * V, V, BV).to(DOT)
            ST = tl.load(states + at_state + vv[:, None] * K + kk[None, :], mask=keep, other=0.0)
        xS = tl.dot(xs, ST, acc=xS, input_precision=PREC, out_dtype=ACC)
        xy = tl.dot(xs, tl.trans(ys), acc=xy, input_precision=PREC, out_dtype=ACC)
    return xS, xy


@kernel
def gradients_kernel(
    q,
    k,
    v,
    beta,
    g,
    G,
    do,
    u,
    z,
    states,
    dstates,
    dq,  # [rows, H, K]
    dk,
    dv,  # [rows, H, V]
    dbeta,  # [key blocks, rows, H]
    dg,
    table,
    sequences,
    scale,
    rows,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gradients of one chunk, BK of the key columns; everything is linear in these columns but dv.

    If BV covers V, all is loaded first: a program waits for memory once.
    """
    KEYS: tl.constexpr = (K + BK - 1) // BK
    index = tl.program_id(0)
    kb, index = index % KEYS, index // KEYS
    h, index = (index % H).to(tl.int64), index // H
    first, live, sequence = chunk_of(index, table, T, length, P, PACKED)
    if live > 0:
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = tl.arange(0, BV)
        keys = (H // R) * K
        at_key = first * keys + (h // R) * K
        at_value = (first * H + h) * V
        place = first // C + (tl.load(sequences + index) if PACKED else sequence)
        at_state = (place * H + h) * K * V
        at_block = at_state + vv[:, None] * K + kk[None, :]
        keep = (vv < V)[:, None] & (kk < K)[None, :]
        at_out = (first * H + h) * K
        at_scalar = (kb * rows + first + i) * H + h
        Gs, total = chunk_decay(G + (sequence * (H - 1) + h) * T + first, i, live, C)
        b = tl.load(beta + (first + i) * H + h, mask=i < live, other=0.0)
        if DECAY:
            raw = tl.load(g + (first + i) * H + h, mask=i < live, other=0.0)
        zs = load_rows(z + at_value, i, live, vv, H * V, V, BV)
        owned = tl.where(kb == 0, live, 0)  # one key block owns dv and z . v, which have no key columns
        vs = load_rows(v + at_value, i, owned, vv, H * V, V, BV)
        dos = load_rows(do + at_value, i, live, vv, H * V, V, BV).to(DOT)
        us = load_rows(u + at_value, i, live, vv, H * V, V, BV)
        ST = tl.load(states + at_block, mask=keep, other=0.0)
        ks = load_rows(k + at_key, i, live, kk, keys, K, BK).to(DOT)
        qs = load_rows(q + at_key, i, live, kk, keys, K, BK).to(DOT)
        dST = tl.load(dstates + at_block, mask=keep, other=0.0)
        since = weight(Gs, ACC)
        lower = i[:, None] >= i[None, :]
        upper = i[:, None] <= i[None, :]
        off = i[:, None] != i[None, :]

        db = tl.zeros([C], dtype=ACC)
        inner = tl.zeros([], dtype=ACC)  # <S, dS>
        for start in tl.static_range(0, V, BV):
            if V > BV:
                vv = start + tl.arange(0, BV)
                at_block = at_state + vv[:, None] * K + kk[None, :]
                keep = (vv < V)[:, None] & (kk < K)[None, :]
                zs = load_rows(z + at_value, i, live, vv, H * V, V, BV)
                vs = load_rows(v + at_value, i, owned, vv, H * V, V, BV)
                ST = tl.load(states + at_block, mask=keep, other=0.0)
                dST = tl.load(dstates + at_block, mask=keep, other=0.0)
            db += tl.sum(zs.to(ACC) * vs.to(ACC), 1)
            store_rows(dv + at_value, zs.to(ACC) * b[:, None], i, owned, vv, H * V, V, BV)
            if DECAY:
                inner += tl.sum(ST.to(ACC) * dST.to(ACC))

        E, A = _read(zs, us, ST, z, u, states, at_value, at_state, i, live, kk, H, K, V, C, BK, BV, DOT, ACC, PREC)
        A = tl.where(lower & off, A * weight(Gs[:, None] - Gs[None, :], ACC), 0.0).to(DOT)
        E = -tl.dot(A, ks, acc=E * since[:, None], input_precision=PREC, out_dtype=ACC)
        kE = tl.sum(ks.to(ACC) * E, 1)
        tl.store(dbeta + at_scalar, db + kE, mask=i < live)

        dqs, A = _read(dos, us, ST, do, u, states, at_value, at_state, i, live, kk, H, K, V, C, BK, BV, DOT, ACC, PREC)
        # Rounded with the scale in it, as for dk below: in dG the pairs of both must cancel.
        A = tl.where(lower, A * scale * weight(Gs[:, None] - Gs[None, :], ACC), 0.0).to(DOT)
        dqs = tl.dot(A, ks, acc=dqs * (scale * since)[:, None], input_precision=PREC, out_dtype=ACC)
        store_rows(dq + at_out, dqs, i, live, kk, H * K, K, BK)
        dG = tl.sum(qs.to(ACC) * dqs, 1)

        dks, A = _read(
            us, dos, dST, u, do, dstates, at_value, at_state, i, live, kk, H, K, V, C, BK, BV, DOT, ACC, PREC
        )
        dks *= weight(total - Gs, ACC)[:, None]
        end = tl.sum(ks.to(ACC) * dks)
        dks += b[:, None] * E
        A = tl.where(upper, A * scale * weight(Gs[None, :] - Gs[:, None], ACC), 0.0).to(DOT)
        dks = tl.dot(A, qs, acc=dks, input_precision=PREC, out_dtype=ACC)

        A = tl.zeros([C, C], dtype=ACC)
        for start in tl.static_range(0, V, BV):
            if V > BV:
                vv = start + tl.arange(0, BV)
                us = load_rows(u + at_value, i, live, vv, H * V, V, BV)
                zs = load_rows(z + at_value, i, live, vv, H * V, V, BV)
            A = tl.dot(us, tl.trans(zs), acc=A, input_precision=PREC, out_dtype=ACC)
        A = tl.where(upper & off, A * -b[None, :] * weight(Gs[None, :] - Gs[:, None], ACC), 0.0).to(DOT)
        dks = tl.dot(A, ks, acc=dks, input_precision=PREC, out_dtype=ACC)
        store_rows(dk + at_out, dks, i, live, kk, H * K, K, BK)
        if DECAY:
            # k . dk holds b k . E, the reader's part, with the wrong sign.
            dG += 2 * b * kE - tl.sum(ks.to(ACC) * dks, 1)
            end += inner * weight(total, ACC)
            tl.store(dg + at_scalar, tl.where(raw < WEAKEST, 0.0, end + tl.cumsum(dG, reverse=True)), mask=i < live)


class Launch(NamedTuple):
    num_warps: int
    num_stages: int
    registers: int | None = None  # that a thread may use


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    BV: int  # value columns that a walker holds, or `gradients` at a time
    BK: int  # key columns in a program of `gradients`
    programs: int  # cut sequences until there are about as many walkers
    solve: Launch
    forward: Launch
    reverse: Launch
    join: Launch
    gradients: Launch


def precision(dtype: torch.dtype, K: int) -> str:
    """Of the products. Twice as wide operands of tensor cores, and keys wider than 128, are too much for a chunk."""
    return "ieee" if K > 128 else operands(dtype)[2]


def inverse_precision(dtype: torch.dtype, K: int) -> str:
    """Of the products that make M, which is kept in the inputs' dtype."""
    return "tf32" if half(dtype) else precision(dtype, K)


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process.

    Where tensor cores serve, no tile is narrower than 64: on Hopper, Triton 3.6 and 3.7 read past the end of shared
    memory at a width of 32. Keys wider than 128 and wide dtypes do without segments: `join` has no room for them.
    """
    one, four, eight = Launch(1, 1), Launch(4, 1), Launch(8, 1)
    if half(dtype):
        solve = Launch(1, 1, registers=168)  # twelve warps on a multiprocessor instead of eight
        if K <= 64 or (V <= 64 and K <= 128):
            return Plan(64, 64, 64, 264, solve, Launch(4, 2), Launch(4, 2), eight, four)
        if K <= 128:
            return Plan(64, 128, 64, 132, solve, Launch(8, 2), Launch(8, 2), eight, four)
        return Plan(64, 64, 64, 1, one, eight, eight, eight, four)
    if precision(dtype, K) == "tf32":
        return Plan(64, 64, 64, 1, one, eight, eight, eight, eight)
    return Plan(32, 32, 32, 1, one, eight, eight, eight, eight)


class Saved(NamedTuple):
    """What the backward reads besides the inputs."""

    M: Tensor  # [B, T, H, C]
    G: Tensor  # [B, H, T], log decays since the chunk began, in base 2
    starts: Tensor | None  # [slots, H, K, V], if sequences were cut
    transitions: Tensor | None  # [slots, H, K, K]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor | None, Saved]:
    """o and, if asked for, the final state. `length` is that of segments, a multiple of the chunk, for tests."""
    call = _Call(q, k, v, beta, log_decay, scale, cu_seqlens, how, length)
    M, G, starts, transitions = saved = call.saved()
    call.solve(M, G)
    initial = call.wide(initial_state)
    final = call.slots(call.cut.sequences, V=True) if output_final_state else None
    if starts is not None and transitions is not None:
        call.forward(M, G, contributions=starts, transitions=transitions, outermost=final is not None)
        call.join(starts, transitions, initial, final, gradient=False)
    o = torch.empty_like(call.v)
    call.forward(M, G, starts=initial if starts is None else starts, o=o, final=final if starts is None else None)
    return o, final, saved


def room(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor | None, Saved]:
    """What `forward` returns, not filled in."""
    call = _Call(q, q, v, v.new_empty(v.shape[:3]), None, 1.0, cu_seqlens, None, None)
    final = call.slots(call.cut.sequences, V=True) if output_final_state else None
    return torch.empty_like(call.v), final, call.saved()


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Saved,
    do: Tensor,
    dfinal: Tensor | None,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, beta, log_decay and initial_state; `saved` by `forward` with the same plan."""
    call = _Call(q, k, v, beta, log_decay, scale, cu_seqlens, how, length)
    M, G, starts, transitions = saved
    initial, dfinal = call.wide(initial_state), call.wide(dfinal)
    do = do.to(v.dtype).contiguous()
    u, z, states, dstates = call.kept()
    call.forward(M, G, starts=initial if starts is None else starts, u=u, states=states)
    dinitial = None if initial is None else call.slots(call.cut.sequences, V=True)
    ends = dfinal
    if transitions is not None:
        borders = call.slots(call.cut.borders, V=True)
        call.reverse(M, G, do, contributions=borders, outermost=dinitial is not None)
        call.join(borders, transitions, dfinal, dinitial, gradient=True)
        ends = borders[1:]
    call.reverse(M, G, do, ends=ends, dinitial=None if transitions is not None else dinitial, z=z, dstates=dstates)
    dq, dk, dv, dbeta, dg = call.gradients(G, do, u, z, states, dstates)
    return dq, dk, dv, dbeta.to(beta.dtype), _like(dg, log_decay), _like(dinitial, initial_state)


def _like(x: Tensor | None, original: Tensor | None) -> Tensor | None:
    return None if x is None or original is None else x.to(original.dtype)


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
        length: int | None,
    ) -> None:
        (B, T, self.groups, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, self.K, self.V)
        self.precision = precision(q.dtype, self.K)
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.dot = q.dtype if half(q.dtype) else self.acc  # what the kernels keep for one another
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.beta = self.wide(beta)
        self.sum = torch.float32 if sum_dtype(q.dtype) == tl.float32 else torch.float64
        self.g = self.wide(log_decay)
        self.scale, self.rows = scale, B * T
        self.BK = max(64, triton.next_power_of_2(self.K))
        self.values = triton.cdiv(self.V, self.how.BV)
        self.cut = Cut.of(B, T, cu_seqlens, self.how.programs // (self.H * self.values), length)
        self.chunks = Cut.of(B, T, cu_seqlens, 0, self.how.C)
        self.ends = None if cu_seqlens is None else cu_seqlens[1:].long()

    def wide(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.acc).contiguous()

    def slots(self, n: int, *, V: bool) -> Tensor:
        return self.q.new_empty((n, self.H, self.K, self.V if V else self.K), dtype=self.acc)

    def kept(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Room for u, z and the states and gradients of states at every chunk."""
        chunks = self.rows // self.how.C + self.cut.sequences
        values = (self.rows, self.H, self.V)
        states = (chunks, self.H, self.V, self.K)
        u, z, S, dS = (self.q.new_empty(shape, dtype=self.dot) for shape in (values, values, states, states))
        return u, z, S, dS

    def saved(self) -> Saved:
        B, T = self.q.shape[:2]
        M = self.q.new_empty((B, T, self.H, self.how.C), dtype=self.dot)
        G = self.q.new_empty((B, self.H, T), dtype=self.sum)
        if not self.cut.inner:
            return Saved(M, G, None, None)
        borders = self.cut.borders
        return Saved(M, G, self.slots(borders, V=True), self.slots(borders, V=False))

    def solve(self, M: Tensor, G: Tensor) -> None:
        self.launch(
            solve_kernel,
            self.how.solve,
            self.chunks,
            1,
            (self.k, self.beta, self.g, M, G),
            BK=min(self.BK, 64),
            DECAY=self.g is not None,
            SUM=sum_dtype(self.q.dtype),
            EXACT=inverse_precision(self.q.dtype, self.K),
        )

    def forward(
        self,
        M: Tensor,
        G: Tensor,
        *,
        starts: Tensor | None = None,
        o: Tensor | None = None,
        final: Tensor | None = None,
        u: Tensor | None = None,
        states: Tensor | None = None,
        contributions: Tensor | None = None,
        transitions: Tensor | None = None,
        outermost: bool = True,
    ) -> None:
        columns = self.values + (0 if transitions is None else triton.cdiv(self.K, self.how.BV))
        tensors = (self.q, self.k, self.v, self.beta, G, M, starts, o, final, u, states, contributions, transitions)
        self.launch(
            forward_kernel,
            self.how.forward,
            self.cut,
            columns,
            tensors,
            sequences=self.sequences(self.cut),
            scale=self.scale,
            V=self.V,
            BK=self.BK,
            BV=self.how.BV,
            HAS_START=starts is not None,
            HAS_FINAL=final is not None,
            BORDERS=transitions is not None,
            OUTERMOST=outermost,
            OUTPUT=o is not None,
            KEEP=states is not None,
        )

    def reverse(
        self,
        M: Tensor,
        G: Tensor,
        do: Tensor,
        *,
        ends: Tensor | None = None,
        dinitial: Tensor | None = None,
        z: Tensor | None = None,
        dstates: Tensor | None = None,
        contributions: Tensor | None = None,
        outermost: bool = True,
    ) -> None:
        self.launch(
            reverse_kernel,
            self.how.reverse,
            self.cut,
            self.values,
            (self.q, self.k, self.beta, G, M, do, ends, dinitial, z, dstates, contributions),
            sequences=self.sequences(self.cut),
            scale=self.scale,
            V=self.V,
            BK=self.BK,
            BV=self.how.BV,
            HAS_END=ends is not None,
            HAS_INITIAL=dinitial is not None,
            BORDERS=contributions is not None,
            OUTERMOST=outermost,
        )

    def join(
        self, borders: Tensor, transitions: Tensor, outer: Tensor | None, far: Tensor | None, *, gradient: bool
    ) -> None:
        BV = 64
        join_kernel[(self.cut.sequences * self.H * triton.cdiv(self.V, BV),)](
            borders,
            transitions,
            outer,
            far,
            self.cut.slots,
            self.cut.P,
            self.H,
            K=self.K,
            V=self.V,
            BK=self.BK,
            BV=BV,
            GRADIENT=gradient,
            HAS_OUTER=outer is not None,
            HAS_FAR=far is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
            EXACT="tf32x3" if half(self.dot) else self.precision,
            num_warps=self.how.join.num_warps,
            num_stages=self.how.join.num_stages,
        )

    def gradients(
        self, G: Tensor, do: Tensor, u: Tensor, z: Tensor, states: Tensor, dstates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        keys = triton.cdiv(self.K, self.how.BK)
        alone = self.groups == self.H
        dq, dk = (
            self.q.new_empty((self.rows, self.H, self.K), dtype=self.q.dtype if alone else self.acc) for _ in range(2)
        )
        dv = torch.empty_like(self.v)
        dbeta = self.q.new_empty((keys, self.rows, self.H), dtype=self.acc)
        dg = None if self.g is None else torch.empty_like(dbeta)
        self.launch(
            gradients_kernel,
            self.how.gradients,
            self.chunks,
            keys,
            (self.q, self.k, self.v, self.beta, self.g, G, do, u, z, states, dstates, dq, dk, dv, dbeta, dg),
            sequences=self.sequences(self.chunks),
            rows=self.rows,
            scale=self.scale,
            V=self.V,
            BK=self.how.BK,
            BV=self.how.BV,
            DECAY=dg is not None,
        )
        if not alone:
            dq, dk = (x.unflatten(1, (self.groups, -1)).sum(2).to(self.q.dtype) for x in (dq, dk))
        small = self.beta.shape
        return (
            dq.view(self.q.shape),
            dk.view(self.k.shape),
            dv,
            dbeta.sum(0).view(small),
            None if dg is None else dg.sum(0).view(small),
        )

    def sequences(self, cut: Cut) -> Tensor | None:
        """The sequence of every packed segment: how many of them end at or before its first row."""
        if self.ends is None or cut.table is None:
            return None
        return torch.searchsorted(self.ends, cut.table[:, 0].contiguous(), right=True)

    def launch(
        self, kernel: Any, launch: Launch, cut: Cut, columns: int, tensors: tuple[Tensor | None, ...], **flags: Any
    ) -> None:
        dot, acc, _ = operands(self.q.dtype)
        kernel[(cut.segments * self.H * columns,)](
            *tensors,
            table=cut.table,
            T=cut.T,
            length=cut.length,
            P=cut.P,
            H=self.H,
            R=self.H // self.groups,
            K=self.K,
            C=self.how.C,
            PACKED=cut.table is not None,
            DOT=dot,
            ACC=acc,
            PREC=self.precision,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            maxnreg=launch.registers,
            **flags,
        )
