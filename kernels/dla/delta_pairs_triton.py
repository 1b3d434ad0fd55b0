"""The delta rule by pairs of chunks, in Triton: rows of chunks walk back over the earlier ones, and forth again.

With the names of delta_triton.py, and P and U of each chunk alone (`delta_chunk_triton.py`), a row of chunks begins
with S = P for its own pair and Y = Q - P bK. It walks back, Y being what its queries are where they come to chunk j,
having passed all behind it (`walk_kernel`):

    S_j = Y U_j^T                  Y <- Y - S_j bK_j             O = s sum over j of (S_j . M_j) bV_j

Backward. With Z = s b (dO V^T), the gradient of M is E = S . Z, and a row walks forth again, at first dY = 0
(`row_kernel`):

    dS_j = Z_j . M_j - dY bK_j^T   dY <- dY + dS_j U_j       last, for the row's own chunk, dP = the same dS

A column sums over the rows behind it, with Y before and dY behind the step (`column_kernel`):

    d(bV) = s sum (S . M)^T dO     dU = sum dS^T Y           d(bK) = - sum S^T dY
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import load_turned
from mixassay.kernels.dla.delta_chunk_triton import chunk_of, kernel, strengths
from mixassay.kernels.dla.heads_triton import load_heads, store_heads


@triton.jit
def _pair(head, n, p, NT, C: tl.constexpr):
    """The first row, in a table of all pairs' [C, K], of chunk n and the earlier chunk p."""
    return (head * (NT * (NT - 1) // 2) + n * (n - 1) // 2 + p) * C


@kernel
def walk_kernel(
    q,
    k,
    v,
    beta,
    scores,
    keys,
    M,
    o,
    ys,  # [pairs, C, K]
    scale,
    first,
    T,
    NT,
    H,
    R,
    side,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    OUTPUT: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """A row of chunks, from its own back: what it reads, or its queries before every step."""
    head, h, begin, n = chunk_of(first, T, H, NT, C)
    row = begin + n * C
    left = T - n * C
    i = tl.arange(0, C)
    if OUTPUT:
        M += head * side * side + n * C + i[None, :] * side + i[:, None]  # t innermost
        out = tl.zeros([C, BV], dtype=ACC)
    S = load_heads(scores, row, h, i, left, H, C, C).to(ACC)
    Y = load_heads(q, row, h // R, i, left, H // R, K, BK).to(ACC)
    for step in range(0, n):
        j = (n - step) * C
        A = S * strengths(beta, begin + j, h, i, T - j, H, ACC)[None, :]
        if OUTPUT:
            vs = load_heads(v, begin + j, h, i, T - j, H, V, BV).to(DOT)
            mask = tl.load(M + j.to(tl.int64) * side)
            out = tl.dot((A * mask).to(DOT), vs, acc=out, input_precision=PREC, out_dtype=ACC)
        ks = load_heads(k, begin + j, h // R, i, T - j, H // R, K, BK).to(DOT)
        Y = tl.dot((-A).to(DOT), ks, acc=Y, input_precision=PREC, out_dtype=ACC)
        if not OUTPUT:
            store_heads(ys, Y, _pair(head, n, n - step - 1, NT, C), 0, i, C, 1, K, BK)
        us = load_heads(keys, begin + j - C, h, i, C, H, K, BK)
        S = tl.dot(Y.to(DOT), tl.trans(us), input_precision=PREC, out_dtype=ACC)
    if OUTPUT:
        A = S * strengths(beta, begin, h, i, T, H, ACC)[None, :]
        vs = load_heads(v, begin, h, i, T, H, V, BV).to(DOT)
        out = tl.dot((A * tl.load(M)).to(DOT), vs, acc=out, input_precision=PREC, out_dtype=ACC)
        store_heads(o, out * scale, row, h, i, left, H, V, BV)


@kernel
def row_kernel(
    k,
    v,
    beta,
    keys,
    M,
    do,
    dys,  # [pairs, C, K]
    dscores,  # dP  [B, T, H, C]
    dy,  # of the first queries  [B, T, H, K]
    scale,
    first,
    T,
    NT,
    H,
    R,
    side,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """A row of chunks, from the first to its own: the gradients of its queries and own scores."""
    head, h, begin, n = chunk_of(first, T, H, NT, C)
    row = begin + n * C
    left = T - n * C
    i = tl.arange(0, C)
    M += head * side * side + n * C + i[None, :] * side + i[:, None]
    dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
    dY = tl.zeros([C, BK], dtype=ACC)
    dS = tl.zeros([C, C], dtype=ACC)
    for p in range(0, n + 1):
        j = p * C
        bs = strengths(beta, begin + j, h, i, T - j, H, ACC)
        if p > 0:
            us = load_heads(keys, begin + j - C, h, i, C, H, K, BK)
            dY = tl.dot(dS.to(DOT), us, acc=dY, input_precision=PREC, out_dtype=ACC)
        vs = load_heads(v, begin + j, h, i, T - j, H, V, BV).to(DOT)
        ks = load_heads(k, begin + j, h // R, i, T - j, H // R, K, BK).to(DOT)
        store_heads(dys, dY, _pair(head, n, p, NT, C), 0, i, tl.where(p < n, C, 0), 1, K, BK)
        dS = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC) * scale
        dS *= tl.load(M + j.to(tl.int64) * side)
        dS -= tl.dot(dY.to(DOT), tl.trans(ks), input_precision=PREC, out_dtype=ACC)
        dS *= bs[None, :]
    store_heads(dy, dY, row, h, i, left, H, K, BK)
    dS = tl.where(i[:, None] >= i[None, :], dS, 0.0)
    store_heads(dscores, dS, row, h, i, left, H, C, C)


@kernel
def column_kernel(
    k,
    v,
    beta,
    scores,
    keys,
    M,
    E,
    ys,
    dys,
    do,
    dkeys,  # dU  [B, T, H, K]
    dbk,  # d(bK)  [B, T, H, K]
    dv,
    dbeta,
    scale,
    first,
    T,
    NT,
    H,
    R,
    side,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """A column of chunks, from its own to the last: the gradient of its mask, and what its keys and values get."""
    index = tl.program_id(0).to(tl.int64)
    head = index // NT
    m = (index % NT).to(tl.int32)
    h, begin = (first + head) % H, (first + head) // H * T
    row = begin + m * C
    here = T - m * C
    i = tl.arange(0, C)
    at = head * side * side + (m * C).to(tl.int64) * side + i[:, None] * side + i[None, :]
    ks = load_heads(k, row, h // R, i, here, H // R, K, BK).to(DOT)
    vs = load_heads(v, row, h, i, here, H, V, BV).to(DOT)
    us = load_heads(keys, row, h, i, here, H, K, BK)
    bs = strengths(beta, row, h, i, here, H, ACC)
    dU = tl.zeros([C, BK], dtype=ACC)
    dbK = tl.zeros([C, BK], dtype=ACC)
    # Its own chunk.
    dos = load_heads(do, row, h, i, here, H, V, BV).to(DOT)
    S = load_turned(scores + (row * H + h) * C, i, here, i, H * C, C, C).to(ACC)  # [j, t]
    Z = tl.dot(vs, tl.trans(dos), input_precision=PREC, out_dtype=ACC) * (scale * bs)[:, None]
    tl.store(E + m * C + at, S * Z)
    S *= tl.load(M + m * C + at)
    dbV = tl.dot(S.to(DOT), dos, input_precision=PREC, out_dtype=ACC)
    for n in range(m + 1, NT):
        t = n * C
        Y = load_heads(ys, _pair(head, n, m, NT, C), 0, i, C, 1, K, BK)
        dY = load_heads(dys, _pair(head, n, m, NT, C), 0, i, C, 1, K, BK)
        dos = load_heads(do, begin + t, h, i, T - t, H, V, BV).to(DOT)
        S = tl.dot(us, tl.trans(Y), input_precision=PREC, out_dtype=ACC)
        Z = tl.dot(vs, tl.trans(dos), input_precision=PREC, out_dtype=ACC) * scale
        tl.store(E + t + at, S * Z * bs[:, None])
        mask = tl.load(M + t + at).to(ACC)
        dbK = tl.dot((-S).to(DOT), dY, acc=dbK, input_precision=PREC, out_dtype=ACC)
        dbV = tl.dot((S * mask).to(DOT), dos, acc=dbV, input_precision=PREC, out_dtype=ACC)
        dS = Z * mask - tl.dot(ks, tl.trans(dY), input_precision=PREC, out_dtype=ACC)
        dU = tl.dot((dS * bs[:, None]).to(DOT), Y, acc=dU, input_precision=PREC, out_dtype=ACC)
    dbV *= scale
    store_heads(dkeys, dU, row, h, i, here, H, K, BK)
    store_heads(dbk, dbK, row, h, i, here, H, K, BK)
    store_heads(dv, dbV * bs[:, None], row, h, i, here, H, V, BV)
    tl.store(dbeta + (row + i) * H + h, tl.sum(dbV * vs.to(ACC), 1), mask=i < here)
