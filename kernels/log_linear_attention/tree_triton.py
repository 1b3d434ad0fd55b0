"""The tree over the chunks of log-linear attention, in Triton: the states of its nodes, and their gradients.

A node's state is S = e^{decay of the right child} S_left + S_right: `leaf` makes the chunks' own and those of the two
lowest heights, `up` four heights more at a time.

Its own gradient is the sum over the chunks that see it of (lambda_m w_m Q)^T dO; dS of a chunk is the sum over the
nodes that it is part of, decayed between their ends. Of high nodes `far` and `parts` make the first, then `down` the
second for every fourth chunk; `near` has both for the chunks between.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import LOG2_E, WEAKEST, load_rows, weight
from mixassay.kernels.log_linear_attention.nodes_triton import (
    FAR,
    LEAVES,
    between,
    chunk_of,
    how_seen,
    log2,
    program_of,
)

FAN = tl.constexpr(16)  # nodes that one program of its upper part adds up


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
    index, block, _, _, _ = program_of(tl.cdiv(H, HEADS), 1, 1, 1)
    chunk, row, left, _, _ = chunk_of(index, table, T, NT, 1, C, PACKED)
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
    index, h, kb, vb, _ = program_of(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, first, left, n, count = chunk_of(index, table, T, NT, LEAVES, C, PACKED)
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
    return weight(between(sums, end - back, back, keep), ACC) if DECAY else 1.0


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
    index, h, _, _, block = program_of(H, 1, 1, tl.cdiv(SIZE, BLOCK))
    chunk, _, left, n, count = chunk_of(index, table, T, NT, FAN * STEP, C, PACKED)
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
    index, h, kb, vb, pack = program_of(H, tl.cdiv(K, BK), tl.cdiv(V, BV), PACKS)
    chunk, first, left, n, count = chunk_of(index, table, T, NT, FAR, C, PACKED)
    bits = ((n >> 2) | 1) & ((1 << (HEIGHTS - 2)) - 1)
    for _ in range(2 * pack):
        bits = bits & (bits - 1)
    if (left > 0) & (bits != 0) & ((bits != 1) | (n + FAR // 2 < count)):
        others = bits & (bits - 1)
        second = others != 0
        m = 2 + log2(bits & -bits)
        m_second = tl.where(second, 2 + log2(others & -others), 0)
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
            lam, w = how_seen(at_level, sums, ends, G, i, rest, n + j, x, seen, H, L, LOG, DECAY)
            ys = (dos * (lam * w)[:, None]).to(DOT)
            dS = tl.dot(qs, ys, acc=dS, input_precision=PREC, out_dtype=ACC)
            x = (n + j) >> m_second << m_second
            lam, w = how_seen(at_level, sums, ends, G, i, rest, n + j, x, (rest > 0) & second, H, L, LOG, DECAY)
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
    index, h, _, _, block = program_of(H, 1, 1, tl.cdiv(SIZE, BLOCK))
    chunk, _, left, n, count = chunk_of(index, table, T, NT, 2 * FAR, C, PACKED)
    x = n + 2 * FAR  # one after the node's last chunk
    if (left > 0) & (x < count):
        p = tl.arange(0, 8)
        at = block * BLOCK + tl.arange(0, BLOCK)
        size = x & -x
        part = chunks + (log2(size) - 4) * tl.cdiv(chunks, FAR) + (chunk + 2 * FAR) // FAR
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
    index, h, _, _, block = program_of(H, 1, 1, tl.cdiv(SIZE, BLOCK))
    chunk, _, left, n, count = chunk_of(index, table, T, NT, LEAVES, C, PACKED)
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
                    past += S * weight(between(sums, end - (x - ends), x - ends, bit != 0), ACC)
            ends = tl.where(bit == lowest, x, (x >> m << m) + (1 << m))
            if ((bit == lowest) | ((bit == 0) & ((1 << m) > lowest))) & (ends < count):  # is part of the node
                own = tl.load(dtree + ((chunk - n + ends - 1) * H + h) * SIZE + at, mask=at < SIZE, other=0.0).to(ACC)
                if DECAY:
                    own *= weight(between(sums, end, ends - x, ends < count), ACC)
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
    index, h, kb, vb, _ = program_of(H, tl.cdiv(K, BK), tl.cdiv(V, BV), 1)
    chunk, first, left, n, count = chunk_of(index, table, T, NT, LEAVES, C, PACKED)
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
                    dS *= weight(between(sums, ends, 1, n + 2 < count), ACC)
                elif step != 1:
                    dS *= weight(between(sums, ends + node, 3 - node, n + LEAVES < count), ACC)
            lam, w = how_seen(at_level, sums, ends - n, G, i, rest, n + j, n + node + 1, rest > 0, H, L, LOG, DECAY)
            ys = (dos * (lam * w * scale)[:, None]).to(DOT)
            dS = tl.dot(tl.trans(qs), ys, acc=dS, input_precision=PREC, out_dtype=ACC)
            if step > 0:
                to = dtree + ((chunk + node) * H + h) * K * V + at
                tl.store(to, dS.to(dtree.dtype.element_ty), mask=keep & (n + node + 1 < count))
