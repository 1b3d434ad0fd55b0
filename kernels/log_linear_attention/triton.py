"""Log-linear attention in Triton: kernels and their launches, forward and backward.

Tokens are cut into chunks of C. A pair (i, j) of one chunk has the level bit_length(i xor j). Across chunks, chunk n
sees one node of a binary tree of chunk states for every set bit m of n: the 2^m chunks before (n >> m) << m, at level
log2(C) + 1 + m. Levels past the last weight share it. With s the scale, G a chunk's inclusive cumulative log decay,
Gam_ij = e^{G_i - G_j} for j <= i (else 0), Lam_ij the weight lambda_i of the pair's level, and for each node m seen
w_m = s e^{G + log decay from the node's end to the chunk}:

    A  = s (Q K^T) . Gam . Lam         O  = A V + sum_m lambda_m w_m Q S_m
    dA = s (dO V^T) . Gam . Lam        dQ = dA K + sum_m lambda_m w_m dO S_m^T
    dK = dA^T Q + e^{G_C - G} V dS^T   dV = A^T dO + e^{G_C - G} K dS
    dlambda = row sums over each level of s (Q K^T) . (dO V^T) . Gam, and of w_m Q . (dO S_m^T)

A node's state is S = e^{decay of the right child} S_left + S_right. Its own gradient is the sum over the chunks that
see it of (lambda_m w_m Q)^T dO; dS of a chunk is the sum over the nodes that it is part of, decayed between their ends.

Nodes lie in Fenwick's order. Only left children are ever seen, and the one that ends with chunk e, of height m = the
trailing zeros of e + 1, has slot e. Chunk n sees slots x - 1 for x = n, x & (x - 1), ... while x > 0, and is part of
the nodes in slots x - 1 for x = n + 1, x + (x & -x), ... The last chunk of a sequence is in no node that is seen.

Each kernel is parallel over chunks, and every sum has a fixed order. The decay's gradient is that of
linear_attention/triton.py: at token t, the pairs across t, from those across an earlier border less the sum over the
tokens between of u = (a token's pairs with earlier ones) - (its pairs with later ones). The two sides of u come from
differently rounded states, so such sums drift: they start anew at every eighth chunk.

States of more than BK x BV are cut into blocks (kb, vb) that are worked on apart and whose parts are added in order. A
product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import (
    LOG2_E,
    WEAKEST,
    half,
    load_rows,
    operands,
    store_rows,
    sum_dtype,
    tile,
    weight,
)
from mixassay.kernels.log_linear_attention import short_triton

LEAVES = tl.constexpr(4)  # chunks that one program of the tree's lower end takes
FAN = tl.constexpr(16)  # nodes that one program of its upper part adds up
FAR = tl.constexpr(8)  # chunks over which one program sums the gradients of the nodes that they see


@triton.jit
def _program(H, KEYS: tl.constexpr, VALUES: tl.constexpr, INNER: tl.constexpr):
    """Index along the chunks, head, key block, value block, and the fastest axis of length INNER."""
    index = tl.program_id(0).to(tl.int64)
    inner, index = (index % INNER).to(tl.int32), index // INNER
    vb, index = (index % VALUES).to(tl.int32), index // VALUES
    kb, index = (index % KEYS).to(tl.int32), index // KEYS
    return index // H, index % H, kb, vb, inner


@triton.jit
def _chunk(index, table, T, NT, GROUP: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr):
    """Of the first chunk of a group: its index, its first row, the rows left in its sequence, its number in the
    sequence, and the sequence's number of chunks. Packed sequences start a program at every chunk: those within a group
    have no rows left."""
    if PACKED:
        first = tl.load(table + 4 * index)
        left = tl.load(table + 4 * index + 1).to(tl.int32)
        n = tl.load(table + 4 * index + 2).to(tl.int32)
        count = tl.load(table + 4 * index + 3).to(tl.int32)
        left = tl.where(n % GROUP == 0, left, 0)
    else:
        groups = tl.cdiv(NT, GROUP)
        b = index // groups
        n = (index % groups * GROUP).to(tl.int32)
        index = b * NT + n
        first = b * T + n * C
        left = T - n * C
        count = NT
    return index, first, left, n, count


@triton.jit
def _log2(x):
    """Of powers of two below 2^24; negative for 0."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


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
def _between(sums, end, steps, keep):
    """Log decay from the end of a chunk to the end of that `steps` later, 0 unless `keep`."""
    later = tl.load(sums + end + steps, mask=keep, other=0.0)
    return later - tl.load(sums + end, mask=keep, other=0.0)


@triton.jit
def _seen(at_level, sums, ends, G, i, left, n, x, seen, H, L: tl.constexpr, LOG: tl.constexpr, DECAY: tl.constexpr):
    """How the rows of chunk n see the node before chunk x, if `seen`: lambda [C], and the decay from the node's end."""
    level = tl.minimum(LOG + 1 + _log2(x & -x), L - 1)
    lam = tl.load(at_level + i * H * L + level, mask=(i < left) & seen, other=0.0)
    if DECAY:
        w = weight(G + _between(sums, ends + x - 1, n - x, seen).to(G.dtype), lam.dtype)
    else:
        w = tl.full(lam.shape, 1.0, lam.dtype)
    return lam, w


@triton.jit
def decay_kernel(
    log_decay,  # [rows, H]
    g,  # [rows, H]: cumulative within the chunk, in base 2
    totals,  # [sequences, H, NT]: of each chunk, in float64
    table,
    T,
    NT,
    H,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
):
    index, block, _, _, _ = _program(tl.cdiv(H, HEADS), 1, 1, 1)
    chunk, row, left, _, _ = _chunk(index, table, T, NT, 1, C, PACKED)
    if left > 0:
        i = tl.arange(0, C)
        heads = block * HEADS + tl.arange(0, HEADS)
        keep = (i < left)[:, None] & (heads < H)[None, :]
        at = (row + i)[:, None] * H + heads[None, :]
        gs = tl.maximum(tl.load(log_decay + at, mask=keep, other=0.0).to(SUM), WEAKEST) * LOG2_E
        tl.store(g + at, tl.cumsum(gs, 0), mask=keep)
        tl.store(totals + (chunk // NT * H + heads) * NT + chunk % NT, tl.sum(gs.to(tl.float64), 0), mask=heads < H)


@triton.jit
def leaf_kernel(
    k,
    v,
    g,
    tree,  # [chunks, H, K, V]
    table,
    T,
    NT,
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
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The states of four chunks and of the nodes over them."""
    index, h, kb, vb, _ = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, first, left, n, count = _chunk(index, table, T, NT, LEAVES, C, PACKED)
    if left > 0:
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        S = tl.zeros([BK, BV], dtype=ACC)
        pair = S
        total = tl.zeros([], dtype=SUM)
        for j in tl.static_range(LEAVES):
            seen = n + j + 1 < count
            row = first + j * C
            rest = tl.where(seen, left - j * C, 0)
            ks = load_rows(k + row * keys + (h // R) * K, i, rest, kk, keys, K, BK).to(DOT)
            vs = load_rows(v + (row * H + h) * V, i, rest, vv, H * V, V, BV).to(DOT)
            before = total
            if DECAY:
                G = tl.load(g + (row + i) * H + h, mask=i < rest, other=0.0)
                total = tl.load(g + (row + C - 1) * H + h, mask=seen, other=0.0)  # only last chunks are not full
                vs = (vs * weight(total - G, ACC)[:, None]).to(DOT)
            if j % 2 == 0:
                S = tl.dot(tl.trans(ks), vs, input_precision=PREC, out_dtype=ACC)
            else:
                if DECAY:
                    S *= weight(total, ACC)
                S = tl.dot(tl.trans(ks), vs, acc=S, input_precision=PREC, out_dtype=ACC)
            if j == 1:
                pair = S
            if j == 3:
                S += pair * weight(before + total, ACC) if DECAY else pair
            at = tree + ((chunk + j) * H + h) * K * V + kk[:, None] * V + vv[None, :]
            tl.store(at, S.to(tree.dtype.element_ty), mask=keep & (n + j < count))


@triton.jit
def _since(sums, end, back, keep, DECAY: tl.constexpr, ACC: tl.constexpr):
    """The decay to the end of a chunk from the end of that `back` earlier."""
    return weight(_between(sums, end - back, back, keep), ACC) if DECAY else 1.0


@triton.jit
def up_kernel(
    tree,
    sums,  # [sequences, H, NT] cumulative log decays at the chunks' ends
    table,
    T,
    NT,
    H,
    HEIGHT: tl.constexpr,  # of the nodes that are added up
    SIZE: tl.constexpr,  # K V
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Four more heights, in place: a right child's slot is that of the first left node above which ends there too."""
    STEP: tl.constexpr = 1 << HEIGHT
    index, h, _, _, block = _program(H, 1, 1, tl.cdiv(SIZE, BLOCK))
    chunk, _, left, n, count = _chunk(index, table, T, NT, FAN * STEP, C, PACKED)
    if (left > 0) & (n + 2 * STEP < count):
        at = block * BLOCK + tl.arange(0, BLOCK)
        ends = (chunk // NT * H + h) * NT + chunk % NT
        s0 = tl.zeros([BLOCK], dtype=ACC)
        s1, s2, s3 = s0, s0, s0
        for j in tl.static_range(FAN):
            end = (j + 1) * STEP - 1
            seen = n + end + 1 < count
            to = tree + ((chunk + end) * H + h) * SIZE + at
            S = tl.load(to, mask=(at < SIZE) & seen, other=0.0).to(ACC)
            if j % 2 == 1:
                at_end = ends + end
                S += s0 * _since(sums, at_end, STEP, seen, DECAY, ACC)
                if j % 4 == 3:
                    S += s1 * _since(sums, at_end, 2 * STEP, seen, DECAY, ACC)
                if j % 8 == 7:
                    S += s2 * _since(sums, at_end, 4 * STEP, seen, DECAY, ACC)
                if j % 16 == 15:
                    S += s3 * _since(sums, at_end, 8 * STEP, seen, DECAY, ACC)
                tl.store(to, S.to(tree.dtype.element_ty), mask=(at < SIZE) & seen)
            if j % 2 == 0:
                s0 = S
            elif j % 4 == 1:
                s1 = S
            elif j % 8 == 3:
                s2 = S
            elif j % 16 == 7:
                s3 = S


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
    index, h, kb, vb, _ = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, row, left, n, _ = _chunk(index, table, T, NT, 1, C, PACKED)
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
                lam, w = _seen(at_level, sums, ends, G, i, left, n, x, left > 0, H, L, LOG, DECAY)
                os += (lam * w)[:, None] * tl.dot(qs, S, input_precision=PREC, out_dtype=ACC)
                x = x & (x - 1)
        store_rows(o + ((kb * rows + row) * H + h) * V, os * scale, i, left, vv, H * V, V, BV)


@triton.jit
def far_kernel(
    q,
    do,
    g,
    level_scale,
    sums,
    dtree,  # [chunks + parts + totals, H, K, V]
    table,
    scale,
    chunks,
    T,
    NT,
    HEIGHTS,
    H,
    R,
    PACKS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    C: tl.constexpr,
    LOG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """What eight chunks add to the gradients of the high nodes that they see: one of height 2, which their second half
    sees, and one for each bit that they share. A program takes two of these nodes. A node that more chunks see gets
    parts, one from each eight."""
    index, h, kb, vb, pack = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV), PACKS)
    chunk, first, left, n, count = _chunk(index, table, T, NT, FAR, C, PACKED)
    bits = ((n >> 2) | 1) & ((1 << (HEIGHTS - 2)) - 1)
    for _ in range(2 * pack):
        bits = bits & (bits - 1)
    if (left > 0) & (bits != 0) & ((bits != 1) | (n + FAR // 2 < count)):
        others = bits & (bits - 1)
        second = others != 0
        m = 2 + _log2(bits & -bits)
        m_second = tl.where(second, 2 + _log2(others & -others), 0)
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        ends = (chunk // NT * H + h) * NT + chunk % NT - n
        dS = tl.zeros([BK, BV], dtype=ACC)
        dS_second = tl.zeros([BK, BV], dtype=ACC)
        for j in range(tl.where(bits == 1, FAR // 2, 0), FAR):
            row = first + j * C
            rest = left - j * C
            at_level = level_scale + (row * H + h) * L
            qs = tl.trans(load_rows(q + row * keys + (h // R) * K, i, rest, kk, keys, K, BK).to(DOT))
            dos = load_rows(do + (row * H + h) * V, i, rest, vv, H * V, V, BV)
            G = tl.zeros([C], dtype=SUM)
            if DECAY:
                G = tl.load(g + (row + i) * H + h, mask=i < rest, other=0.0)
            x = (n + j) >> m << m
            seen = (rest > 0) & (((n + j) >> m & 1) == 1)
            lam, w = _seen(at_level, sums, ends, G, i, rest, n + j, x, seen, H, L, LOG, DECAY)
            ys = (dos * (lam * w)[:, None]).to(DOT)
            dS = tl.dot(qs, ys, acc=dS, input_precision=PREC, out_dtype=ACC)
            x = (n + j) >> m_second << m_second
            lam, w = _seen(at_level, sums, ends, G, i, rest, n + j, x, (rest > 0) & second, H, L, LOG, DECAY)
            ys = (dos * (lam * w)[:, None]).to(DOT)
            dS_second = tl.dot(qs, ys, acc=dS_second, input_precision=PREC, out_dtype=ACC)
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        at = kk[:, None] * V + vv[None, :]
        groups = tl.cdiv(chunks, FAR)
        node = chunk + tl.where(m == 2, FAR // 2, 0) - 1
        slot = tl.where(m > 3, chunks + (m - 4) * groups + chunk // FAR, node)
        dS = (dS * scale).to(dtree.dtype.element_ty)
        tl.store(dtree + (slot * H + h) * K * V + at, dS, mask=keep & ((m > 2) | (n + FAR // 2 < count)))
        slot = tl.where(m_second > 3, chunks + (m_second - 4) * groups + chunk // FAR, chunk - 1)
        dS_second = (dS_second * scale).to(dtree.dtype.element_ty)
        tl.store(dtree + (slot * H + h) * K * V + at, dS_second, mask=keep & second)


@triton.jit
def parts_kernel(
    dtree,
    table,
    chunks,
    T,
    NT,
    H,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of every node that more than eight chunks see, from its parts."""
    index, h, _, _, block = _program(H, 1, 1, tl.cdiv(SIZE, BLOCK))
    chunk, _, left, n, count = _chunk(index, table, T, NT, 2 * FAR, C, PACKED)
    x = n + 2 * FAR  # one after the node's last chunk
    if (left > 0) & (x < count):
        p = tl.arange(0, 8)
        at = block * BLOCK + tl.arange(0, BLOCK)
        size = x & -x
        part = chunks + (_log2(size) - 4) * tl.cdiv(chunks, FAR) + (chunk + 2 * FAR) // FAR
        number = tl.cdiv(tl.minimum(size, count - x), FAR)
        S = tl.zeros([BLOCK], dtype=ACC)
        for start in range(0, number, 8):
            mask = (start + p < number)[:, None] & (at < SIZE)[None, :]
            each = dtree + ((part + start + p) * H + h)[:, None] * SIZE + at[None, :]
            S += tl.sum(tl.load(each, mask=mask, other=0.0).to(ACC), 0)
        to = dtree + ((chunk + 2 * FAR - 1) * H + h) * SIZE + at
        tl.store(to, S.to(dtree.dtype.element_ty), mask=at < SIZE)


@triton.jit
def down_kernel(
    tree,
    dtree,
    sums,
    anchors,  # [slices of a state, sequences, H, NT]
    table,
    offset,  # where the totals begin
    sequences,
    T,
    NT,
    HEIGHTS,
    H,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """For every fourth slot the total: its gradient and those of the nodes that it is part of.

    And for every eighth border between chunks, what `gate_kernel` cannot sum from the queries: the pairs across it
    whose later half lies wholly behind it, the inner products of a node's gradient and its state up to the border."""
    index, h, _, _, block = _program(H, 1, 1, tl.cdiv(SIZE, BLOCK))
    chunk, _, left, n, count = _chunk(index, table, T, NT, LEAVES, C, PACKED)
    x = n + LEAVES
    if (left > 0) & (x < count):
        at = block * BLOCK + tl.arange(0, BLOCK)
        end = (chunk // NT * H + h) * NT + chunk % NT + LEAVES - 1
        total = tl.zeros([BLOCK], dtype=ACC)
        past = tl.zeros([BLOCK], dtype=ACC)
        pairs = tl.zeros([BLOCK], dtype=ACC)
        lowest = x & -x
        for m in range(2, HEIGHTS):
            bit = x & (1 << m)
            if DECAY:
                ends = x >> m << m
                if (bit != 0) & (x % FAR == 0):  # sees the node before
                    S = tl.load(tree + ((chunk - n + ends - 1) * H + h) * SIZE + at, mask=at < SIZE, other=0.0).to(ACC)
                    past += S * weight(_between(sums, end - (x - ends), x - ends, bit != 0), ACC)
            ends = tl.where(bit == lowest, x, (x >> m << m) + (1 << m))
            if ((bit == lowest) | ((bit == 0) & ((1 << m) > lowest))) & (ends < count):  # is part of the node
                own = tl.load(dtree + ((chunk - n + ends - 1) * H + h) * SIZE + at, mask=at < SIZE, other=0.0).to(ACC)
                if DECAY:
                    own *= weight(_between(sums, end, ends - x, ends < count), ACC)
                    pairs += past * own
                total += own
        to = dtree + ((offset + (chunk + LEAVES - 1) // LEAVES) * H + h) * SIZE + at
        tl.store(to, total.to(dtree.dtype.element_ty), mask=at < SIZE)
        if DECAY:
            tl.store(anchors + block * sequences * H * NT + end + 1, tl.sum(pairs), mask=x % FAR == 0)


@triton.jit
def near_kernel(
    q,
    do,
    g,
    level_scale,
    sums,
    dtree,
    table,
    scale,
    offset,
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
    HAS_TOTALS: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The totals of the slots between: of four chunks, the first, second and third."""
    index, h, kb, vb, _ = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, first, left, n, count = _chunk(index, table, T, NT, LEAVES, C, PACKED)
    if (left > 0) & (n + 1 < count):
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        at = kk[:, None] * V + vv[None, :]
        ends = (chunk // NT * H + h) * NT + chunk % NT
        outer = tl.zeros([BK, BV], dtype=ACC)
        if HAS_TOTALS:
            total = dtree + ((offset + (chunk + LEAVES - 1) // LEAVES) * H + h) * K * V
            outer = tl.load(total + at, mask=keep & (n + LEAVES < count), other=0.0).to(ACC)
        dS = outer
        for step in tl.static_range(4):
            j = (2, 3, 1, 3)[step]  # this chunk
            node = (1, 1, 0, 2)[step]  # sees the node of this slot
            rest = left - j * C
            row = first + j * C
            at_level = level_scale + (row * H + h) * L
            qs = load_rows(q + row * keys + (h // R) * K, i, rest, kk, keys, K, BK).to(DOT)
            dos = load_rows(do + (row * H + h) * V, i, rest, vv, H * V, V, BV)
            G = tl.zeros([C], dtype=SUM)
            if step == 3:
                dS = outer
            if DECAY:
                G = tl.load(g + (row + i) * H + h, mask=i < rest, other=0.0)
                if step == 2:  # from the node around this one
                    dS *= weight(_between(sums, ends, 1, n + 2 < count), ACC)
                elif step != 1:
                    dS *= weight(_between(sums, ends + node, 3 - node, n + LEAVES < count), ACC)
            lam, w = _seen(at_level, sums, ends - n, G, i, rest, n + j, n + node + 1, rest > 0, H, L, LOG, DECAY)
            ys = (dos * (lam * w * scale)[:, None]).to(DOT)
            dS = tl.dot(tl.trans(qs), ys, acc=dS, input_precision=PREC, out_dtype=ACC)
            if step > 0:
                to = dtree + ((chunk + node) * H + h) * K * V + at
                tl.store(to, dS.to(dtree.dtype.element_ty), mask=keep & (n + node + 1 < count))


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
    index, h, kb, vb, _ = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, row, left, n, count = _chunk(index, table, T, NT, 1, C, PACKED)
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
    index, h, kb, vb, _ = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, row, left, n, _ = _chunk(index, table, T, NT, 1, C, PACKED)
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
                own, w = _seen(at_level, sums, ends, G, i, left, n, x, left > 0, H, L, LOG, DECAY)
                D = tl.dot(dos, ST, input_precision=PREC, out_dtype=ACC) * (w * scale)[:, None]
                of_level = tl.sum(qs * D, 1)
                column = tl.minimum(LOG + 1 + _log2(x & -x), L - 1)
                dlam += tl.where(columns[None, :] == column, of_level[:, None], 0.0)
                if DECAY:
                    us += own * of_level
                    height = (block * HEIGHTS + _log2(x & -x)) * sequences * H * NT
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
    index, h, _, _, _ = _program(H, 1, 1, 1)
    chunk, row, left, n, count = _chunk(index, table, T, NT, 1, C, PACKED)
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


SLICE = 1024  # elements of a state that one program adds up, where it only adds


class Launch(NamedTuple):
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers of a thread


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    block: int  # largest BK and BV
    leaf: Launch
    output: Launch
    far: Launch
    near: Launch
    keys: Launch
    queries: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    two, three = Launch(4, 2), Launch(8, 3)
    if half(dtype) and max(K, V) > 64:
        return Plan(64, 128, Launch(8, 1), two, three, Launch(8, 1), keys=Launch(4, 1), queries=two)
    if half(dtype):  # fewer registers: more programs at a time
        return Plan(64, 64, Launch(4, 1), two, two, Launch(4, 1), keys=Launch(4, 1, 128), queries=Launch(4, 2, 168))
    exact = operands(dtype)[2] == "ieee"  # without tensor cores
    other = Launch(8 if exact else 4, 1)
    return Plan(32, 64, other, other, other, other, other, other)


class Chunks(NamedTuple):
    """Sequences cut into chunks: the numbers that `_chunk` reads."""

    total: int  # exact, or enough if packed
    sequences: int  # rows of [sequences, H, NT] tensors: packed sequences lie in one
    T: int
    NT: int  # chunks in such a row
    table: Tensor | None  # [chunks, 4] first row, rows left, number, number of chunks in the sequence

    @classmethod
    def of(cls, B: int, T: int, C: int, cu_seqlens: Tensor | None) -> "Chunks":
        NT = -(-T // C)
        if cu_seqlens is None:
            return cls(B * NT, B, T, NT, None)
        total = T // C + cu_seqlens.shape[0] - 1
        return cls(total, 1, T, total, _packed(cu_seqlens, C, total))

    def groups(self, size: int) -> int:
        """Programs that groups of so many chunks need."""
        return self.total if self.table is not None else self.sequences * -(-self.NT // size)


def _packed(cu_seqlens: Tensor, C: int, total: int) -> Tensor:
    """Computed on the device without waiting for it. Superfluous chunks have no rows, empty sequences no chunks."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    count = (end - begin + C - 1) // C
    after = count.cumsum(0)
    index = torch.arange(total, device=begin.device)
    sequence = torch.searchsorted(after, index, right=True).clamp(max=len(begin) - 1)
    n = index - (after - count)[sequence]
    first = begin[sequence] + n * C
    return torch.stack([first, (end[sequence] - first).clamp(min=0), n, count[sequence]], dim=1)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what states are kept: in what a product reads them."""
    return torch.float32 if dtype == torch.float32 else dtype


def tree_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...] | None:
    """Of what `forward` keeps. None if no sequence has two chunks, or rows are short."""
    (B, T, _, K), (H, V) = q.shape, v.shape[2:]
    C = plan(q.dtype, K, V).C
    if T <= C or _short(q, v, cu_seqlens):
        return None
    chunks = Chunks.of(B, T, C, cu_seqlens)
    return chunks.sequences, chunks.NT, H, K, V


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o, and for the backward the tree of chunk states, if a sequence has more than one chunk and is not short."""
    if how is None and _short(q, v, cu_seqlens):
        return short_triton.forward(q, k, v, level_scale, log_decay, scale), None
    call = _Call(q, k, v, level_scale, log_decay, scale, cu_seqlens, how)
    tree = call.tree() if call.heights else None
    o = call.parts(call.keys, v)
    call.launch(
        output_kernel,
        call.how.output,
        call.chunks.total * call.blocks,
        (*call.tensors, tree, call.sums, o),
        **call.shared("scale", "rows", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC"),
        HAS_TREE=tree is not None,
    )
    return call.joined(o, v), tree


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    tree: Tensor | None,
    do: Tensor,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, level_scale and log_decay; `tree` from `forward` with the same plan."""
    if how is None and _short(q, v, cu_seqlens):
        return short_triton.backward(q, k, v, level_scale, log_decay, scale, do)
    call = _Call(q, k, v, level_scale, log_decay, scale, cu_seqlens, how)
    rows, H, L, chunks = call.rows, v.shape[2], level_scale.shape[-1], call.chunks
    do = do.to(v.dtype).contiguous()
    dtree, anchors, offset = call.dtree(do, tree) if tree is not None else (None, None, 0)
    dq, dk, dv = call.parts(call.values, q), call.parts(call.values, k), call.parts(call.keys, v)
    blocks = call.keys * call.values
    dlevel = q.new_empty((blocks, rows, H, L), dtype=call.acc)
    u = along = across = None
    if call.g is not None:
        u = q.new_empty((blocks, rows, H), dtype=call.acc)
        along = q.new_empty((blocks, chunks.sequences, H, chunks.NT), dtype=call.acc)
        across = q.new_empty((blocks, call.heights, chunks.sequences, H, chunks.NT), dtype=call.acc)
    shared = call.shared("scale", "rows", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC")
    programs = chunks.total * call.blocks
    call.launch(
        keys_kernel,
        call.how.keys,
        programs,
        (*call.tensors, do, dtree, dk, dv, u),
        offset=offset,
        HAS_TREE=tree is not None,
        **shared,
    )
    call.launch(
        queries_kernel,
        call.how.queries,
        programs,
        (*call.tensors, do, tree, call.sums, dq, dlevel, u, along, across),
        sequences=chunks.sequences,
        HEIGHTS=call.heights,
        LP=triton.next_power_of_2(L),
        HAS_TREE=tree is not None,
        **shared,
    )
    dg = None
    if log_decay is not None:
        dg = q.new_empty(log_decay.shape, dtype=call.acc)
        call.launch(
            gate_kernel,
            Launch(1, 1),
            chunks.total * H,
            (u, along, across, anchors, call.log_decay, dg),
            **call.shared("rows"),
            sequences=chunks.sequences,
            HEIGHTS=call.heights,
            BLOCKS=blocks,
            SLICES=call.slices,
            SLICES_P2=triton.next_power_of_2(call.slices),
            BLOCK=128,
            DEEP=call.heights > 3,
        )
        dg = dg.to(log_decay.dtype)
    dlevel = (dlevel[0] if blocks == 1 else dlevel.sum(0)).view(level_scale.shape).to(level_scale.dtype)
    return call.joined(dq, q), call.joined(dk, k), call.joined(dv, v), dlevel, dg


def _short(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    return cu_seqlens is None and short_triton.serves(q.dtype, q.shape[1], q.shape[3], v.shape[3])


class _Call:
    """The sizes of one call, its operands made contiguous, and what its launches share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        level_scale: Tensor,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
    ) -> None:
        (B, T, G, K), (H, V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, K, V)
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.state = state_dtype(q.dtype)
        self.level_scale = level_scale.to(self.acc).contiguous()
        self.log_decay = None if log_decay is None else log_decay.to(self.acc).contiguous()
        BK, BV = (min(self.how.block, tile(D)) for D in (K, V))
        self.keys, self.values = triton.cdiv(K, BK), triton.cdiv(V, BV)
        self.rows, self.heads, self.shape = B * T, H, (H, K, V)
        self.blocks, self.slices = H * self.keys * self.values, triton.cdiv(K * V, SLICE)
        self.chunks = Chunks.of(B, T, self.how.C, cu_seqlens)
        self.heights = (triton.cdiv(T, self.how.C) - 1).bit_length()  # the nodes that are seen have heights below
        dot, self.tl_acc, precision = operands(q.dtype)
        self.values_of = {
            "scale": scale,
            "rows": self.rows,
            "R": H // G,
            "K": K,
            "V": V,
            "L": level_scale.shape[-1],
            "LOG": self.how.C.bit_length() - 1,
            "BK": BK,
            "BV": BV,
            "DECAY": log_decay is not None,
            "DOT": dot,
            "SUM": sum_dtype(q.dtype),
            "PREC": precision,
        }
        self.g, self.sums = self.decays()
        self.tensors = (self.q, self.k, self.v, self.g, self.level_scale)

    def shared(self, *names: str) -> dict[str, Any]:
        return {name: self.values_of[name] for name in names}

    def launch(
        self, kernel: Any, launch: Launch, programs: int, tensors: tuple[Tensor | None, ...], **flags: Any
    ) -> None:
        kernel[(programs,)](
            *tensors,
            table=self.chunks.table,
            T=self.chunks.T,
            NT=self.chunks.NT,
            H=self.heads,
            C=self.how.C,
            PACKED=self.chunks.table is not None,
            ACC=self.tl_acc,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            maxnreg=launch.maxnreg,
            **flags,
        )

    def elementwise(self, kernel: Any, group: int, tensors: tuple[Tensor | None, ...], **flags: Any) -> None:
        """A kernel over groups of chunks, and over the elements of a state."""
        _, K, V = self.shape
        programs = self.chunks.groups(group) * self.heads * self.slices
        self.launch(kernel, Launch(4, 1), programs, tensors, SIZE=K * V, BLOCK=SLICE, **flags)

    def decays(self) -> tuple[Tensor | None, Tensor | None]:
        """Cumulative log decays: of tokens within their chunk [rows, H], and at the chunks' ends [sequences, H, NT]."""
        if self.log_decay is None:
            return None, None
        H, chunks = self.heads, self.chunks
        wide = torch.float32 if half(self.q.dtype) else torch.float64
        g = self.q.new_empty((self.rows, H), dtype=wide)
        totals = self.q.new_empty((chunks.sequences, H, chunks.NT), dtype=torch.float64)
        HEADS = min(16, triton.next_power_of_2(H))
        self.launch(
            decay_kernel,
            Launch(4, 1),
            chunks.total * triton.cdiv(H, HEADS),
            (self.log_decay, g, totals),
            HEADS=HEADS,
            **self.shared("SUM"),
        )
        return g, totals.cumsum(-1) if self.heights else totals

    def tree(self) -> Tensor:
        """The states that chunks see."""
        chunks, (H, K, V) = self.chunks, self.shape
        # Superfluous chunks of packed sequences write nothing: zeros, so that reruns are equal.
        new = self.q.new_empty if chunks.table is None else self.q.new_zeros
        tree = new((chunks.sequences, chunks.NT, H, K, V), dtype=self.state)
        self.launch(
            leaf_kernel,
            self.how.leaf,
            chunks.groups(LEAVES) * self.blocks,
            (self.k, self.v, self.g, tree),
            **self.shared("R", "K", "V", "BK", "BV", "DECAY", "DOT", "SUM", "PREC"),
        )
        for height in range(2, self.heights - 1, 4):
            self.elementwise(up_kernel, FAN << height, (tree, self.sums), HEIGHT=height, **self.shared("DECAY"))
        return tree

    def dtree(self, do: Tensor, tree: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """The gradients of the tree's slots, and after them the parts and, from the offset on, the totals that they are
        summed up with; the anchors of the decay's gradient."""
        total, heights = self.chunks.total, self.heights
        offset = total + max(heights - 4, 0) * triton.cdiv(total, FAR)
        size = offset + (triton.cdiv(total, LEAVES) if heights > 2 else 0)
        dtree = self.q.new_empty((size, *self.shape), dtype=self.state)
        anchors = None
        inputs = (self.q, do, self.g, self.level_scale, self.sums, dtree)
        shared = self.shared("scale", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC")
        if heights > 2:
            packs = triton.cdiv(heights - 2, 2)
            programs = self.chunks.groups(FAR) * self.blocks * packs
            self.launch(
                far_kernel, self.how.far, programs, inputs, chunks=total, HEIGHTS=heights, PACKS=packs, **shared
            )
            if heights > 4:
                self.elementwise(parts_kernel, 2 * FAR, (dtree,), chunks=total)
            if self.sums is not None:
                anchors = self.sums.new_empty((self.slices, *self.sums.shape), dtype=self.acc)
            self.elementwise(
                down_kernel,
                LEAVES,
                (tree, dtree, self.sums, anchors),
                offset=offset,
                sequences=self.chunks.sequences,
                HEIGHTS=heights,
                **self.shared("DECAY"),
            )
        programs = self.chunks.groups(LEAVES) * self.blocks
        self.launch(near_kernel, self.how.near, programs, inputs, offset=offset, HAS_TOTALS=heights > 2, **shared)
        return dtree, anchors, offset

    def parts(self, n: int, like: Tensor) -> Tensor:
        """Room for n addends of every head of `like`, in its dtype if nothing is to be added."""
        heads, width = like.shape[2:]
        alone = n == 1 and heads == self.heads
        return like.new_empty((n, self.rows, self.heads, width), dtype=like.dtype if alone else self.acc)

    def joined(self, parts: Tensor, like: Tensor) -> Tensor:
        """Sum the addends, and the heads that share a head of `like`."""
        if parts.shape[0] == 1 and parts.shape[2] == like.shape[2]:
            return parts.view(like.shape)
        parts = parts.unflatten(2, (like.shape[2], -1))  # [n, rows, G, H / G, width]
        return parts.sum((0, 3)).view(like.shape).to(like.dtype)
