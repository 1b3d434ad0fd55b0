"""The log-linear gated delta rule in Triton: kernels and their launches, forward and backward.

Within a chunk of C tokens, G is the inclusive cumulative log decay, Gam_ij = e^{G_i - G_j} for j <= i (else 0), b the
write strengths, s the scale, Lam_ij the weight that token i gives to the level of token j (Guo et al. 2025):

    M = (I + strictly lower part of b K K^T)^-1          P = (lower part of Q K^T) M          R = M^T K
    O = s (P . Gam . Lam) bV + what it reads of earlier chunks

M holds no decay: decays are numbers, which come out of every product. A chunk makes of the state S before it

    e^{G_C} (S + F S) + N          F = -R^T bK          N = R^T (b e^{G_C - G} V)

Two neighbours, chunks or blocks of chunks, are again such a pair (F, N) with a log decay g; left and right make

    F = F_l + F_r + F_r F_l          N = e^{g_r} (N_l + F_r N_l) + N_r          g = g_l + g_r

Chunk n reads at each set bit of n one block, the node r = (n without its lower bits): the chunks from r - lowbit(r) to
r - 1, as in a Fenwick tree. Its queries walk down from bit to bit. At node r, X being the queries as of the node's end,

    O += lam X N          X <- e^{g} (X + X F)          at first X = s e^G (Q - P bK)

So no state passes from chunk to chunk: the nodes are merged pairwise (`merge`), the reads are independent (`read`).

Backward. `pull` walks the same nodes the other way: dX <- lam dO N^T + e^g (dX + dX F^T), at first 0. What all readers
of a node give it is `gather`ed: dN = X^T (lam dO), dF = e^g X^T dX. `split` undoes the merges, D_N and D_F being those
of a pair:

    dN_l += e^{g_r} (D_N + F_r^T D_N)          dF_l += D_F + F_r^T D_F
    dN_r = D_N                                 dF_r = D_F + D_F F_l^T + e^{g_r} D_N N_l^T

Then each chunk alone, with dQ' = s e^G dX, till = e^{G_C - G}, U = R dN, W = R dF + P^T dQ':

    dP = (dO V^T) b . s Gam Lam - dQ' bK^T          d(bV) = (s P . Gam . Lam)^T dO + till U
    dA = lower part of dP M^T                       dM = -strictly lower part of (P^T dP + U (till bV)^T - R dF bK^T)M^T
    dQ = dQ' + dA K                                 d(bK) = dM K - W
    dK = b d(bK) + dA^T Q + dM^T bK + M ((till bV) dN^T - bK dF^T)

The decays' gradients are sums of pairs as far as both tokens are in one chunk, and of products such as X . dX at a
node's border for the rest: nothing is summed over a sequence only to cancel.

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
    store_rows,
    sum_dtype,
    weight,
)
from mixassay.kernels.gated_delta_rule.solve_triton import inverse_precision, precision, solve_kernel

# Compiled once, whatever the sizes: offsets are multiples of K and V, which are known.
kernel = triton.jit(
    do_not_specialize=["rows", "T", "P", "H", "R", "L", "chunks", "room", "visits", "height", "heights"]
)


@triton.jit
def chunk_of(index, table, ends, T, P, C: tl.constexpr, PACKED: tl.constexpr, DEEP: tl.constexpr):
    """First row of a chunk, tokens from there to its sequence's end, its number in the sequence, the chunks before the
    sequence, and the chunks of the sequence."""
    if PACKED:
        first = tl.load(table + 3 * index)
        if DEEP:
            sequence = tl.load(table + 3 * index + 2) - index
            begin, end = tl.load(ends + sequence), tl.load(ends + sequence + 1)
            n = (first - begin) // C
            count = (end - begin + C - 1) // C
        else:
            end = tl.load(table + 3 * index + 1)
            n = index * 0
            count = n + 1
        left = (end - first).to(tl.int32)
    else:
        n = index % P
        first = index // P * T + n * C
        left = (T - n * C).to(tl.int32)
        count = n * 0 + P
    return first, left, n, index - n, count


@triton.jit
def node_of(height, number, base, room):
    """Where F, g of the `number`-th block of 2^height chunks of a sequence lie. N of a block that ends before chunk r
    lies with chunk r - 1: a right half's is needed no more when that of the pair takes its place."""
    return 2 * (room - (room >> height)) + (base >> height) + number


@triton.jit
def visit_of(n, height, base, visits):
    """Where what chunk n brings to its node at this height lies."""
    return height * visits + (base >> 1) + ((n >> (height + 1)) << height) + n - ((n >> height) << height)


@triton.jit
def height_of(n):
    """The place of the highest bit of a number below 2^24, through the exponent of a float32."""
    return (n.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def bits_of(n):
    """How many bits of a number below 2^31 are set."""
    n = n.to(tl.int32)
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    n = n + (n >> 8)
    return (n + (n >> 16)) & 0x3F


@triton.jit
def decays(g, at, i, live, H, C: tl.constexpr, DECAY: tl.constexpr, SUM: tl.constexpr):
    """Base-2 log decay up to each row of a chunk (dead rows: up to the last live one), and over the whole chunk."""
    if DECAY:
        gs = load_log_decay(g + at, i, live, H, SUM)
        return tl.cumsum(gs), tl.sum(gs)
    return tl.zeros([C], dtype=SUM), tl.zeros([], dtype=SUM)


@triton.jit
def level_weights(at, i, live, stride, L, C: tl.constexpr, LEVELS: tl.constexpr, TURNED: tl.constexpr):
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
def load_square(at, rr, cc, bound, K: tl.constexpr, TURNED: tl.constexpr):
    """[rr, cc] of a K x K matrix, or of its transpose; bound 0 reads nothing."""
    keep = (rr < bound)[:, None] & (cc < K)[None, :]
    along: tl.constexpr = K if TURNED else 1
    return tl.load(at + rr[:, None] * (1 if TURNED else K) + cc[None, :] * along, mask=keep, other=0.0)


@triton.jit
def _times(
    x, acc, at, bound, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr, ACC, PREC: tl.constexpr
):
    """acc + x F, or x F^T; x [C, BK], F [K, K] in memory. A wide F is read by quarters of its columns."""
    kk = tl.arange(0, BK)
    if BK <= 128:
        F = load_square(at, kk, kk, bound, K, TURNED)
        return tl.dot(x, F, acc=acc, input_precision=PREC, out_dtype=ACC)
    parts = ()
    for part in tl.static_range(4):
        F = load_square(at, kk, part * (BK // 4) + tl.arange(0, BK // 4), bound, K, TURNED)
        parts += (tl.dot(x, F, input_precision=PREC, out_dtype=ACC),)
    joined = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))  # [C, columns, part % 2, part // 2]
    return acc + tl.reshape(tl.permute(joined, (0, 3, 2, 1)), (C, BK))


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
        Gs, total = decays(g, at_token, i, live, H, C, DECAY, SUM)
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
            A *= level_weights(level_scale + at_token * L, i, live, H * L, L, C, LEVELS, False)
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


@triton.jit
def _merged(Fr, left, right, to, w, rr, cc, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DOT, ACC, PREC):
    """One tile of w (left + F_r left) + right."""
    acc = load_rows(left, rr, K, cc, WIDTH, WIDTH, BLOCK).to(ACC)
    for start in tl.static_range(0, K, BLOCK):
        kk = start + tl.arange(0, BLOCK)
        Fs = load_rows(Fr, rr, K, kk, K, K, BLOCK)
        x = load_rows(left, kk, K, cc, WIDTH, WIDTH, BLOCK)
        acc = tl.dot(Fs, x, acc=acc, input_precision=PREC, out_dtype=ACC)
    acc = acc * w + load_rows(right, rr, K, cc, WIDTH, WIDTH, BLOCK).to(ACC)
    store_rows(to, acc, rr, K, cc, WIDTH, WIDTH, BLOCK)


@triton.jit
def pair_of(window, height, chunks, table, ends, T, P, C: tl.constexpr, PACKED: tl.constexpr):
    """Which pair of blocks of 2^height chunks a window of 2^(height + 1) chunk numbers stands for: its number in its
    sequence and the chunks before that, or a negative number. Only pairs that a later chunk follows are needed, so a
    sequence has fewer pairs than windows that end in it."""
    last = tl.minimum(((window + 1) << (height + 1)) - 1, chunks - 1)
    _, _, _, base, count = chunk_of(last, table, ends, T, P, C, PACKED, True)
    pair = window - (base >> (height + 1))
    return tl.where(pair < (count - 1) >> (height + 1), pair, -1), base


@kernel
def merge_kernel(
    F,
    N,
    totals,
    table,
    ends,
    height,
    chunks,
    room,
    T,
    P,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """Two blocks of 2^height chunks become one, tile by tile."""
    ROWS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    VALUES: tl.constexpr = (V + BLOCK - 1) // BLOCK
    index = tl.program_id(0).to(tl.int64)
    up, index = index % ROWS * BLOCK, index // ROWS
    column, index = index % (VALUES + ROWS), index // (VALUES + ROWS)
    window, h = index // H, index % H
    pair, base = pair_of(window, height, chunks, table, ends, T, P, C, PACKED)
    if pair >= 0:
        rr = up + tl.arange(0, BLOCK)
        cc = tl.arange(0, BLOCK)
        left = node_of(height, 2 * pair, base, room) * H + h
        to = node_of(height + 1, pair, base, room) * H + h
        Fr = F + (left + H) * K * K
        decay = tl.load(totals + left + H)
        if column < VALUES:
            right = base + ((2 * pair + 2) << height) - 1
            at_right = N + (right * H + h) * K * V
            at_left = N + ((base + ((2 * pair + 1) << height) - 1) * H + h) * K * V
            w = weight(decay, ACC)
            _merged(Fr, at_left, at_right, at_right, w, rr, column * BLOCK + cc, K, V, BLOCK, DOT, ACC, PREC)
        else:
            at_left, at_to = F + left * K * K, F + to * K * K
            column = (column - VALUES) * BLOCK
            _merged(Fr, at_left, Fr, at_to, 1.0, rr, column + cc, K, K, BLOCK, DOT, ACC, PREC)
        if (column == 0) & (up == 0):
            tl.store(totals + to, decay + tl.load(totals + left))


@kernel
def read_kernel(
    x,
    F,
    N,
    totals,
    level_scale,
    o,
    xs,  # [visits, H, C, K]: the queries at every node
    table,
    ends,
    heights,
    room,
    visits,
    T,
    P,
    H,
    L,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    OUTPUT: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """What one chunk reads of earlier ones, added to o; or its queries at every node."""
    VALUES: tl.constexpr = (V + BV - 1) // BV if OUTPUT else 1
    index = tl.program_id(0).to(tl.int64)
    vb, index = index % VALUES, index // VALUES
    chunk, h = index // H, index % H
    first, live, n, base, _ = chunk_of(chunk, table, ends, T, P, C, PACKED, True)
    if (live > 0) & (n > 0):
        i = tl.arange(0, C)
        kk = tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        at_token = first * H + h
        X = load_rows(x + at_token * K, i, live, kk, H * K, K, BK).to(ACC)
        if OUTPUT:
            os = load_rows(o + at_token * V, i, live, vv, H * V, V, BV).to(ACC)
        r = n
        for _step in range(bits_of(n)):
            height = height_of(r & -r)
            node = node_of(height, (r >> height) - 1, base, room) * H + h
            if OUTPUT:
                lam = level_scale + at_token * L + tl.minimum(LEVELS + height, L - 1)
                lam = tl.load(lam + i * H * L, mask=i < live, other=0.0)
                Ns = load_rows(N + ((base + r - 1) * H + h) * K * V, kk, K, vv, V, V, BV)
                os = tl.dot((X * lam[:, None]).to(DOT), Ns, acc=os, input_precision=PREC, out_dtype=ACC)
            else:
                to = xs + (visit_of(n, height, base, visits) * H + h) * C * K
                store_rows(to, X, i, live, kk, K, K, BK)
            r &= r - 1
            more = tl.where(r > 0, K, 0)  # after the last node nobody reads X
            X = _times(X.to(DOT), X, F + node * K * K, more, K, C, BK, False, ACC, PREC)
            X *= weight(tl.load(totals + node, mask=r > 0, other=0.0), ACC)
        if OUTPUT:
            store_rows(o + at_token * V, os, i, live, vv, H * V, V, BV)


@kernel
def pull_kernel(
    do,
    F,
    N,
    totals,
    level_scale,
    xs,
    dxs,  # [visits, H, C, K]: e^g times the gradient of the queries past every node
    dx,  # [rows, H, K]: that of the first queries
    dlevel,
    around,  # [rows, H]: X . dX of the first queries
    past,  # [visits, H]: <X, dX> past every node
    table,
    ends,
    heights,
    room,
    visits,
    T,
    P,
    H,
    L,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The walk of `read` backwards, with the gradient of the queries."""
    index = tl.program_id(0).to(tl.int64)
    chunk, h = index // H, index % H
    first, live, n, base, _ = chunk_of(chunk, table, ends, T, P, C, PACKED, True)
    if live > 0:
        i = tl.arange(0, C)
        kk = tl.arange(0, BK)
        at_token = first * H + h
        dX = tl.zeros([C, BK], dtype=ACC)
        XdX = tl.zeros([C], dtype=ACC)
        top = tl.zeros([C], dtype=ACC)
        r = n * 0
        for _step in range(bits_of(n)):
            height = height_of(n - r)
            r = (n >> height) << height
            node = node_of(height, (r >> height) - 1, base, room) * H + h
            visit = visit_of(n, height, base, visits) * H + h
            X = load_rows(xs + visit * C * K, i, live, kk, K, K, BK)
            level = tl.minimum(LEVELS + height, L - 1)
            at_level = (at_token + i * H) * L + level
            lam = tl.load(level_scale + at_level, mask=i < live, other=0.0)
            y = tl.zeros([C, BK], dtype=ACC)
            for start in tl.static_range(0, V, BLOCK):
                vv = start + tl.arange(0, BLOCK)
                dos = load_rows(do + at_token * V, i, live, vv, H * V, V, BLOCK).to(DOT)
                Ns = load_rows(N + ((base + r - 1) * H + h) * K * V, kk, K, vv, V, V, BLOCK)
                y = tl.dot(dos, tl.trans(Ns), acc=y, input_precision=PREC, out_dtype=ACC)
            dlam = tl.sum(X.to(ACC) * y, 1)
            top += tl.where(level == L - 1, dlam, 0.0)
            tl.store(dlevel + at_level, dlam, mask=(i < live) & (level < L - 1))
            # No chunk reads anything past the node of its highest bit.
            more = (n >> height) > 1
            tl.store(past + visit, tl.sum(XdX), mask=more)
            dX *= weight(tl.load(totals + node, mask=more, other=0.0), ACC)
            store_rows(dxs + visit * C * K, dX, i, tl.where(more, live, 0), kk, K, K, BK)
            known = tl.where(more, K, 0)
            dX = _times(dX.to(DOT), dX, F + node * K * K, known, K, C, BK, True, ACC, PREC) + y * lam[:, None]
            XdX = tl.sum(X.to(ACC) * dX, 1)
        store_rows(dx + at_token * K, dX, i, live, kk, H * K, K, BK)
        tl.store(around + at_token + i * H, XdX, mask=i < live)
        if LEVELS + heights >= L:
            tl.store(dlevel + (at_token + i * H) * L + L - 1, top, mask=i < live)


@kernel
def gather_kernel(
    do,
    level_scale,
    xs,
    dxs,
    past,
    dF,
    dN,
    dtotals,
    table,
    ends,
    room,
    visits,
    T,
    P,
    H,
    L,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The gradient of one node from the chunks that read it: one tile of columns of dN or dF."""
    VALUES: tl.constexpr = (V + BLOCK - 1) // BLOCK
    COLUMNS: tl.constexpr = VALUES + (K + BLOCK - 1) // BLOCK
    index = tl.program_id(0).to(tl.int64)
    column, index = (index % COLUMNS).to(tl.int32), index // COLUMNS
    chunk, h = index // H, index % H
    first, live, n, base, count = chunk_of(chunk, table, ends, T, P, C, PACKED, True)
    if (live > 0) & (n + 1 < count):
        r = n + 1  # the node is the lowbit(r) chunks up to this one; as many after it, as far as there are, read it
        height = height_of(r & -r)
        first += C
        live = tl.minimum(live - C, (r & -r) * C).to(tl.int32)
        i = tl.arange(0, C)
        kk = tl.arange(0, BK)
        visit = visit_of(r, height, base, visits)
        acc = tl.zeros([BK, BLOCK], dtype=ACC)
        if column < VALUES:
            cc = column * BLOCK + tl.arange(0, BLOCK)
            level = tl.minimum(LEVELS + height, L - 1)
            for start in range(0, live, C):
                at_token = (first + start) * H + h
                at = ((visit + start // C) * H + h) * C * K
                X = load_rows(xs + at, i, live - start, kk, K, K, BK)
                lam = tl.load(level_scale + (at_token + i * H) * L + level, mask=i < live - start, other=0.0)
                dos = load_rows(do + at_token * V, i, live - start, cc, H * V, V, BLOCK)
                dos = (dos.to(ACC) * lam[:, None]).to(DOT)
                acc = tl.dot(tl.trans(X), dos, acc=acc, input_precision=PREC, out_dtype=ACC)
            store_rows(dN + (chunk * H + h) * K * V, acc, kk, K, cc, V, V, BLOCK)
        else:
            cc = (column - VALUES) * BLOCK + tl.arange(0, BLOCK)
            passed = tl.zeros([], dtype=ACC)
            live = tl.where(r & (r - 1) == 0, 0, live)  # its readers read nothing past it
            for start in range(0, live, C):
                at = ((visit + start // C) * H + h) * C * K
                X = load_rows(xs + at, i, live - start, kk, K, K, BK)
                dX = load_rows(dxs + at, i, live - start, cc, K, K, BLOCK)
                acc = tl.dot(tl.trans(X), dX, acc=acc, input_precision=PREC, out_dtype=ACC)
                passed += tl.load(past + (visit + start // C) * H + h)
            node = node_of(height, (r >> height) - 1, base, room) * H + h
            store_rows(dF + node * K * K, acc, kk, K, cc, K, K, BLOCK)
            if column == VALUES:
                tl.store(dtotals + node, passed)


@triton.jit
def _halved(
    Fr, dpair, rr, cc, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr
):
    """One tile of D + F_r^T D."""
    acc = load_rows(dpair, rr, K, cc, WIDTH, WIDTH, BLOCK).to(ACC)
    for start in tl.static_range(0, K, BLOCK):
        kk = start + tl.arange(0, BLOCK)
        Fs = load_rows(Fr, kk, K, rr, K, K, BLOCK)
        D = load_rows(dpair, kk, K, cc, WIDTH, WIDTH, BLOCK)
        acc = tl.dot(tl.trans(Fs), D, acc=acc, input_precision=PREC, out_dtype=ACC)
    return acc


@kernel
def split_kernel(
    F,
    N,
    totals,
    dF,
    dN,
    dtotals,
    table,
    ends,
    height,
    chunks,
    room,
    T,
    P,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The gradient of a pair goes to its halves: dN and g of the left, or one tile of dF of the left or the right."""
    ROWS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    TILES: tl.constexpr = 1 + 2 * ROWS * ROWS
    index = tl.program_id(0).to(tl.int64)
    tile, index = (index % TILES).to(tl.int32) - 1, index // TILES
    window, h = index // H, index % H
    pair, base = pair_of(window, height, chunks, table, ends, T, P, C, PACKED)
    if pair >= 0:
        block = tl.arange(0, BLOCK)
        left = node_of(height, 2 * pair, base, room) * H + h
        right = left + H
        above = node_of(height + 1, pair, base, room) * H + h
        at_left = (base + ((2 * pair + 1) << height) - 1) * H + h
        at_right = (base + ((2 * pair + 2) << height) - 1) * H + h
        Fr = F + right * K * K
        N_left, D_left, D_N = N + at_left * K * V, dN + at_left * K * V, dN + at_right * K * V
        D_F = dF + above * K * K
        w = weight(tl.load(totals + right), ACC)
        if tile < 0:
            decayed = tl.zeros([], dtype=ACC)
            for up in tl.static_range(0, K, BLOCK):
                rr = up + block
                for start in tl.static_range(0, V, BLOCK):
                    cc = start + block
                    add = _halved(Fr, D_N, rr, cc, K, V, BLOCK, ACC, PREC) * w
                    decayed += tl.sum(add * load_rows(N_left, rr, K, cc, V, V, BLOCK).to(ACC))
                    add += load_rows(D_left, rr, K, cc, V, V, BLOCK).to(ACC)
                    store_rows(D_left, add, rr, K, cc, V, V, BLOCK)
            whole = tl.load(dtotals + above)
            tl.store(dtotals + left, whole + tl.load(dtotals + left))
            tl.store(dtotals + right, whole + decayed)
        else:
            cc = tile % ROWS * BLOCK + block
            rr = tile // ROWS % ROWS * BLOCK + block
            if tile < ROWS * ROWS:
                to = dF + left * K * K
                add = _halved(Fr, D_F, rr, cc, K, K, BLOCK, ACC, PREC)
                add += load_rows(to, rr, K, cc, K, K, BLOCK).to(ACC)
                store_rows(to, add, rr, K, cc, K, K, BLOCK)
            else:
                add = tl.zeros([BLOCK, BLOCK], dtype=ACC)
                for start in tl.static_range(0, V, BLOCK):
                    D = load_rows(D_N, rr, K, start + block, V, V, BLOCK)
                    Ns = load_rows(N_left, cc, K, start + block, V, V, BLOCK)
                    add = tl.dot(D, tl.trans(Ns), acc=add, input_precision=PREC, out_dtype=ACC)
                add = add * w + load_rows(D_F, rr, K, cc, K, K, BLOCK).to(ACC)
                for start in tl.static_range(0, K, BLOCK):
                    D = load_rows(D_F, rr, K, start + block, K, K, BLOCK)
                    Fs = load_rows(F + left * K * K, cc, K, start + block, K, K, BLOCK)
                    add = tl.dot(D, tl.trans(Fs), acc=add, input_precision=PREC, out_dtype=ACC)
                store_rows(dF + right * K * K, add, rr, K, cc, K, K, BLOCK)


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
        Gs, total = decays(g, at_token, i, live, H, C, DECAY, SUM)
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
        PW = level_weights(at_level, i, live, H * L, L, C, LEVELS, True) * scale
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
        Lam = level_weights(at_level, i, live, H * L, L, C, LEVELS, False)
        top = tl.zeros([C], dtype=ACC)
        # A row's own block of 8 columns holds levels 0 to 3; of other blocks each has one level.
        e = tl.arange(0, 8)
        eighths = tl.arange(0, C // 8)
        blocks = tl.reshape(ZP, (C, C // 8, 8))
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
            Gs, total = decays(g, at_token, i, live, H, C, DECAY, SUM)
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


class Launch(NamedTuple):
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers of a thread, at most


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    BLOCK: int  # columns of a tile
    BV: int  # value columns that a reader holds
    solve: Launch
    leaves: Launch
    merge: Launch
    read: Launch
    pull: Launch
    gather: Launch
    split: Launch
    pairs: Launch
    inputs: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process.

    Where tensor cores serve, no tile is narrower than 64: on Hopper, Triton 3.6 and 3.7 read past the end of shared
    memory at a width of 32.
    """
    one, four, eight = Launch(1, 1), Launch(4, 1), Launch(8, 1)
    if half(dtype):
        if K <= 128:
            BV = 64 if V <= 64 else 128
            pull = Launch(4, 2, 168) if K <= 64 else four  # three programs on a multiprocessor instead of two
            return Plan(64, 64, BV, one, four, four, four, pull, Launch(4, 3), four, four, four)
        return Plan(64, 64, 64, one, eight, four, eight, eight, eight, four, eight, eight)
    if precision(dtype, K) == "tf32":
        return Plan(64, 64, 64, one, eight, eight, eight, eight, eight, eight, eight, eight)
    return Plan(32, 32, 32, one, eight, eight, eight, eight, eight, eight, eight, eight)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """o, and M [B, T, H, C] for the backward."""
    call = _Call(q, k, v, beta, level_scale, log_decay, scale, cu_seqlens, how)
    M = call.inverse()
    o = torch.empty_like(call.v)
    x, F, N, totals = call.tree(M, o=o)
    if call.heights:
        call.read(x, F, N, totals, o=o)
    return o, M


def room(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `forward` returns, not filled in."""
    return torch.empty_like(v, memory_format=torch.contiguous_format), _kept(
        q, *v.shape[:3], plan(q.dtype, q.shape[-1], v.shape[-1]).C
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    M: Tensor,
    do: Tensor,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, beta, level_scale and log_decay; M by `forward` with the same plan."""
    call = _Call(q, k, v, beta, level_scale, log_decay, scale, cu_seqlens, how)
    do = do.to(v.dtype).contiguous()
    scores = torch.empty_like(M)
    tree = call.tree(M, scores=scores)
    dlevel = torch.zeros_like(call.level_scale)
    branch = call.nodes_gradients(tree, do, dlevel) if call.heights else (None,) * 5
    dq, dk, dv, dbeta, dg = call.inputs_gradients(M, scores, do, dlevel, *branch)
    dg = None if dg is None or log_decay is None else dg.to(log_decay.dtype)
    return dq, dk, dv, dbeta.to(beta.dtype), dlevel.to(level_scale.dtype), dg


def _kept(q: Tensor, *shape: int) -> Tensor:
    """Room for what kernels keep for one another, in the dtype of products."""
    return q.new_empty(shape, dtype=q.dtype)


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        level_scale: Tensor,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
    ) -> None:
        (B, T, self.groups, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, self.K, self.V)
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.beta, self.level_scale = (x.to(self.acc).contiguous() for x in (beta, level_scale))
        self.g = None if log_decay is None else log_decay.to(self.acc).contiguous()
        self.scale, self.rows = scale, B * T
        self.BK = max(self.how.BLOCK, triton.next_power_of_2(self.K))
        self.cut = Cut.of(B, T, cu_seqlens, 0, self.how.C)
        self.ends = None if cu_seqlens is None else cu_seqlens.long()
        self.heights = (triton.cdiv(T, self.how.C) - 1).bit_length()  # bits of the number of a chunk
        self.room = triton.cdiv(self.cut.segments, 1 << self.heights) << self.heights
        self.visits = self.cut.segments // 2

    def kept(self, *shape: int) -> Tensor:
        return _kept(self.q, *shape)

    def wide(self, *shape: int) -> Tensor:
        return self.q.new_empty(shape, dtype=self.acc)

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Room for F and N, or their gradients."""
        F = self.kept(2 * self.room, self.H, self.K, self.K)
        return F, self.kept(self.cut.segments, self.H, self.K, self.V)

    def inverse(self) -> Tensor:
        M = self.kept(*self.beta.shape, self.how.C)
        dot, acc, _ = operands(self.q.dtype)
        solve_kernel[(self.cut.segments * self.H,)](
            self.k,
            self.beta,
            None,
            M,
            self.wide(self.rows, self.H),
            self.cut.table,
            self.cut.T,
            self.cut.length,
            self.cut.P,
            self.H,
            self.H // self.groups,
            K=self.K,
            C=self.how.C,
            BK=min(self.BK, 64),
            DECAY=False,
            PACKED=self.cut.table is not None,
            DOT=dot,
            ACC=acc,
            SUM=acc,
            PREC=precision(self.q.dtype, self.K),
            EXACT=inverse_precision(self.q.dtype, self.K),
            num_warps=self.how.solve.num_warps,
            num_stages=self.how.solve.num_stages,
        )
        return M

    def tree(
        self, M: Tensor, o: Tensor | None = None, scores: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The first queries, and all nodes; if asked for, what chunks read of themselves into o, or P into scores."""
        x = F = N = totals = None
        if self.heights:
            x = self.kept(self.rows, self.H, self.K)
            F, N = self.nodes()
            totals = self.wide(2 * self.room, self.H)
        self.launch(
            leaves_kernel,
            self.how.leaves,
            self.cut.segments,
            (self.q, self.k, self.v, self.beta, self.level_scale, self.g, M, o, scores, x, F, N, totals),
            scale=self.scale,
            OUTPUT=o is not None,
            DECAY=self.g is not None,
            DEEP=self.heights > 0,
            SUM=sum_dtype(self.q.dtype),
        )
        for height in range(self.heights - 1):
            tiles = self.blocks(self.K) * (self.blocks(self.K) + self.blocks(self.V))
            self.launch(merge_kernel, self.how.merge, self.windows(height) * tiles, (F, N, totals), height=height)
        return x, F, N, totals

    def read(
        self,
        x: Tensor | None,
        F: Tensor | None,
        N: Tensor | None,
        totals: Tensor | None,
        o: Tensor | None = None,
        xs: Tensor | None = None,
    ) -> None:
        self.launch(
            read_kernel,
            self.how.read,
            self.cut.segments * (triton.cdiv(self.V, self.how.BV) if xs is None else 1),
            (x, F, N, totals, self.level_scale, o, xs),
            OUTPUT=xs is None,
            BV=self.how.BV,
        )

    def nodes_gradients(
        self, tree: tuple[Tensor | None, ...], do: Tensor, dlevel: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of the first queries, what decays get around them, of F, N and totals."""
        x, F, N, totals = tree
        lam = self.level_scale
        shape = (self.heights * self.visits, self.H, self.how.C, self.K)
        xs, dxs = self.kept(*shape), self.kept(*shape)
        self.read(x, F, N, totals, xs=xs)
        dx, around, past = self.kept(self.rows, self.H, self.K), self.wide(self.rows, self.H), self.wide(*shape[:2])
        tensors = (do, F, N, totals, lam, xs, dxs, dx, dlevel, around, past)
        self.launch(pull_kernel, self.how.pull, self.cut.segments, tensors)
        (dF, dN), dtotals = self.nodes(), self.wide(2 * self.room, self.H)
        columns = self.blocks(self.V) + self.blocks(self.K)
        tensors = (do, lam, xs, dxs, past, dF, dN, dtotals)
        self.launch(gather_kernel, self.how.gather, self.cut.segments * columns, tensors)
        for height in reversed(range(self.heights - 1)):
            tiles = 1 + 2 * self.blocks(self.K) ** 2
            tensors = (F, N, totals, dF, dN, dtotals)
            self.launch(split_kernel, self.how.split, self.windows(height) * tiles, tensors, height=height)
        return dx, around, dF, dN, dtotals

    def inputs_gradients(
        self,
        M: Tensor,
        scores: Tensor,
        do: Tensor,
        dlevel: Tensor,
        dx: Tensor | None,
        around: Tensor | None,
        dF: Tensor | None,
        dN: Tensor | None,
        dtotals: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        dA, dM, W = torch.empty_like(M), torch.empty_like(M), self.kept(self.rows, self.H, self.K)
        dv, dg = torch.empty_like(self.v), None if self.g is None else torch.empty_like(self.g)
        dbeta = self.wide(1 + self.blocks(self.K), self.rows, self.H)
        tensors: tuple[Tensor | None, ...]
        tensors = (self.k, self.v, self.beta, self.level_scale, self.g, M, scores, do, dx, around, dF, dN, dtotals)
        flags = {"DECAY": self.g is not None, "DEEP": self.heights > 0, "SUM": sum_dtype(self.q.dtype)}
        self.launch(
            pairs_kernel,
            self.how.pairs,
            self.cut.segments,
            (*tensors, dA, dM, W, dv, dbeta[0], dlevel, dg),
            scale=self.scale,
            **flags,
        )
        alone = self.groups == self.H
        dq, dk = (
            self.q.new_empty((self.rows, self.H, self.K), dtype=self.q.dtype if alone else self.acc) for _ in range(2)
        )
        self.launch(
            inputs_kernel,
            self.how.inputs,
            self.cut.segments * self.blocks(self.K),
            (self.q, self.k, self.v, self.beta, self.g, M, dx, dF, dN, dA, dM, W, dq, dk, dbeta[1:]),
            scale=self.scale,
            rows=self.rows,
            **flags,
        )
        if not alone:
            dq, dk = (x.unflatten(1, (self.groups, -1)).sum(2).to(self.q.dtype) for x in (dq, dk))
        return dq.view(self.q.shape), dk.view(self.k.shape), dv, dbeta.sum(0).view(self.beta.shape), dg

    def blocks(self, width: int) -> int:
        return triton.cdiv(width, self.how.BLOCK)

    def windows(self, height: int) -> int:
        return triton.cdiv(self.cut.segments, 2 << height)

    def launch(
        self, kernel: Any, launch: Launch, programs: int, tensors: tuple[Tensor | None, ...], **flags: Any
    ) -> None:
        """The sizes that a kernel asks for, by name."""
        dot, acc, _ = operands(self.q.dtype)
        sizes = {
            "heights": self.heights,
            "chunks": self.cut.segments,
            "room": self.room,
            "visits": self.visits,
            "R": self.H // self.groups,
            "L": self.level_scale.shape[-1],
            "BK": self.BK,
            "BLOCK": self.how.BLOCK,
            "LEVELS": self.how.C.bit_length(),
        }
        kernel[(programs * self.H,)](
            *tensors,
            table=self.cut.table,
            ends=self.ends,
            T=self.cut.T,
            P=self.cut.P,
            H=self.H,
            K=self.K,
            V=self.V,
            C=self.how.C,
            PACKED=self.cut.table is not None,
            DOT=dot,
            ACC=acc,
            PREC=precision(self.q.dtype, self.K),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            maxnreg=launch.maxnreg,
            **{name: size for name, size in sizes.items() if name in kernel.arg_names},
            **flags,
        )
