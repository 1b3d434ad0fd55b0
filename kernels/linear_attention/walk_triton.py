"""The walk of linear attention along a head's chunks, in Triton: each of its results, forwards or backwards.

With the names of triton.py and Gam_ij = e^{G_i - G_j} for j <= i (else 0), from chunk to chunk

    out = s ((X Y^T) . Gam Z + e^G X S)          S' = e^{G_C} S + (e^{G_C - G} Y)^T Z

or the same from the other end, where states hold s. A program walks one segment of one head with the state, or a block
of it, in registers.

Parts of u, for the decay's gradient (segments_triton.py), come from the walks for dq and for dv: pairs within a chunk
are summed from float32 products, without the diagonal; pairs with other chunks are the state's part of dq times q, and
of dv times v.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import load_log_decay, load_rows, segment_of, store_rows, weight
from mixassay.kernels.linear_attention.segments_triton import program_of


@triton.jit
def walk_kernel(
    x,  # [rows, H / RX, N]
    y,
    z,  # [rows, H / RZ, M]
    g,
    w,  # as z: what `part` multiplies
    states,  # [slots, H, K, V] where segments begin in the direction of the walk
    out,  # [blocks of N, rows, H, M]
    final,  # [B, H, K, V]: the state after the walk, written when a sequence is one segment
    part,  # [blocks, H, rows]: what a token's pairs with those before it add to u
    table,
    scale,
    rows,
    T,
    length,
    P,
    H,
    RX,
    RZ,
    N: tl.constexpr,
    M: tl.constexpr,
    SN: tl.constexpr,  # strides of a state [N, M]
    SM: tl.constexpr,
    C: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    REVERSE: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PART: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """States of a reverse walk hold the scale, those of a forward one do not."""
    segment, h, nb, mb = program_of(H, tl.cdiv(N, BN), tl.cdiv(M, BM))
    first, live, slot = segment_of(segment, table, T, length, P, PACKED)
    if (live > 0) | HAS_FINAL:  # an empty sequence hands its state on
        i = tl.arange(0, C)
        nn = nb * BN + tl.arange(0, BN)
        mm = mb * BM + tl.arange(0, BM)
        xy = (H // RX) * N
        zw = (H // RZ) * M
        behind = i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :]
        at_state = (slot * H + h) * N * M + nn[:, None] * SN + mm[None, :] * SM
        keep = (nn < N)[:, None] & (mm < M)[None, :]
        S = tl.load(states + at_state, mask=keep, other=0.0) if HAS_STATE else tl.zeros([BN, BM], dtype=ACC)
        last = (live - 1) // C * C
        for step in range(0, live, C):
            start = last - step if REVERSE else step
            row = first + start
            left = live - start
            at_x = row * xy + (h // RX) * N
            at_z = row * zw + (h // RZ) * M
            xs = load_rows(x + at_x, i, left, nn, xy, N, BN).to(DOT)
            ys = load_rows(y + at_x, i, left, nn, xy, N, BN).to(DOT)
            zs = load_rows(z + at_z, i, left, mm, zw, M, BM).to(DOT)
            A = tl.dot(xs, tl.trans(ys), input_precision=PREC, out_dtype=ACC) * scale
            if DECAY:
                gs = load_log_decay(g + row * H + h, i, left, H, SUM)
                near = tl.cumsum(gs)  # decay since the walk entered the chunk
                total = tl.sum(gs)
                if REVERSE:
                    near = total - near
                A *= weight(near[:, None] - near[None, :], ACC)
            A = tl.where(behind, A, 0.0)
            outs = tl.dot(xs, S.to(DOT), input_precision=PREC, out_dtype=ACC)
            if not REVERSE:
                outs *= scale
            if DECAY:
                outs *= weight(near, ACC)[:, None]
            if PART:
                ws = load_rows(w + at_z, i, left, mm, zw, M, BM).to(DOT)
                pairs = A * tl.dot(ws, tl.trans(zs), input_precision=PREC, out_dtype=ACC)
                parts = tl.sum(tl.where(i[:, None] == i[None, :], 0.0, pairs), 1) + tl.sum(outs * ws, 1)
                at_part = part + ((nb * tl.cdiv(M, BM) + mb) * H + h) * rows + row + i
                tl.store(at_part, -parts if REVERSE else parts, mask=i < left)
            outs = tl.dot(A.to(DOT), zs, acc=outs, input_precision=PREC, out_dtype=ACC)
            store_rows(out + ((nb * rows + row) * H + h) * M, outs, i, left, mm, H * M, M, BM)
            if DECAY:
                S *= weight(total, ACC)
                to_next = weight(total - near, ACC) * (scale if REVERSE else 1.0)
                zs = (zs * to_next[:, None]).to(DOT)
            elif REVERSE:
                zs = (zs * scale).to(DOT)
            S = tl.dot(tl.trans(ys), zs, acc=S, input_precision=PREC, out_dtype=ACC)
        if HAS_FINAL:
            tl.store(final + at_state, S, mask=keep)
