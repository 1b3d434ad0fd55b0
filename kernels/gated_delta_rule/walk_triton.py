"""The walks of the gated delta rule along a head's chunks, in Triton: the state forward, its gradient backward.

With the names of triton.py, from chunk to chunk

    u  = M b (V - e^G K S)          O = s ((Q K^T) . Gam u + e^G Q S)          S' = e^{G_C} S + (e^{G_C - G} K)^T u

No W = M b e^G K as in the usual form: one product more in the chain, and neither W nor M b V passes through memory.
Backward, z solving the transposed system,

    du = s ((Q K^T) . Gam)^T dO + e^{G_C - G} K dS          z = M^T du
    dS' = e^{G_C} dS + s (e^G Q)^T dO - (b e^G K)^T z

`forward` and `reverse` walk a segment of one head's sequence with the state in registers. Few heads: a sequence is cut
into segments; a first walk gives each segment's transition (a K x K matrix, its walk from the identity with v = 0) and
contribution, `join` multiplies them up, and the second walk starts from true states. The backward reuses the
transitions.

States are held transposed, [V, K]: then each product of the chain S -> u -> S' takes its left operand from registers.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import load_rows, load_turned, segment_of, store_turned, weight
from mixassay.kernels.gated_delta_rule.solve_triton import chunk_decay, kernel


@triton.jit
def _log_decay_of(G, first, h, T, H):
    """Where the cumulative log decay of row `first` and head h lies in G [B, H, T]."""
    return G + (first // T * (H - 1) + h) * T + first


@triton.jit
def _sequence_of(index, sequences, P, PACKED: tl.constexpr):
    if PACKED:
        return tl.load(sequences + index)
    return index // P


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
        place = first // C + _sequence_of(segment, sequences, P, PACKED)
        at_G = _log_decay_of(G, first, h, T, H)
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
        place = first // C + _sequence_of(segment, sequences, P, PACKED)
        at_G = _log_decay_of(G, first, h, T, H)
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
