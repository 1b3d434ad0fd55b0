"""Log-linear attention in Triton: kernels and their launches, forward and backward.

Tokens are cut into chunks of C. A pair (i, j) of one chunk has the level bit_length(i xor j). Across chunks, chunk n sees
one node of a binary tree of chunk states for every set bit m of n: the 2^m chunks before (n >> m) << m, at level
log2(C) + 1 + m. With G the inclusive cumulative log decay of a chunk, Lam the weights of its pairs, s the scale:

    Gam_ij = e^{G_i - G_j},  A = s (Q K^T) . Gam . Lam        w_m = s e^{G + decay from the node's end to the chunk}
    O = A V + sum_m lambda_m w_m Q S_m                        S = e^{decay of right} S_left + S_right, up from the leaves
    dS_m = sum over the 2^m chunks that see the node of (lambda_m w_m Q)^T dO
    dS of a leaf = sum of e^{decay between their ends} dS over the nodes that it is part of
    dA = s (dO V^T) . Gam . Lam    dQ = dA K + sum_m lambda_m w_m dO S_m^T      dlambda_m = w_m (Q . dO S_m^T) 1
    dK = dA^T Q + e^{G_C - G} V dS^T    dV = A^T dO + e^{G_C - G} K dS          dlambda_l = (dA . Q K^T)_{level l} 1 / Lam

The tree is stored as Fenwick's: only left children are ever read, and the one whose last chunk is e, of height m = the
trailing zeros of e + 1, has slot e. Chunk n then reads slot x - 1 for x = n, x & (x - 1), ... while x > 0, and its own
state is part of the slots x - 1 for x = n + 1, x + (x & -x), ... The last chunk of a sequence is in no node that is read.

Each kernel is parallel over chunks, and every sum has a fixed order. The decay's gradient is that of
linear_attention/triton.py: minus the sum over the tokens before t of u = (a token's pairs with earlier ones) - (its pairs
with later ones). Those sums cancel over long sequences: they are taken in two levels, over chunks in float64.

States of more than BK x BV are cut into blocks (kb, vb) that are worked on apart and whose parts are added in order. A
product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import WEAKEST, load_log_decay, load_rows, operands, store_rows, sum_dtype, weight

LEAVES = tl.constexpr(4)  # chunks whose states one program adds up
FAN = tl.constexpr(16)  # nodes that a program of the tree's upper part adds up
FAR = tl.constexpr(8)  # chunks that a program sums the gradient of a high node over
FAR_HEIGHT = tl.constexpr(3)  # log2(FAR): higher nodes have more than one such program


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
def _weights(at, i, left, stride, L: tl.constexpr, LOG: tl.constexpr):
    """Lam [C, C], from row 0 of level_scale at `at`."""
    x = i[:, None] ^ i[None, :]
    lam = tl.load(at + i * stride, mask=i < left, other=0.0)[:, None] + tl.zeros_like(x)
    for level in tl.static_range(1, LOG + 1):
        column = level if level < L else L - 1
        own = tl.load(at + i * stride + column, mask=i < left, other=0.0)
        lam = tl.where(x >= 1 << (level - 1), own[:, None], lam)
    return lam


@triton.jit
def leaf_kernel(
    k,
    v,
    g,
    tree,  # [chunks, H, K, V]
    totals,  # [sequences, H, NT] log decay of each chunk, in base 2 and float64
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
    if (left > 0) & (n + 1 < count):
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
                gs = load_log_decay(g + row * H + h, i, rest, H, SUM)
                total = tl.sum(gs)
                vs = (vs * weight(total - tl.cumsum(gs), ACC)[:, None]).to(DOT)
                at_total = totals + ((chunk + j) // NT * H + h) * NT + (chunk + j) % NT
                tl.store(at_total, total.to(tl.float64), mask=seen & (kb == 0) & (vb == 0))
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
            tl.store(at, S.to(tree.dtype.element_ty), mask=keep & seen)


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
        s0 = tl.zeros([BLOCK], dtype=ACC)
        s1, s2, s3 = s0, s0, s0
        for j in tl.static_range(FAN):
            end = (j + 1) * STEP - 1
            seen = n + end + 1 < count
            to = tree + ((chunk + end) * H + h) * SIZE + at
            S = tl.load(to, mask=(at < SIZE) & seen, other=0.0).to(ACC)
            if j % 2 == 1:
                e = chunk + end
                last = (e // NT * H + h) * NT + e % NT
                S += s0 * _since(sums, last, STEP, seen, DECAY, ACC)
                if j % 4 == 3:
                    S += s1 * _since(sums, last, 2 * STEP, seen, DECAY, ACC)
                if j % 8 == 7:
                    S += s2 * _since(sums, last, 4 * STEP, seen, DECAY, ACC)
                if j % 16 == 15:
                    S += s3 * _since(sums, last, 8 * STEP, seen, DECAY, ACC)
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
def _since(sums, last, back, keep, DECAY: tl.constexpr, ACC: tl.constexpr):
    """The decay from `back` chunk ends before to this one."""
    if DECAY:
        step = tl.load(sums + last, mask=keep, other=0.0) - tl.load(sums + last - back, mask=keep, other=0.0)
        w = weight(step, ACC)
    else:
        w = 1.0
    return w


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
    chunk, row, left, n, count = _chunk(index, table, T, NT, 1, C, PACKED)
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
        if DECAY:
            G = tl.cumsum(load_log_decay(g + row * H + h, i, left, H, SUM))
            A *= weight(G[:, None] - G[None, :], ACC)
        A = tl.where(i[:, None] >= i[None, :], A, 0.0).to(DOT)
        os = tl.dot(A, vs, input_precision=PREC, out_dtype=ACC)
        if HAS_TREE:
            keep = (kk < K)[:, None] & (vv < V)[None, :]
            at = kk[:, None] * V + vv[None, :]
            x = n
            for _ in range(tl.sum((n >> tl.arange(0, 32)) & 1)):
                e = chunk - n + x - 1
                level = LOG + 1 + _log2(x & -x)
                S = tl.load(tree + (e * H + h) * K * V + at, mask=keep, other=0.0)
                lam = tl.load(at_level + i * H * L + tl.minimum(level, L - 1), mask=i < left, other=0.0).to(ACC)
                if DECAY:
                    ends = sums + (chunk // NT * H + h) * NT
                    since = tl.load(ends + chunk % NT - 1) - tl.load(ends + e % NT)
                    lam *= weight(G + since.to(SUM), ACC)
                os += lam[:, None] * tl.dot(qs, S, input_precision=PREC, out_dtype=ACC)
                x = x & (x - 1)
        store_rows(o + ((kb * rows + row) * H + h) * V, os * scale, i, left, vv, H * V, V, BV)


@triton.jit
def node_kernel(
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
    TOP,  # heights from LOW to below TOP
    H,
    R,
    LOW: tl.constexpr,
    GROUP: tl.constexpr,  # 2^(LOW + 1)
    PACKS: tl.constexpr,
    W: tl.constexpr,
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
    """What GROUP chunks add to the gradients of the nodes that they see: a node of height LOW, seen by their second half,
    and one for each higher set bit. A program takes W of these nodes, side by side in one product. Nodes seen by more
    than GROUP chunks get parts, one for each group."""
    index, h, kb, vb, pack = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV), PACKS)
    chunk, first, left, n, count = _chunk(index, table, T, NT, GROUP, C, PACKED)
    bits = ((n >> LOW) | 1) & ((1 << (TOP - LOW)) - 1)
    for _ in range(pack * W):
        bits = bits & (bits - 1)
    if (left > 0) & (bits != 0) & ((bits != 1) | (n + GROUP // 2 < count)):
        i = tl.arange(0, C)
        w = tl.arange(0, W)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        height = tl.zeros([W], dtype=tl.int32)
        used = height > 0
        b = bits
        for nth in tl.static_range(W):
            height = tl.where(w == nth, tl.maximum(LOW + _log2(b & -b), 0), height)
            used = used | ((w == nth) & (b != 0))
            b = b & (b - 1)
        dS = tl.zeros([BK, W * BV], dtype=ACC)
        for j in range(tl.where(bits == 1, GROUP // 2, 0), GROUP):
            row = first + j * C
            rest = left - j * C
            sees = used & ((((n + j) >> height) & 1) == 1)
            mask = (i < rest)[:, None] & sees[None, :]
            qs = load_rows(q + row * keys + (h // R) * K, i, rest, kk, keys, K, BK).to(DOT)
            dos = load_rows(do + (row * H + h) * V, i, rest, vv, H * V, V, BV)
            at_level = (row + i)[:, None] * H * L + h * L + tl.minimum(LOG + 1 + height, L - 1)[None, :]
            r = tl.load(level_scale + at_level, mask=mask, other=0.0).to(ACC)
            if DECAY:
                G = tl.cumsum(load_log_decay(g + row * H + h, i, rest, H, SUM))
                here = sees & (rest > 0)
                ends = sums + (chunk // NT * H + h) * NT + chunk % NT
                since = tl.load(ends + j - 1 + w * 0, mask=here, other=0.0)
                since -= tl.load(ends - n + ((n + j) >> height << height) - 1, mask=here, other=0.0)
                r *= weight(G[:, None] + since.to(SUM)[None, :], ACC)
            ys = tl.reshape((r[:, :, None] * dos[:, None, :]).to(DOT), [C, W * BV])
            dS = tl.dot(tl.trans(qs), ys, acc=dS, input_precision=PREC, out_dtype=ACC)
        column = tl.arange(0, W * BV)
        slot = tl.zeros([W * BV], dtype=tl.int64)
        seen = slot > 0
        b = bits
        for nth in tl.static_range(W):
            m = LOW + _log2(b & -b)
            node = chunk - n + tl.where(m == LOW, n + GROUP // 2, n >> m << m) - 1
            part = chunks + (m - LOW - 2) * tl.cdiv(chunks, GROUP) + chunk // GROUP
            here = column // BV == nth
            slot = tl.where(here, tl.where(m > LOW + 1, part, node), slot)
            seen = seen | (here & (b != 0) & ((m > LOW) | (n + GROUP // 2 < count)))
            b = b & (b - 1)
        vv = vb * BV + column % BV
        at = dtree + ((slot * H + h) * K * V + vv)[None, :] + kk[:, None] * V
        tl.store(at, (dS * scale).to(dtree.dtype.element_ty), mask=(kk < K)[:, None] & (seen & (vv < V))[None, :])


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
    """The gradient of every node that more than FAR chunks see, from its parts."""
    index, h, _, _, block = _program(H, 1, 1, tl.cdiv(SIZE, BLOCK))
    chunk, _, left, n, count = _chunk(index, table, T, NT, 2 * FAR, C, PACKED)
    x = n + 2 * FAR  # one after the node's last chunk
    if (left > 0) & (x < count):
        p = tl.arange(0, 8)
        at = block * BLOCK + tl.arange(0, BLOCK)
        size = x & -x
        groups = tl.cdiv(chunks, FAR)
        part = chunks + (_log2(size) - FAR_HEIGHT - 1) * groups + (chunk + 2 * FAR) // FAR
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
    dtree,
    sums,
    table,
    offset,  # where the totals begin
    T,
    NT,
    H,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """For every eighth slot, its gradient and those of the nodes that it is part of."""
    index, h, _, _, block = _program(H, 1, 1, tl.cdiv(SIZE, BLOCK))
    chunk, _, left, n, count = _chunk(index, table, T, NT, FAR, C, PACKED)
    x = n + FAR
    if (left > 0) & (x < count):
        at = block * BLOCK + tl.arange(0, BLOCK)
        if DECAY:
            ends = sums + (chunk // NT * H + h) * NT + chunk % NT - n
        S = tl.zeros([BLOCK], dtype=ACC)
        while x < count:
            own = tl.load(dtree + ((chunk - n + x - 1) * H + h) * SIZE + at, mask=at < SIZE, other=0.0).to(ACC)
            if DECAY:
                own *= weight(tl.load(ends + x - 1) - tl.load(ends + n + FAR - 1), ACC)
            S += own
            x += x & -x
        to = dtree + ((offset + (chunk + FAR - 1) // FAR) * H + h) * SIZE + at
        tl.store(to, S.to(dtree.dtype.element_ty), mask=at < SIZE)


@triton.jit
def backward_kernel(
    q,
    k,
    v,
    g,
    level_scale,
    do,
    tree,
    dtree,
    sums,
    dq,  # [value blocks, rows, H, K]
    dk,  # [value blocks, rows, H, K]
    dv,  # [key blocks, rows, H, V]
    dlevel,  # [blocks, rows, H, L]
    u,  # [blocks, rows, H]
    along,  # [blocks, sequences, H, NT]: the sum of u over each chunk
    table,
    scale,
    offset,
    rows,
    sequences,
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
    HAS_TOTALS: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """All gradients of one chunk's tokens. dV and dK are computed transposed, for which A and dA are right operands."""
    index, h, kb, vb, _ = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, row, left, n, count = _chunk(index, table, T, NT, 1, C, PACKED)
    if left > 0:
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        columns = tl.arange(0, LP)
        causal = i[:, None] >= i[None, :]
        keys = (H // R) * K
        at_key = row * keys + (h // R) * K
        at_value = (row * H + h) * V
        at_level = level_scale + (row * H + h) * L
        at_state = kk[:, None] * V + vv[None, :]
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        if HAS_TREE & DECAY:
            ends = sums + (chunk // NT * H + h) * NT + chunk % NT - n
        qs = load_rows(q + at_key, i, left, kk, keys, K, BK).to(DOT)
        ks = load_rows(k + at_key, i, left, kk, keys, K, BK).to(DOT)
        vs = load_rows(v + at_value, i, left, vv, H * V, V, BV).to(DOT)
        dos = load_rows(do + at_value, i, left, vv, H * V, V, BV).to(DOT)
        A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC) * scale
        dA = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC)
        if DECAY:
            gs = load_log_decay(g + row * H + h, i, left, H, SUM)
            G = tl.cumsum(gs)
            A *= weight(G[:, None] - G[None, :], ACC)
        A = tl.where(causal, A, 0.0)  # without Lam, which dA gets instead where both meet
        pairs = A * dA
        dlam = tl.zeros([C, LP], dtype=ACC)
        x = i[:, None] ^ i[None, :]
        for level in tl.static_range(LOG + 1):
            column = level if level < L else L - 1
            here = (x >= 1 << level >> 1) & (x < 1 << level)
            of_level = tl.sum(tl.where(here, pairs, 0.0), 1)
            dlam += tl.where(columns[None, :] == column, of_level[:, None], 0.0)
        lam = _weights(at_level, i, left, H * L, L, LOG)
        if DECAY:
            pairs = tl.where(i[:, None] > i[None, :], pairs * lam, 0.0)
            us = tl.sum(pairs, 1) - tl.sum(pairs, 0)
            dA *= weight(G[:, None] - G[None, :], ACC)
        A = (A * lam).to(DOT)
        dA = tl.where(causal, dA * lam * scale, 0.0).to(DOT)

        dvT = tl.zeros([BV, C], dtype=ACC)
        dkT = tl.zeros([BK, C], dtype=ACC)
        if HAS_TREE:
            dS = tl.zeros([BK, BV], dtype=ACC)
            x = n + 1
            while x < count:
                slot = chunk - n + x - 1
                low = x & -x
                if HAS_TOTALS:
                    slot = tl.where(low >= FAR, offset + slot // FAR, slot)
                own = tl.load(dtree + (slot * H + h) * K * V + at_state, mask=keep, other=0.0).to(ACC)
                if DECAY:
                    own *= weight(tl.load(ends + x - 1) - tl.load(ends + n), ACC)
                dS += own
                x += low
                if HAS_TOTALS:
                    x = tl.where(low >= FAR, count, x)
            dS = dS.to(DOT)
            dvT = tl.dot(tl.trans(dS), tl.trans(ks), input_precision=PREC, out_dtype=ACC)
            dkT = tl.dot(dS, tl.trans(vs), input_precision=PREC, out_dtype=ACC)
            if DECAY:
                to_end = weight(tl.sum(gs) - G, ACC)
                dvT *= to_end[None, :]
                dkT *= to_end[None, :]
                us -= tl.sum(dvT * tl.trans(vs), 0)
        dvT = tl.dot(tl.trans(dos), A, acc=dvT, input_precision=PREC, out_dtype=ACC)
        at = dv + ((kb * rows + row) * H + h) * V + vv[:, None] + i[None, :] * (H * V)
        tl.store(at, dvT.to(dv.dtype.element_ty), mask=(vv < V)[:, None] & (i < left)[None, :])
        dkT = tl.dot(tl.trans(qs), dA, acc=dkT, input_precision=PREC, out_dtype=ACC)
        at = dk + ((vb * rows + row) * H + h) * K + kk[:, None] + i[None, :] * (H * K)
        tl.store(at, dkT.to(dk.dtype.element_ty), mask=(kk < K)[:, None] & (i < left)[None, :])

        dqs = tl.dot(dA, ks, input_precision=PREC, out_dtype=ACC)
        if HAS_TREE:
            at_state = kk[None, :] * V + vv[:, None]
            keep = (kk < K)[None, :] & (vv < V)[:, None]
            x = n
            for _ in range(tl.sum((n >> tl.arange(0, 32)) & 1)):
                slot = chunk - n + x - 1
                level = tl.minimum(LOG + 1 + _log2(x & -x), L - 1)
                ST = tl.load(tree + (slot * H + h) * K * V + at_state, mask=keep, other=0.0)
                lam = tl.load(at_level + i * H * L + level, mask=i < left, other=0.0).to(ACC)
                D = tl.dot(dos, ST, input_precision=PREC, out_dtype=ACC) * scale
                if DECAY:
                    since = tl.load(ends + n - 1) - tl.load(ends + x - 1)
                    D *= weight(G + since.to(SUM), ACC)[:, None]
                of_level = tl.sum(qs * D, 1)
                dlam += tl.where(columns[None, :] == level, of_level[:, None], 0.0)
                if DECAY:
                    us += lam * of_level
                dqs += lam[:, None] * D
                x = x & (x - 1)
        store_rows(dq + ((vb * rows + row) * H + h) * K, dqs, i, left, kk, H * K, K, BK)
        block = kb * tl.cdiv(V, BV) + vb
        at = dlevel + ((block * rows + row + i) * H + h)[:, None] * L + columns[None, :]
        tl.store(at, dlam, mask=(i < left)[:, None] & (columns < L)[None, :])
        if DECAY:
            tl.store(u + (block * rows + row + i) * H + h, us, mask=i < left)
            tl.store(along + ((block * sequences + chunk // NT) * H + h) * NT + chunk % NT, tl.sum(us))


@triton.jit
def gate_kernel(
    u,
    along,  # [blocks, sequences, H, NT]: the sum of u over each chunk
    g,
    dg,  # [rows, H]
    table,
    rows,
    sequences,
    T,
    NT,
    H,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    index, h, _, _, _ = _program(H, 1, 1, 1)
    chunk, row, left, n, count = _chunk(index, table, T, NT, 1, C, PACKED)
    if left > 0:
        i = tl.arange(0, C)
        earlier = tl.arange(0, BLOCK)
        sums = tl.zeros([BLOCK], dtype=tl.float64)
        us = tl.zeros([C], dtype=ACC)
        for block in tl.static_range(BLOCKS):
            at = along + ((block * sequences + chunk // NT) * H + h) * NT + chunk % NT - n
            for start in range(0, n, BLOCK):
                sums += tl.load(at + start + earlier, mask=start + earlier < n, other=0.0)
            us += tl.load(u + (block * rows + row + i) * H + h, mask=i < left, other=0.0)
        dgs = us - tl.cumsum(us) - tl.sum(sums).to(ACC)
        raw = tl.load(g + (row + i) * H + h, mask=i < left, other=0.0)
        tl.store(dg + (row + i) * H + h, tl.where(raw < WEAKEST, 0.0, dgs), mask=i < left)


class Launch(NamedTuple):
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    block: int  # largest BK and BV
    nodes: int  # nodes whose gradients one program sums side by side
    leaf: Launch
    output: Launch
    node: Launch
    backward: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if dtype == torch.bfloat16 and max(K, V) > 64:
        return Plan(64, 128, 2, leaf=Launch(8, 1), output=Launch(4, 2), node=Launch(8, 2), backward=Launch(4, 1))
    if dtype == torch.bfloat16:
        return Plan(64, 64, 4, leaf=Launch(4, 1), output=Launch(4, 2), node=Launch(4, 2), backward=Launch(4, 1))
    exact = operands(dtype)[2] == "ieee"  # without tensor cores
    other = Launch(8 if exact else 4, 1)
    return Plan(32, 64, 1, leaf=other, output=other, node=other, backward=other)


class Chunks(NamedTuple):
    """Sequences cut into chunks: the numbers that `_chunk` reads."""

    total: int  # exact, or enough if packed
    sequences: int  # rows of [sequences, H, NT] tensors: packed sequences lie in one
    T: int
    NT: int  # chunks in such a row
    heights: int  # of the tree: chunks see nodes of heights below
    table: Tensor | None  # [chunks, 4] first row, rows left, number, number of chunks in the sequence

    @classmethod
    def of(cls, B: int, T: int, C: int, cu_seqlens: Tensor | None) -> "Chunks":
        NT = -(-T // C)
        if cu_seqlens is None:
            return cls(B * NT, B, T, NT, (NT - 1).bit_length(), None)
        total = T // C + cu_seqlens.shape[0] - 1
        return cls(total, 1, T, total, (NT - 1).bit_length(), _packed(cu_seqlens, C, total))

    def groups(self, size: int) -> int:
        """Programs that groups of so many chunks need."""
        return self.total if self.table is not None else self.sequences * -(-self.NT // size)


def _packed(cu_seqlens: Tensor, C: int, total: int) -> Tensor:
    """Computed on the device without waiting for it. Superfluous chunks have no rows; empty sequences have no chunks."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    count = (end - begin + C - 1) // C
    after = count.cumsum(0)
    index = torch.arange(total, device=begin.device)
    sequence = torch.searchsorted(after, index, right=True).clamp(max=len(begin) - 1)
    n = index - (after - count)[sequence]
    first = begin[sequence] + n * C
    return torch.stack([first, (end[sequence] - first).clamp(min=0), n, count[sequence]], dim=1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o, and for the backward the tree of chunk states and the log decays up to the chunks' ends, if more than one."""
    call = _Call(q, k, v, level_scale, log_decay, scale, cu_seqlens, how)
    tree, sums = call.tree() if call.chunks.heights else (None, None)
    o = call.parts(call.keys, v)
    call.launch(
        output_kernel,
        call.how.output,
        call.chunks.total * call.blocks,
        (call.q, call.k, call.v, call.g, call.level_scale, tree, sums, o),
        **call.shared("scale", "rows", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC"),
        HAS_TREE=tree is not None,
    )
    return call.joined(o, v), tree, sums


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    tree: Tensor | None,
    sums: Tensor | None,
    do: Tensor,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, level_scale and log_decay; `tree` and `sums` as returned by `forward` with the same plan."""
    call = _Call(q, k, v, level_scale, log_decay, scale, cu_seqlens, how)
    rows, H, L, chunks = call.rows, v.shape[2], level_scale.shape[-1], call.chunks
    do = do.to(v.dtype).contiguous()
    dtree, offset = call.dtree(do, sums) if chunks.heights else (None, 0)
    dq, dk, dv = call.parts(call.values, q), call.parts(call.values, k), call.parts(call.keys, v)
    blocks = call.keys * call.values
    dlevel = q.new_empty((blocks, rows, H, L), dtype=call.acc)
    u = along = None
    if call.g is not None:
        u = q.new_empty((blocks, rows, H), dtype=call.acc)
        along = q.new_empty((blocks, chunks.sequences, H, chunks.NT), dtype=call.acc)
    call.launch(
        backward_kernel,
        call.how.backward,
        chunks.total * call.blocks,
        (call.q, call.k, call.v, call.g, call.level_scale, do, tree, dtree, sums, dq, dk, dv, dlevel, u, along),
        **call.shared("scale", "rows", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC"),
        sequences=chunks.sequences,
        offset=offset,
        LP=triton.next_power_of_2(L),
        HAS_TREE=tree is not None,
        HAS_TOTALS=chunks.heights > FAR_HEIGHT,
    )
    dg = None
    if log_decay is not None:
        dg = q.new_empty(log_decay.shape, dtype=call.acc)
        call.launch(
            gate_kernel,
            Launch(1, 1),
            chunks.total * H,
            (u, along, call.g, dg),
            **call.shared("rows"),
            sequences=chunks.sequences,
            BLOCKS=blocks,
            BLOCK=256,
        )
        dg = dg.to(log_decay.dtype)
    dlevel = (dlevel[0] if blocks == 1 else dlevel.sum(0)).view(level_scale.shape).to(level_scale.dtype)
    return call.joined(dq, q), call.joined(dk, k), call.joined(dv, v), dlevel, dg


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
        self.state = torch.bfloat16 if q.dtype == torch.bfloat16 else self.acc  # what a product reads
        self.level_scale = level_scale.to(self.acc).contiguous()
        self.g = None if log_decay is None else log_decay.to(self.acc).contiguous()
        BK, BV = (min(self.how.block, max(16, triton.next_power_of_2(D))) for D in (K, V))
        self.keys, self.values = triton.cdiv(K, BK), triton.cdiv(V, BV)
        self.rows, self.heads, self.shape = B * T, H, (H, K, V)
        self.blocks = H * self.keys * self.values
        self.chunks = Chunks.of(B, T, self.how.C, cu_seqlens)
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
            "DECAY": self.g is not None,
            "DOT": dot,
            "SUM": sum_dtype(q.dtype),
            "PREC": precision,
        }

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
            **flags,
        )

    def elementwise(self, kernel: Any, group: int, tensors: tuple[Tensor | None, ...], **flags: Any) -> None:
        """A kernel over groups of chunks, and over the elements of a state."""
        _, K, V = self.shape
        BLOCK = 512
        programs = self.chunks.groups(group) * self.heads * triton.cdiv(K * V, BLOCK)
        self.launch(kernel, Launch(4, 1), programs, tensors, SIZE=K * V, BLOCK=BLOCK, **flags)

    def tree(self) -> tuple[Tensor, Tensor | None]:
        """The states that chunks read, and the log decays up to the chunks' ends."""
        chunks, (H, K, V) = self.chunks, self.shape
        B, NT = chunks.sequences, chunks.NT
        tree = self.q.new_empty((B, NT, H, K, V), dtype=self.state)
        # The last chunk of a sequence writes nothing.
        sums = None if self.g is None else self.q.new_zeros((B, H, NT), dtype=torch.float64)
        self.launch(
            leaf_kernel,
            self.how.leaf,
            chunks.groups(LEAVES) * self.blocks,
            (self.k, self.v, self.g, tree, sums),
            **self.shared("R", "K", "V", "BK", "BV", "DECAY", "DOT", "SUM", "PREC"),
        )
        sums = None if sums is None else sums.cumsum(-1)
        for height in range(2, chunks.heights - 1, 4):
            self.elementwise(up_kernel, FAN << height, (tree, sums), HEIGHT=height, **self.shared("DECAY"))
        return tree, sums

    def dtree(self, do: Tensor, sums: Tensor | None) -> tuple[Tensor, int]:
        """The gradients of the tree's slots, and after them the parts and the totals that they are summed up with."""
        total, heights = self.chunks.total, self.chunks.heights
        groups = triton.cdiv(total, FAR)
        offset = total + max(heights - FAR_HEIGHT - 1, 0) * groups
        size = offset + (groups if heights > FAR_HEIGHT else 0)
        dtree = self.q.new_empty((size, *self.shape), dtype=self.state)
        for low, top in ((0, min(heights, 2)), (2, heights)):
            if low < top:
                W = min(self.how.nodes, triton.next_power_of_2(top - low))
                packs = triton.cdiv(top - low, W)
                self.launch(
                    node_kernel,
                    self.how.node,
                    self.chunks.groups(2 << low) * self.blocks * packs,
                    (self.q, do, self.g, self.level_scale, sums, dtree),
                    **self.shared("scale", "R", "K", "V", "L", "LOG", "BK", "BV", "DECAY", "DOT", "SUM", "PREC"),
                    chunks=total,
                    TOP=top,
                    LOW=low,
                    GROUP=2 << low,
                    PACKS=packs,
                    W=W,
                )
        if heights > FAR_HEIGHT + 1:
            self.elementwise(parts_kernel, 2 * FAR, (dtree,), chunks=total)
        if heights > FAR_HEIGHT:
            self.elementwise(down_kernel, FAR, (dtree, sums), offset=offset, **self.shared("DECAY"))
        return dtree, offset

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
