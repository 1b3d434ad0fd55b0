"""The walks of second- and third-order linear attention along a head's chunks, in Triton: sums of up to three terms.

With the names of triton.py, G the inclusive cumulative log decay of a chunk of C tokens, Gam_ij = e^{G_i - G_j} for
j <= i (else 0) and M the state before the chunk, a term and the state after the chunk are

    LA(x, y, z; M) = s ((X Y^T) . Gam Z + e^G X M)          M' = e^{G_C} M + (e^{G_C - G} Y)^T Z

and LA' is the same from the other end, where states hold s. `walk_kernel` is the sum: a program walks one segment of
one head with the terms' states in registers, cut into blocks of columns of z. If they fit, a gradient's addends never
reach memory, unlike those of several calls of linear attention, and what terms have in common is read once.

For the decays' gradients it also stores each token's parts of u: w times what the token has from others, with the sign
turned in a reverse walk.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import load_log_decay, load_rows, segment_of, store_rows, weight


@triton.jit
def _tile(x, row, h, H, R, i, live, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr):
    """Rows of x [rows, H / R, WIDTH], of the head that serves h."""
    stride = (H // R) * WIDTH
    return load_rows(x + row * stride + (h // R) * WIDTH, i, live, columns, stride, WIDTH, BLOCK).to(DOT)


@triton.jit
def _at_state(at, mm, SN, SM, N: tl.constexpr, M: tl.constexpr, BN: tl.constexpr):
    """Pointers to a block [BN, BM] of a state, and which of them exist."""
    nn = tl.arange(0, BN)
    return at + nn[:, None] * SN + mm[None, :] * SM, (nn < N)[:, None] & (mm < M)[None, :]


@triton.jit
def _entered(states, head, mm, SN, SM, N: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, ACC):
    """The state with which a term's walk begins."""
    if states is None:
        return tl.zeros([BN, BM], dtype=ACC)
    else:
        at, keep = _at_state(states + head * N * M, mm, SN, SM, N, M, BN)
        return tl.load(at, mask=keep, other=0.0)


@triton.jit
def _term(
    outs,
    S,
    S2,
    xs,
    ys,
    xs2,
    ys2,
    zs,
    ws,
    g,
    part,
    i,
    left,
    scale,
    H,
    REVERSE: tl.constexpr,
    BORDER: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """`outs` and a term's share of a chunk, and its states behind the chunk. States of a reverse walk hold the scale,
    those of a forward one do not."""
    if g is not None:
        gs = load_log_decay(g, i, left, H, SUM)
        near = tl.cumsum(gs)  # decay since the walk entered the chunk
        total = tl.sum(gs)
        if REVERSE:
            near = total - near
    if not BORDER:
        A = tl.dot(xs, tl.trans(ys), input_precision=PREC, out_dtype=ACC)
        if xs2 is not None:
            A = tl.dot(xs2, tl.trans(ys2), acc=A, input_precision=PREC, out_dtype=ACC)
        A *= scale
        if g is not None:
            A *= weight(near[:, None] - near[None, :], ACC)
        A = tl.where(i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :], A, 0.0)
        if part is not None:
            pairs = A * tl.dot(ws, tl.trans(zs), input_precision=PREC, out_dtype=ACC)
            parts = tl.sum(tl.where(i[:, None] == i[None, :], 0.0, pairs), 1)
        outs = tl.dot(A.to(DOT), zs, acc=outs, input_precision=PREC, out_dtype=ACC)
        read = tl.dot(xs, S.to(DOT), input_precision=PREC, out_dtype=ACC)
        if xs2 is not None:
            read = tl.dot(xs2, S2.to(DOT), acc=read, input_precision=PREC, out_dtype=ACC)
        if not REVERSE:
            read *= scale
        if g is not None:
            read *= weight(near, ACC)[:, None]
        if part is not None:
            parts += tl.sum(read * ws, 1)
            tl.store(part + i, -parts if REVERSE else parts, mask=i < left)
        outs += read
    if REVERSE:
        zs = (zs * scale).to(ACC)
    if g is not None:
        zs = zs * weight(total - near, ACC)[:, None]
        S *= weight(total, ACC)
        if xs2 is not None:
            S2 *= weight(total, ACC)
    zs = zs.to(DOT)
    S = tl.dot(tl.trans(ys), zs, acc=S, input_precision=PREC, out_dtype=ACC)
    if xs2 is not None:
        S2 = tl.dot(tl.trans(ys2), zs, acc=S2, input_precision=PREC, out_dtype=ACC)
    return outs, S, S2


@triton.jit
def walk_kernel(
    x0,  # [rows, H / RX0, N0]
    y0,
    states0,  # [slots, H, N0, M] (strides SN0, SM0) where segments begin in the direction of the walk
    x1,
    y1,
    states1,
    x2,
    y2,
    states2,
    z0,  # [rows, H / RZ0, M]
    g0,  # [rows, H]
    part0,  # [blocks, H, rows]: what a token's pairs with those before it add to u
    z1,
    g1,
    part1,
    w,  # as z: what parts multiply
    out,  # [rows, H, M]
    final,  # the first state after the walk: of a sequence that is one segment, or (BORDER) at the border it flows to
    totals,  # [slots, H]: a segment's log decay in base 2
    table,
    scale,
    rows,
    T,
    length,
    P,
    H,
    RX0,
    RY0,
    RX1,
    RY1,
    RX2,
    RY2,
    RZ0,
    RZ1,
    RW,
    SN0,
    SM0,
    SN1,
    SM1,
    SN2,
    SM2,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BN0: tl.constexpr,
    BN1: tl.constexpr,
    BN2: tl.constexpr,
    BM: tl.constexpr,
    REVERSE: tl.constexpr,
    BORDER: tl.constexpr,
    OUTER: tl.constexpr,  # the border that ends (reverse: begins) a sequence is wanted too
    INTO: tl.constexpr,  # add to `out`
    Z_IS_Y: tl.constexpr,  # tiles that are the same are loaded once: z0 = y0,
    W_IS_X: tl.constexpr,  # w = x0,
    SAME_X: tl.constexpr,  # x2 = x0,
    SAME_Z: tl.constexpr,  # z1 = z0,
    SWAPPED: tl.constexpr,  # y2 = z0 and z1 = y0
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The first term has the pair x0, y0 and perhaps x1, y1; the second, if there is one, x2, y2."""
    index = tl.program_id(0).to(tl.int64)
    mb, index = (index % tl.cdiv(M, BM)).to(tl.int32), index // tl.cdiv(M, BM)
    segment, h = index // H, index % H
    first, live, slot = segment_of(segment, table, T, length, P, table is not None)
    wanted = live > 0
    if BORDER and table is None and not OUTER:
        wanted = (segment % P) != (0 if REVERSE else P - 1)
    elif final is not None and not BORDER:  # an empty sequence hands its state on
        wanted = True
    if wanted:
        i = tl.arange(0, C)
        mm = mb * BM + tl.arange(0, BM)
        n0, n1, n2 = tl.arange(0, BN0), tl.arange(0, BN1), tl.arange(0, BN2)
        at_part = (mb * H + h) * rows
        head = slot * H + h
        S0 = _entered(states0, head, mm, SN0, SM0, N0, M, BN0, BM, ACC)
        S1 = _entered(states1, head, mm, SN1, SM1, N1, M, BN1, BM, ACC) if x1 is not None else 0.0
        S2 = _entered(states2, head, mm, SN2, SM2, N2, M, BN2, BM, ACC) if x2 is not None else 0.0
        walked = tl.zeros([], dtype=SUM)
        last = (live - 1) // C * C
        for step in range(0, live, C):
            start = last - step if REVERSE else step
            row = first + start
            left = live - start
            at_out = out if BORDER else out + (row * H + h) * M
            if INTO:
                outs = load_rows(at_out, i, left, mm, H * M, M, BM).to(ACC)
            else:
                outs = tl.zeros([C, BM], dtype=ACC)
            ys = _tile(y0, row, h, H, RY0, i, left, n0, N0, BN0, DOT)
            zs = ys if Z_IS_Y else _tile(z0, row, h, H, RZ0, i, left, mm, M, BM, DOT)
            xs = None if BORDER else _tile(x0, row, h, H, RX0, i, left, n0, N0, BN0, DOT)
            if w is None:
                ws = None
            else:
                ws = xs if W_IS_X else _tile(w, row, h, H, RW, i, left, mm, M, BM, DOT)
            xs1 = None if x1 is None else _tile(x1, row, h, H, RX1, i, left, n1, N1, BN1, DOT)
            ys1 = None if x1 is None else _tile(y1, row, h, H, RY1, i, left, n1, N1, BN1, DOT)
            gs = None if g0 is None else g0 + row * H + h
            part = None if part0 is None else part0 + at_part + row
            outs, S0, S1 = _term(
                outs, S0, S1, xs, ys, xs1, ys1, zs, ws, gs, part, i, left, scale, H,
                REVERSE, BORDER, DOT, SUM, ACC, PREC,
            )  # fmt: skip
            if x2 is not None:
                xs2 = xs if SAME_X else _tile(x2, row, h, H, RX2, i, left, n2, N2, BN2, DOT)
                ys2 = zs if SWAPPED else _tile(y2, row, h, H, RY2, i, left, n2, N2, BN2, DOT)
                if SWAPPED:
                    zs2 = ys
                else:
                    zs2 = zs if SAME_Z else _tile(z1, row, h, H, RZ1, i, left, mm, M, BM, DOT)
                gs = None if g1 is None else g1 + row * H + h
                part = None if part1 is None else part1 + at_part + row
                outs, S2, _ = _term(
                    outs, S2, 0.0, xs2, ys2, None, None, zs2, ws, gs, part, i, left, scale, H,
                    REVERSE, BORDER, DOT, SUM, ACC, PREC,
                )  # fmt: skip
            if not BORDER:
                store_rows(at_out, outs, i, left, mm, H * M, M, BM)
            elif g0 is not None:
                walked += tl.sum(load_log_decay(g0 + row * H + h, i, left, H, SUM))
        if BORDER and g0 is not None:
            tl.store(totals + head, walked)
        if final is not None:
            to = head + H if BORDER and not REVERSE else head
            at, keep = _at_state(final + to * N0 * M, mm, SN0, SM0, N0, M, BN0)
            tl.store(at, S0, mask=keep)
