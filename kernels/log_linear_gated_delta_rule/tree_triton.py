"""The tree over the chunks of the log-linear gated delta rule, in Triton: its nodes, who reads them, and the gradients.

With the names of triton.py. Two neighbours, chunks or blocks of chunks, are again such a pair (F, N) with a log decay
g; left and right make

    F = F_l + F_r + F_r F_l          N = e^{g_r} (N_l + F_r N_l) + N_r          g = g_l + g_r

A chunk's queries walk down its nodes (`nodes_triton.py`) from bit to bit. At node r, X being the queries as of the
node's end and lam the weights of its level,

    O += lam X N          X <- e^{g} (X + X F)          at first X = s e^G (Q - P bK)

So no state passes from chunk to chunk: the nodes are merged pairwise (`merge`), the reads are independent (`read`).

Backward. `pull` walks the same nodes the other way: dX <- lam dO N^T + e^g (dX + dX F^T), at first 0. What all readers
of a node give it is `gather`ed: dN = X^T (lam dO), dF = e^g X^T dX. `split` undoes the merges, D_N and D_F being those
of a pair:

    dN_l += e^{g_r} (D_N + F_r^T D_N)          dF_l += D_F + F_r^T D_F
    dN_r = D_N                                 dF_r = D_F + D_F F_l^T + e^{g_r} D_N N_l^T
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import load_rows, store_rows, weight
from mixassay.kernels.log_linear_gated_delta_rule.nodes_triton import (
    bits_of,
    chunk_of,
    height_of,
    kernel,
    node_of,
    pair_of,
    visit_of,
)


@triton.jit
def _load_square(at, rr, cc, bound, K: tl.constexpr, TURNED: tl.constexpr):
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
        F = _load_square(at, kk, kk, bound, K, TURNED)
        return tl.dot(x, F, acc=acc, input_precision=PREC, out_dtype=ACC)
    parts = ()
    for part in tl.static_range(4):
        F = _load_square(at, kk, part * (BK // 4) + tl.arange(0, BK // 4), bound, K, TURNED)
        parts += (tl.dot(x, F, input_precision=PREC, out_dtype=ACC),)
    joined = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))  # [C, columns, part % 2, part // 2]
    return acc + tl.reshape(tl.permute(joined, (0, 3, 2, 1)), (C, BK))


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
