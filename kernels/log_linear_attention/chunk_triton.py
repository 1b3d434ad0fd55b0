"""What the chunks of log-linear attention read, of their own tokens and of the tree, in Triton, and its gradients.

With the names of triton.py, dS being the gradient of the chunk's own state:

    A  = s (Q K^T) . Gam . Lam         O  = A V + sum_m lambda_m w_m Q S_m
    dA = s (dO V^T) . Gam . Lam        dQ = dA K + sum_m lambda_m w_m dO S_m^T
    dK = dA^T Q + e^{G_C - G} V dS^T   dV = A^T dO + e^{G_C - G} K dS
    dlambda = row sums over each level of s (Q K^T) . (dO V^T) . Gam, and of w_m Q . (dO S_m^T)

The decay's gradient is that of linear_attention/segments_triton.py: at token t, the pairs across t, from those across
an earlier border less the sum over the tokens between of u = (a token's pairs with earlier ones) - (its pairs with
later ones). The two sides of u come from differently rounded states, so such sums drift: they start anew at every
eighth chunk.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import WEAKEST, load_rows, store_rows, weight
from mixassay.kernels.log_linear_attention.nodes_triton import FAR, LEAVES, chunk_of, how_seen, log2, program_of


@triton.jit
def _of_level(x, level: tl.constexpr):
    """Whether the bit length of x is `level`."""
    return (x >= 1 << level >> 1) & (x < 1 << level)


@triton.jit
def _weights(at, i, left, stride, L: tl.constexpr, LOG: tl.constexpr):
    """Lam [C, C] from row 0 of level_scale at `at`. Away from the diagonal blocks of 16, aligned blocks of 16 columns
    have one weight in each row."""
    C: tl.constexpr = 1 << LOG
    column, block = tl.arange(0, 16), tl.arange(0, C // 16)
    x = (i % 16)[:, None] ^ column[None, :]
    y = (i // 16)[:, None] ^ block[None, :]
    near = tl.load(at + i * stride, mask=i < left, other=0.0)[:, None] + tl.zeros_like(x)
    far = tl.zeros([C, C // 16], dtype=near.dtype)
    for level in tl.static_range(1, LOG + 1):
        lam = tl.load(at + i * stride + (level if level < L else L - 1), mask=i < left, other=0.0)
        if level <= 4:
            near = tl.where(_of_level(x, level), lam[:, None], near)
        else:
            far = tl.where(_of_level(y, level - 4), lam[:, None], far)
    return tl.reshape(tl.where((y == 0)[:, :, None], near[:, None, :], far[:, :, None]), [C, C])


@triton.jit
def _sums(pairs, i, columns, L: tl.constexpr, LOG: tl.constexpr):
    """Row sums of [C, C] over each level, in columns of [C, columns]; zeros in the others."""
    C: tl.constexpr = 1 << LOG
    column, block = tl.arange(0, 16), tl.arange(0, C // 16)
    x = (i % 16)[:, None] ^ column[None, :]
    y = (i // 16)[:, None] ^ block[None, :]
    pairs = tl.reshape(pairs, [C, C // 16, 16])
    near = tl.sum(tl.where((y == 0)[:, :, None], pairs, 0.0), 1)
    far = tl.sum(pairs, 2)
    sums = tl.zeros([C, columns.shape[0]], dtype=pairs.dtype)
    for level in tl.static_range(LOG + 1):
        if level <= 4:
            of_level = tl.sum(tl.where(_of_level(x, level), near, 0.0), 1)
        else:
            of_level = tl.sum(tl.where(_of_level(y, level - 4), far, 0.0), 1)
        sums += tl.where(columns[None, :] == (level if level < L else L - 1), of_level[:, None], 0.0)
    return sums


@triton.jit
def output_kernel(
    q,
    k,
    v,
    g,
    level_scale,  # [rows, H, L]
    tree,
    sums,
    o,  # [key blocks, rows, H, V]
    table,
    scale,
    rows,
    T,
    NT,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    LOG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_TREE: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    index, h, kb, vb, _ = program_of(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, row, left, n, _ = chunk_of(index, table, T, NT, 1, C, PACKED)
    if left > 0:
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        at_key = row * keys + (h // R) * K
        at_level = level_scale + (row * H + h) * L
        qs = load_rows(q + at_key, i, left, kk, keys, K, BK).to(DOT)
        ks = load_rows(k + at_key, i, left, kk, keys, K, BK).to(DOT)
        vs = load_rows(v + (row * H + h) * V, i, left, vv, H * V, V, BV).to(DOT)
        A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
        A *= _weights(at_level, i, left, H * L, L, LOG)
        G = tl.zeros([C], dtype=SUM)
        if DECAY:
            G = tl.load(g + (row + i) * H + h, mask=i < left, other=0.0)
            A *= weight(G[:, None] - G[None, :], ACC)
        A = tl.where(i[:, None] >= i[None, :], A, 0.0).to(DOT)
        os = tl.dot(A, vs, input_precision=PREC, out_dtype=ACC)
        if HAS_TREE:
            keep = (kk < K)[:, None] & (vv < V)[None, :]
            at = kk[:, None] * V + vv[None, :]
            ends = (chunk // NT * H + h) * NT + chunk % NT - n
            x = n
            for _ in range(tl.sum((n >> tl.arange(0, 32)) & 1)):
                S = tl.load(tree + ((chunk - n + x - 1) * H + h) * K * V + at, mask=keep, other=0.0)
                lam, w = how_seen(at_level, sums, ends, G, i, left, n, x, left > 0, H, L, LOG, DECAY)
                os += (lam * w)[:, None] * tl.dot(qs, S, input_precision=PREC, out_dtype=ACC)
                x = x & (x - 1)
        store_rows(o + ((kb * rows + row) * H + h) * V, os * scale, i, left, vv, H * V, V, BV)


@triton.jit
def keys_kernel(
    q,
    k,
    v,
    g,
    level_scale,
    do,
    dtree,
    dk,  # [value blocks, rows, H, K]
    dv,  # [key blocks, rows, H, V]
    u,  # [blocks, rows, H]: minus a token's pairs with later ones
    table,
    scale,
    offset,
    rows,
    T,
    NT,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    LOG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_TREE: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """dK and dV of one chunk, from the transposes of A and dA."""
    index, h, kb, vb, _ = program_of(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, row, left, n, count = chunk_of(index, table, T, NT, 1, C, PACKED)
    if left > 0:
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        at_key = row * keys + (h // R) * K
        at_value = (row * H + h) * V
        qs = load_rows(q + at_key, i, left, kk, keys, K, BK).to(DOT)
        ks = load_rows(k + at_key, i, left, kk, keys, K, BK).to(DOT)
        vs = load_rows(v + at_value, i, left, vv, H * V, V, BV).to(DOT)
        dos = load_rows(do + at_value, i, left, vv, H * V, V, BV).to(DOT)
        if HAS_TREE:
            slot = tl.where((n + 1) % LEAVES == 0, offset + chunk // LEAVES, chunk)
            at = dtree + (slot * H + h) * K * V + kk[:, None] * V + vv[None, :]
            dS = tl.load(at, mask=(kk < K)[:, None] & (vv < V)[None, :] & (n + 1 < count), other=0.0)
        lam = tl.trans(_weights(level_scale + (row * H + h) * L, i, left, H * L, L, LOG))  # [j, i]
        lam = tl.where(i[:, None] <= i[None, :], lam * scale, 0.0)
        G = tl.zeros([C], dtype=SUM)
        total = tl.zeros([], dtype=SUM)
        if DECAY:
            G = tl.load(g + (row + i) * H + h, mask=i < left, other=0.0)
            total = tl.load(g + (row + tl.minimum(left, C) - 1) * H + h)
            lam *= weight(G[None, :] - G[:, None], ACC)
        to_end = weight(total - G, ACC)

        AT = tl.dot(ks, tl.trans(qs), input_precision=PREC, out_dtype=ACC) * lam
        dAT = tl.dot(vs, tl.trans(dos), input_precision=PREC, out_dtype=ACC)
        us = tl.zeros([C], dtype=ACC)
        if DECAY:
            us -= tl.sum(tl.where(i[:, None] < i[None, :], AT * dAT, 0.0), 1)
        AT = AT.to(DOT)
        dAT = (dAT * lam).to(DOT)
        dvs = tl.zeros([C, BV], dtype=ACC)
        if HAS_TREE:
            dvs = tl.dot(ks, dS, input_precision=PREC, out_dtype=ACC)
            if DECAY:
                dvs *= to_end[:, None]
                us -= tl.sum(dvs * vs, 1)
        dvs = tl.dot(AT, dos, acc=dvs, input_precision=PREC, out_dtype=ACC)
        store_rows(dv + ((kb * rows + row) * H + h) * V, dvs, i, left, vv, H * V, V, BV)

        dks = tl.zeros([C, BK], dtype=ACC)
        if HAS_TREE:
            dks = tl.dot(vs, tl.trans(dS), input_precision=PREC, out_dtype=ACC)
            if DECAY:
                dks *= to_end[:, None]
        dks = tl.dot(dAT, qs, acc=dks, input_precision=PREC, out_dtype=ACC)
        store_rows(dk + ((vb * rows + row) * H + h) * K, dks, i, left, kk, H * K, K, BK)
        if DECAY:
            tl.store(u + ((kb * tl.cdiv(V, BV) + vb) * rows + row + i) * H + h, us, mask=i < left)


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    g,
    level_scale,
    do,
    tree,
    sums,
    dq,  # [value blocks, rows, H, K]
    dlevel,  # [blocks, rows, H, L]
    u,  # [blocks, rows, H]: from `keys_kernel`, to which the pairs with earlier tokens are added
    along,  # [blocks, sequences, H, NT]: the sum of u over each chunk
    across,  # [blocks, heights, sequences, H, NT]: that of its pairs with the node of each height
    table,
    scale,
    rows,
    sequences,
    HEIGHTS,
    T,
    NT,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,  # L, up to a power of two
    C: tl.constexpr,
    LOG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_TREE: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """dQ and dlambda of one chunk, and u of its tokens."""
    index, h, kb, vb, _ = program_of(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, row, left, n, _ = chunk_of(index, table, T, NT, 1, C, PACKED)
    if left > 0:
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        columns = tl.arange(0, LP)
        keys = (H // R) * K
        at_key = row * keys + (h // R) * K
        at_value = (row * H + h) * V
        at_level = level_scale + (row * H + h) * L
        block = kb * tl.cdiv(V, BV) + vb
        qs = load_rows(q + at_key, i, left, kk, keys, K, BK).to(DOT)
        ks = load_rows(k + at_key, i, left, kk, keys, K, BK).to(DOT)
        vs = load_rows(v + at_value, i, left, vv, H * V, V, BV).to(DOT)
        dos = load_rows(do + at_value, i, left, vv, H * V, V, BV).to(DOT)
        dA = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC)
        dA = tl.where(i[:, None] >= i[None, :], dA * scale, 0.0)
        G = tl.zeros([C], dtype=SUM)
        us = tl.zeros([C], dtype=ACC)
        if DECAY:
            G = tl.load(g + (row + i) * H + h, mask=i < left, other=0.0)
            us += tl.load(u + (block * rows + row + i) * H + h, mask=i < left, other=0.0)
            dA *= weight(G[:, None] - G[None, :], ACC)
        pairs = dA * tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
        dlam = _sums(pairs, i, columns, L, LOG)
        lam = _weights(at_level, i, left, H * L, L, LOG)
        if DECAY:
            us += tl.sum(tl.where(i[:, None] > i[None, :], pairs * lam, 0.0), 1)
        dqs = tl.dot((dA * lam).to(DOT), ks, input_precision=PREC, out_dtype=ACC)
        if HAS_TREE:
            at = kk[None, :] * V + vv[:, None]
            keep = (kk < K)[None, :] & (vv < V)[:, None]
            ends = (chunk // NT * H + h) * NT + chunk % NT - n
            x = n
            for _ in range(tl.sum((n >> tl.arange(0, 32)) & 1)):
                ST = tl.load(tree + ((chunk - n + x - 1) * H + h) * K * V + at, mask=keep, other=0.0)
                own, w = how_seen(at_level, sums, ends, G, i, left, n, x, left > 0, H, L, LOG, DECAY)
                D = tl.dot(dos, ST, input_precision=PREC, out_dtype=ACC) * (w * scale)[:, None]
                of_level = tl.sum(qs * D, 1)
                column = tl.minimum(LOG + 1 + log2(x & -x), L - 1)
                dlam += tl.where(columns[None, :] == column, of_level[:, None], 0.0)
                if DECAY:
                    us += own * of_level
                    height = (block * HEIGHTS + log2(x & -x)) * sequences * H * NT
                    tl.store(across + height + ends + n, tl.sum(own * of_level))
                dqs += own[:, None] * D
                x = x & (x - 1)
        store_rows(dq + ((vb * rows + row) * H + h) * K, dqs, i, left, kk, H * K, K, BK)
        at = dlevel + ((block * rows + row + i) * H + h)[:, None] * L + columns[None, :]
        tl.store(at, dlam, mask=(i < left)[:, None] & (columns < L)[None, :])
        if DECAY:
            tl.store(u + (block * rows + row + i) * H + h, us, mask=i < left)
            tl.store(along + ((block * sequences + chunk // NT) * H + h) * NT + chunk % NT, tl.sum(us))


@triton.jit
def gate_kernel(
    u,
    along,
    across,
    anchors,
    log_decay,
    dg,  # [rows, H]
    table,
    rows,
    sequences,
    T,
    NT,
    HEIGHTS,
    H,
    BLOCKS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICES_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    DEEP: tl.constexpr,  # whether there are anchors
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """The pairs across a border of eight chunks, from the anchor and the queries behind it, then minus the sum of u."""
    index, h, _, _, _ = program_of(H, 1, 1, 1)
    chunk, row, left, n, count = chunk_of(index, table, T, NT, 1, C, PACKED)
    if left > 0:
        i = tl.arange(0, C)
        each = tl.arange(0, BLOCK)
        border = n // FAR * FAR
        start = (chunk // NT * H + h) * NT + chunk % NT - n  # of the sequence, in a row of NT chunks
        size = sequences * H * NT
        pairs = tl.zeros([BLOCK], dtype=ACC)
        us = tl.zeros([C], dtype=ACC)
        for block in tl.static_range(BLOCKS):
            pairs -= tl.load(along + block * size + start + border + each, mask=border + each < n, other=0.0)
            us += tl.load(u + (block * rows + row + i) * H + h, mask=i < left, other=0.0)
            if DEEP:
                for m in range(4, HEIGHTS):
                    # Chunks from here on see the node of height m before this border.
                    seen = (border >> m & 1 == 1) & ((1 << m) > (border & -border))
                    stop = tl.where(seen, tl.minimum(((border >> m) + 1) << m, count), border)
                    at = across + (block * HEIGHTS + m) * size + start
                    for first in range(border, stop, BLOCK):
                        pairs += tl.load(at + first + each, mask=first + each < stop, other=0.0)
        E = tl.sum(pairs)
        if DEEP:
            part = tl.arange(0, SLICES_P2)
            E += tl.sum(tl.load(anchors + part * size + start + border, mask=(part < SLICES) & (border > 0), other=0.0))
        raw = tl.load(log_decay + (row + i) * H + h, mask=i < left, other=0.0)
        tl.store(dg + (row + i) * H + h, tl.where(raw < WEAKEST, 0.0, E + us - tl.cumsum(us)), mask=i < left)
