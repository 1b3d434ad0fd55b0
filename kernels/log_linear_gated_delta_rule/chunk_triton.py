"""One chunk of the log-linear gated delta rule by itself, in Triton: what it reads and is, and its inputs' gradients.

With the names of triton.py, `leaves` makes

    O = s (P . Gam . Lam) bV          F = -R^T bK          N = R^T (b e^{G_C - G} V)          X = s e^G (Q - P bK)

X being its first queries for what lies before it. Backward, dX, dF and dN are known from the tree; with dQ' = s e^G dX,
till = e^{G_C - G}, U = R dN, W = R dF + P^T dQ', `pairs` makes

    dP = (dO V^T) b . s Gam Lam - dQ' bK^T          d(bV) = (s P . Gam . Lam)^T dO + till U
    dA = lower part of dP M^T                       dM = -strictly lower part of (P^T dP + U (till bV)^T - R dF bK^T)M^T

and `inputs`

    dQ = dQ' + dA K                                 d(bK) = dM K - W
    dK = b d(bK) + dA^T Q + dM^T bK + M ((till bV) dN^T - bK dF^T)

The decays' gradients are sums of pairs as far as both tokens are in one chunk, and of products such as X . dX at a
node's border for the rest: nothing is summed over a sequence only to cancel.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import WEAKEST, load_log_decay, load_rows, store_rows, weight
from mixassay.kernels.log_linear_gated_delta_rule.nodes_triton import chunk_of, kernel, node_of


@triton.jit
def _decays(g, at, i, live, H, C: tl.constexpr, DECAY: tl.constexpr, SUM: tl.constexpr):
    """Base-2 log decay up to each row of a chunk (dead rows: up to the last live one), and over the whole chunk."""
    if DECAY:
        gs = load_log_decay(g + at, i, live, H, SUM)
        return tl.cumsum(gs), tl.sum(gs)
    return tl.zeros([C], dtype=SUM), tl.zeros([], dtype=SUM)


@triton.jit
def _level_weights(at, i, live, stride, L, C: tl.constexpr, LEVELS: tl.constexpr, TURNED: tl.constexpr):
    """Lam [i, j] of a chunk, or [j, i]. Its 8 x 8 blocks on the diagonal hold levels 0 to 3, each other block one."""
    e = tl.arange(0, 8)
    eighths = tl.arange(0, C // 8)
    if TURNED:
        near_apart, far_apart = (i % 8)[None, :] ^ e[:, None], (i // 8)[None, :] ^ eighths[:, None]
    else:
        near_apart, far_apart = (i % 8)[:, None] ^ e[None, :], (i // 8)[:, None] ^ eighths[None, :]
    near = tl.zeros(near_apart.shape, dtype=at.dtype.element_ty)
    far = tl.zeros(far_apart.shape, dtype=at.dtype.element_ty)
    for level in tl.static_range(LEVELS):
        w = tl.load(at + i * stride + tl.minimum(level, L - 1), mask=i < live, other=0.0)
        w = w[None, :] if TURNED else w[:, None]
        if level < 4:
            near = tl.where(near_apart >= (1 << level) // 2, w, near)
        else:
            far = tl.where(far_apart >= (1 << level) // 16, w, far)
    if TURNED:
        W = tl.where((far_apart == 0)[:, None, :], near[None, :, :], far[:, None, :])
    else:
        W = tl.where((far_apart == 0)[:, :, None], near[:, None, :], far[:, :, None])
    return tl.reshape(W, (C, C))


@triton.jit
def _store_level_sums(dlevel, pairs, at_token, i, live, H, L, C: tl.constexpr, LEVELS: tl.constexpr):
    """Row sums of pairs [C, C] over each level. To the last, which others may share, they are added."""
    top = tl.zeros([C], dtype=pairs.dtype)
    # A row's own block of 8 columns holds levels 0 to 3; of other blocks each has one level.
    e = tl.arange(0, 8)
    eighths = tl.arange(0, C // 8)
    blocks = tl.reshape(pairs, (C, C // 8, 8))
    own = (i[:, None] // 8 == eighths[None, :])[:, :, None]
    near = tl.sum(tl.where(own, blocks, 0.0), 1)  # [C, 8]
    far = tl.sum(blocks, 2)  # [C, C / 8]
    near_apart = (i % 8)[:, None] ^ e[None, :]
    far_apart = (i // 8)[:, None] ^ eighths[None, :]
    for level in tl.static_range(LEVELS):
        if level < 4:
            here = tl.where((near_apart < 1 << level) & (near_apart >= (1 << level) // 2), near, 0.0)
        else:
            here = tl.where((far_apart < 1 << (level - 3)) & (far_apart >= (1 << level) // 16), far, 0.0)
        here = tl.sum(here, 1)
        tl.store(dlevel + (at_token + i * H) * L + level, here, mask=(i < live) & (level < L - 1))
        top += tl.where(level < L - 1, 0.0, here)
    if L <= LEVELS:
        at_top = dlevel + (at_token + i * H) * L + L - 1
        tl.store(at_top, top + tl.load(at_top, mask=i < live, other=0.0), mask=i < live)


@kernel
def leaves_kernel(
    q,
    k,
    v,
    beta,
    level_scale,
    g,
    M,  # [rows, H, C]
    o,
    scores,  # P  [rows, H, C]
    x,  # [rows, H, K]
    F,  # [nodes, H, K, K]
    N,  # [chunks, H, K, V]
    totals,  # [nodes, H], base 2
    table,
    ends,
    scale,
    room,
    T,
    P,
    H,
    R,
    L,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    DEEP: tl.constexpr,
    OUTPUT: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    PREC: tl.constexpr,
):
    """One chunk by itself: what it reads of its own tokens, its first queries for others, its F and N."""
    index = tl.program_id(0).to(tl.int64)
    chunk, h = index // H, index % H
    first, live, n, base, count = chunk_of(chunk, table, ends, T, P, C, PACKED, DEEP)
    if live > 0:
        i = tl.arange(0, C)
        cc = tl.arange(0, BLOCK)
        keys = (H // R) * K
        at_key = first * keys + (h // R) * K
        at_token = first * H + h
        b = tl.load(beta + at_token + i * H, mask=i < live, other=0.0)
        Gs, total = _decays(g, at_token, i, live, H, C, DECAY, SUM)
        Ms = load_rows(M + at_token * C, i, live, i, H * C, C, C)
        lower = i[:, None] >= i[None, :]
        A = tl.zeros([C, C], dtype=ACC)
        for start in tl.static_range(0, K, BLOCK):
            qs = load_rows(q + at_key, i, live, start + cc, keys, K, BLOCK).to(DOT)
            ks = load_rows(k + at_key, i, live, start + cc, keys, K, BLOCK).to(DOT)
            A = tl.dot(qs, tl.trans(ks), acc=A, input_precision=PREC, out_dtype=ACC)
        A = tl.where(lower, A, 0.0).to(DOT)
        A = tl.dot(A, Ms, input_precision=PREC, out_dtype=ACC)
        Ps = A.to(DOT)
        if OUTPUT:
            A *= tl.where(lower, weight(Gs[:, None] - Gs[None, :], ACC), 0.0) * scale
            A *= _level_weights(level_scale + at_token * L, i, live, H * L, L, C, LEVELS, False)
            A = A.to(DOT)
            for start in tl.static_range(0, V, BLOCK):
                vs = load_rows(v + at_token * V, i, live, start + cc, H * V, V, BLOCK)
                vs = (vs.to(ACC) * b[:, None]).to(DOT)
                os = tl.dot(A, vs, input_precision=PREC, out_dtype=ACC)
                store_rows(o + at_token * V, os, i, live, start + cc, H * V, V, BLOCK)
        else:
            store_rows(scores + at_token * C, Ps, i, live, i, H * C, C, C)
        if DEEP:
            since = weight(Gs, ACC) * scale
            if n > 0:
                for start in tl.static_range(0, K, BLOCK):
                    bks = load_rows(k + at_key, i, live, start + cc, keys, K, BLOCK).to(ACC) * b[:, None]
                    xs = load_rows(q + at_key, i, live, start + cc, keys, K, BLOCK).to(ACC)
                    xs -= tl.dot(Ps, bks.to(DOT), input_precision=PREC, out_dtype=ACC)
                    store_rows(x + at_token * K, xs * since[:, None], i, live, start + cc, H * K, K, BLOCK)
            if n + 1 < count:
                till = b * weight(total - Gs, ACC)
                node = node_of(0, n, base, room) * H + h
                at_N = N + (chunk * H + h) * K * V
                for up in tl.static_range(0, K, BLOCK):
                    ks = load_rows(k + at_key, i, live, up + cc, keys, K, BLOCK).to(DOT)
                    RT = tl.dot(tl.trans(ks), Ms, input_precision=PREC, out_dtype=ACC).to(DOT)
                    for start in tl.static_range(0, K, BLOCK):
                        bks = load_rows(k + at_key, i, live, start + cc, keys, K, BLOCK).to(ACC) * -b[:, None]
                        part = tl.dot(RT, bks.to(DOT), input_precision=PREC, out_dtype=ACC)
                        store_rows(F + node * K * K, part, up + cc, K, start + cc, K, K, BLOCK)
                    for start in tl.static_range(0, V, BLOCK):
                        bvs = load_rows(v + at_token * V, i, live, start + cc, H * V, V, BLOCK).to(ACC) * till[:, None]
                        part = tl.dot(RT, bvs.to(DOT), input_precision=PREC, out_dtype=ACC)
                        store_rows(at_N, part, up + cc, K, start + cc, V, V, BLOCK)
                tl.store(totals + node, total)


@kernel
def pairs_kernel(
    k,
    v,
    beta,
    level_scale,
    g,
    M,
    scores,
    do,
    dx,
    around,
    dF,
    dN,
    dtotals,
    dA,  # [rows, H, C]
    dM,  # [rows, H, C]
    W,  # [rows, H, K]
    dv,
    dbeta,  # [rows, H], its part from b V
    dlevel,
    dg,
    table,
    ends,
    scale,
    room,
    T,
    P,
    H,
    R,
    L,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    DEEP: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    PREC: tl.constexpr,
):
    """The gradients of a chunk's pairs of tokens, dV and those of decays and level weights."""
    index = tl.program_id(0).to(tl.int64)
    chunk, h = index // H, index % H
    first, live, n, base, count = chunk_of(chunk, table, ends, T, P, C, PACKED, DEEP)
    if live > 0:
        i = tl.arange(0, C)
        cc = tl.arange(0, BLOCK)
        kk = tl.arange(0, BK)
        keys = (H // R) * K
        at_key = first * keys + (h // R) * K
        at_token = first * H + h
        at_level = level_scale + at_token * L
        b = tl.load(beta + at_token + i * H, mask=i < live, other=0.0)
        Gs, total = _decays(g, at_token, i, live, H, C, DECAY, SUM)
        Ms = load_rows(M + at_token * C, i, live, i, H * C, C, C)
        Ps = load_rows(scores + at_token * C, i, live, i, H * C, C, C)
        lower = i[:, None] >= i[None, :]
        strict = i[:, None] > i[None, :]
        upper = i[:, None] <= i[None, :]
        till = weight(total - Gs, ACC)
        moved = tl.zeros([C], dtype=ACC)  # till b V . dN^T R: what the decay from a token to the chunk's end gets
        leaf = n + 1 < count
        if DEEP:
            at_dN = dN + (chunk * H + h) * K * V
            node = node_of(0, n, base, room) * H + h
            known = tl.where(leaf, K, 0)  # the last chunk's dN and dF are zeros that nobody wrote
            ks = load_rows(k + at_key, i, live, kk, keys, K, BK).to(DOT)
            Rs = tl.dot(tl.trans(Ms), ks, input_precision=PREC, out_dtype=ACC).to(DOT)

        PT = tl.trans(Ps)
        PW = _level_weights(at_level, i, live, H * L, L, C, LEVELS, True) * scale
        PW *= tl.where(upper, weight(Gs[None, :] - Gs[:, None], ACC), 0.0)
        PW = (PT.to(ACC) * PW).to(DOT)
        Z = tl.zeros([C, C], dtype=ACC)
        UV = tl.zeros([C, C], dtype=ACC)
        db = tl.zeros([C], dtype=ACC)
        for start in tl.static_range(0, V, BLOCK):
            vs = load_rows(v + at_token * V, i, live, start + cc, H * V, V, BLOCK).to(DOT)
            dos = load_rows(do + at_token * V, i, live, start + cc, H * V, V, BLOCK).to(DOT)
            if DEEP:
                dNs = load_rows(at_dN, kk, known, start + cc, V, V, BLOCK)
            Z = tl.dot(dos, tl.trans(vs), acc=Z, input_precision=PREC, out_dtype=ACC)
            dbV = tl.dot(PW, dos, input_precision=PREC, out_dtype=ACC)
            if DEEP:
                U = tl.dot(Rs, dNs, input_precision=PREC, out_dtype=ACC)
                UV = tl.dot(U.to(DOT), tl.trans(vs), acc=UV, input_precision=PREC, out_dtype=ACC)
                U *= till[:, None]
                moved += tl.sum(U * vs.to(ACC), 1)
                dbV += U
            db += tl.sum(dbV * vs.to(ACC), 1)
            store_rows(dv + at_token * V, dbV * b[:, None], i, live, start + cc, H * V, V, BLOCK)
        tl.store(dbeta + at_token + i * H, db, mask=i < live)

        Z *= tl.where(lower, weight(Gs[:, None] - Gs[None, :], ACC), 0.0) * (scale * b)[None, :]
        ZP = Z * Ps.to(ACC)
        Lam = _level_weights(at_level, i, live, H * L, L, C, LEVELS, False)
        _store_level_sums(dlevel, ZP, at_token, i, live, H, L, C, LEVELS)
        if DECAY:
            ZP = tl.where(strict, ZP * Lam, 0.0)
            dG = tl.sum(ZP, 1) - tl.sum(ZP, 0)
            end = tl.zeros([], dtype=ACC)
            if DEEP:
                moved *= b
                dG += tl.load(around + at_token + i * H, mask=i < live, other=0.0) - moved
                end += tl.sum(moved) + tl.load(dtotals + node, mask=leaf, other=0.0)
            raw = tl.load(g + at_token + i * H, mask=i < live, other=0.0)
            dG = tl.where(raw < WEAKEST, 0.0, end + tl.cumsum(dG, reverse=True))
            tl.store(dg + at_token + i * H, dG, mask=i < live)

        dP = Z * Lam
        HM = tl.zeros([C, C], dtype=ACC)
        if DEEP:
            since = weight(Gs, ACC) * scale
            QK = tl.zeros([C, C], dtype=ACC)
            for start in tl.static_range(0, K, BLOCK):
                ks = load_rows(k + at_key, i, live, start + cc, keys, K, BLOCK).to(DOT)
                dqs = load_rows(dx + at_token * K, i, live, start + cc, H * K, K, BLOCK).to(ACC)
                dqs = (dqs * since[:, None]).to(DOT)
                dFs = load_rows(dF + node * K * K, kk, known, start + cc, K, K, BLOCK)
                QK = tl.dot(dqs, tl.trans(ks), acc=QK, input_precision=PREC, out_dtype=ACC)
                Ws = tl.dot(Rs, dFs, input_precision=PREC, out_dtype=ACC)
                HM = tl.dot(Ws.to(DOT), tl.trans(ks), acc=HM, input_precision=PREC, out_dtype=ACC)
                Ws = tl.dot(PT, dqs, acc=Ws, input_precision=PREC, out_dtype=ACC)
                store_rows(W + at_token * K, Ws, i, live, start + cc, H * K, K, BLOCK)
            dP -= tl.where(lower, QK * b[None, :], 0.0)
            HM = UV * (till * b)[None, :] - HM * b[None, :]
        dP16 = dP.to(DOT)
        MT = tl.trans(Ms)
        dAs = tl.dot(dP16, MT, input_precision=PREC, out_dtype=ACC)
        store_rows(dA + at_token * C, tl.where(lower, dAs, 0.0), i, live, i, H * C, C, C)
        HM = tl.dot(PT, dP16, acc=HM, input_precision=PREC, out_dtype=ACC)
        HM = -tl.dot(HM.to(DOT), MT, input_precision=PREC, out_dtype=ACC)
        store_rows(dM + at_token * C, tl.where(strict, HM, 0.0), i, live, i, H * C, C, C)


@kernel
def inputs_kernel(
    q,
    k,
    v,
    beta,
    g,
    M,
    dx,
    dF,
    dN,
    dA,
    dM,
    W,
    dq,  # [rows, H, K]
    dk,
    dbeta,  # [key blocks, rows, H], its part from b K
    table,
    ends,
    scale,
    rows,
    room,
    T,
    P,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    DEEP: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    PREC: tl.constexpr,
):
    """dQ and dK of one chunk, a block of the key columns."""
    KEYS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    index = tl.program_id(0).to(tl.int64)
    kb, index = index % KEYS, index // KEYS
    chunk, h = index // H, index % H
    first, live, n, base, count = chunk_of(chunk, table, ends, T, P, C, PACKED, DEEP)
    if live > 0:
        i = tl.arange(0, C)
        cc = tl.arange(0, BLOCK)
        kk = kb * BLOCK + cc
        keys = (H // R) * K
        at_key = first * keys + (h // R) * K
        at_token = first * H + h
        b = tl.load(beta + at_token + i * H, mask=i < live, other=0.0)
        ks = load_rows(k + at_key, i, live, kk, keys, K, BLOCK).to(DOT)
        qs = load_rows(q + at_key, i, live, kk, keys, K, BLOCK).to(DOT)
        dAs = load_rows(dA + at_token * C, i, live, i, H * C, C, C)
        dMs = load_rows(dM + at_token * C, i, live, i, H * C, C, C)
        if DEEP:
            dxs = load_rows(dx + at_token * K, i, live, kk, H * K, K, BLOCK)
            Ws = load_rows(W + at_token * K, i, live, kk, H * K, K, BLOCK)
        dqs = tl.dot(dAs, ks, input_precision=PREC, out_dtype=ACC)
        dbK = tl.dot(dMs, ks, input_precision=PREC, out_dtype=ACC)
        dks = tl.dot(tl.trans(dAs), qs, input_precision=PREC, out_dtype=ACC)
        bks = (ks.to(ACC) * b[:, None]).to(DOT)
        dks = tl.dot(tl.trans(dMs), bks, acc=dks, input_precision=PREC, out_dtype=ACC)
        if DEEP:
            Gs, total = _decays(g, at_token, i, live, H, C, DECAY, SUM)
            since = weight(Gs, ACC) * scale
            dqs += dxs.to(ACC) * since[:, None]
            dbK -= Ws.to(ACC)
            if n + 1 < count:
                dR = tl.zeros([C, BLOCK], dtype=ACC)
                at_dN = dN + (chunk * H + h) * K * V
                at_dF = dF + (node_of(0, n, base, room) * H + h) * K * K
                for start in tl.static_range(0, V, BLOCK):
                    vs = load_rows(v + at_token * V, i, live, start + cc, H * V, V, BLOCK).to(DOT)
                    dNs = load_rows(at_dN, kk, K, start + cc, V, V, BLOCK)
                    dR = tl.dot(vs, tl.trans(dNs), acc=dR, input_precision=PREC, out_dtype=ACC)
                dR *= -weight(total - Gs, ACC)[:, None]
                for start in tl.static_range(0, K, BLOCK):
                    xs = load_rows(k + at_key, i, live, start + cc, keys, K, BLOCK).to(DOT)
                    dFs = load_rows(at_dF, kk, K, start + cc, K, K, BLOCK)
                    dR = tl.dot(xs, tl.trans(dFs), acc=dR, input_precision=PREC, out_dtype=ACC)
                dR = (dR * -b[:, None]).to(DOT)
                Ms = load_rows(M + at_token * C, i, live, i, H * C, C, C)
                dks = tl.dot(Ms, dR, acc=dks, input_precision=PREC, out_dtype=ACC)
        store_rows(dq + at_token * K, dqs, i, live, kk, H * K, K, BLOCK)
        db = tl.sum(dbK * ks.to(ACC), 1)
        tl.store(dbeta + (kb * rows + first + i) * H + h, db, mask=i < live)
        store_rows(dk + at_token * K, dks + dbK * b[:, None], i, live, kk, H * K, K, BLOCK)
