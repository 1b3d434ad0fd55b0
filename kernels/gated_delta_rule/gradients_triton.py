"""The gradients of the gated delta rule's inputs, in Triton, from the states and their gradients at every chunk.

With the names of triton.py, and u and z of walk_triton.py: (I + A) u = r gives dr = z and dA = -z u^T, so that

    dV = b z
    dQ = s ((dO u^T) . Gam K + e^G dO S^T)
    E  = -(strictly lower part of z u^T) . Gam K - e^G z S^T      its row i, times b_i, is the reader's part of dK_i
    dK = s ((dO u^T) . Gam)^T Q - (strictly lower part of z u^T . Gam)^T b K + e^{G_C - G} u dS^T + b E
    db_i = z_i . v_i + k_i . E_i
    dG_i = q_i . dQ_i - k_i . (dK - b E)_i + b_i k_i . E_i, and at the last row + <S', dS>
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import WEAKEST, load_rows, store_rows, weight
from mixassay.kernels.gated_delta_rule.solve_triton import chunk_decay, chunk_of, kernel


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
