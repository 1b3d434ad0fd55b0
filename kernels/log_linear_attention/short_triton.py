"""Log-linear attention over short rows in Triton: one kernel forward, one backward, nothing but the results in memory.

The equations are those of triton.py, for chunks of 16 tokens. A program has all the tokens of a few heads, as in
linear_attention/short_triton.py. Of the nodes of height m, 2^m chunks, one at a time is of interest, so there is one
state S_m in registers: a chunk whose number has bit m clear is part of it, one that has it set reads it at level 5 + m.
It is decayed while it is made; afterwards a sum of log decays says how old it is. The backward mirrors this: walking
forwards for dQ and dlambda, S_m is turned; walking back for dK and dV, chunks with bit m set make dS_m, the others
take it.

Within a chunk, dlambda is a sum over the pairs of a level. Fenwick's tree has the node of the tokens j with
x - (x & -x) <= j < x in column x - 1; token i sees it if x is i without some of its lower bits. The sums of all nodes
are one product of the pairs with zeros and ones, in half precision that of two bfloat16 addends of each pair.

The decay's gradient is that of linear_attention/short_triton.py, for the number (v_s . do_t) e^{G_t - G_s} lambda_ts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.fenwick import levels
from mixassay.kernels.common.short_triton import (
    Call,
    Launch,
    heads,
    lines,
    load,
    load_decay,
    serves,
    store,
    tiles,
    turned,
    zeros,
)
from mixassay.kernels.common.triton import WEAKEST, half, weight

__all__ = ["Launch", "backward", "forward", "plan", "serves"]

INSIDE = tl.constexpr(5)  # levels of the pairs within a chunk of 16 tokens


@triton.jit
def _level(x):
    """The bit length of x < 16."""
    return (x > 0).to(tl.int32) + (x > 1) + (x > 3) + (x > 7)


@triton.jit
def _decayed(x, exponent, HB: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr):
    """Tiles of heads, each with its own log decay."""
    if DECAY:
        return x * tiles(weight(exponent, ACC), HB)
    else:
        return x


@triton.jit
def _weights(lam, age, near, HB: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr):
    """lambda e^{decay since the state's end}, and the latter."""
    if DECAY:
        w = weight(lines(age, HB) + near, ACC)
        return lam * w, w
    else:
        return lam, lam * 0.0 + 1.0


@triton.jit
def _kept(S, first, total, HB: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr):
    """A state that is being made, decayed over a chunk; zeros where its first chunk starts it."""
    if DECAY:
        return S * tiles(tl.where(first, 0.0, weight(total, ACC)), HB)
    else:
        return S * tl.where(first, 0.0, 1.0).to(ACC)


@triton.jit
def _read(
    os,
    S,
    age,
    new,
    qs,
    near,
    total,
    at_level,
    keep,
    n,
    M: tl.constexpr,
    L: tl.constexpr,
    HB: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """Chunk n reads the state of height M, or is part of it."""
    if (n >> M) % 2 == 1:
        lam = tl.load(at_level + min(INSIDE + M, L - 1), mask=keep, other=0.0).to(ACC)
        by, _ = _weights(lam, age, near, HB, DECAY, ACC)
        os += tl.expand_dims(by, -2) * tl.dot(S.to(DOT), turned(qs, HB), input_precision=PREC, out_dtype=ACC)
        age += total
    else:
        S = new + _kept(S, n % (2 << M) == 0, total, HB, DECAY, ACC)
        age = total * 0.0
    return os, S, age


@triton.jit
def forward_kernel(
    q,  # [B T, G, K]
    k,
    v,  # [B T, G R, V]
    g,  # [B T, G R]
    level_scale,  # [B T, G R, L]
    o,
    scale,
    T,
    G,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,  # 16
    L: tl.constexpr,
    HEIGHTS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HB: tl.constexpr,
    SHARED: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    _, b, group, h, there = heads(G, R, HB, SHARED)
    i, kk, vv, H = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV), G * R
    # Of a chunk's rows, from its first one.
    at_k = tiles(group * K, HB) + (i[:, None] * (G * K) + kk[None, :])
    at_v = tiles(h * V, HB) + (i[:, None] * (H * V) + vv[None, :])
    at_g, mine = lines(h, HB) + i * H, lines(there, HB)
    inside = zeros(C, C, HB, tl.int32) + _level(i[:, None] ^ i[None, :])
    l = tl.arange(0, 8)
    at_inside = tiles(h * L, HB) + (i[None, :] * (H * L) + tl.minimum(l, L - 1)[:, None])
    to, whole = tiles(h * V, HB) + (i[None, :] * (H * V) + vv[:, None]), tiles(there, HB) & (vv < V)[:, None]
    keys, values = tiles(there, HB) & (kk < K)[None, :], tiles(there, HB) & (vv < V)[None, :]
    pairs = tiles(there, HB) & (i[:, None] <= i[None, :])
    none = tl.sum(tl.sum(zeros(16, 16, HB, SUM), -1), -1)
    near, total = tl.sum(zeros(C, 16, HB, SUM), -1), none
    S0, S1, S2, S3 = zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC)
    age0, age1, age2, age3 = none, none, none, none
    for n in range(tl.cdiv(T, C)):
        row, live = b * T + n * C, i < T - n * C
        keep, at_level = mine & live, level_scale + row * H * L + at_g * L
        qs = load(q + row * G * K + at_k, keys, live, DOT)
        ks = load(k + row * G * K + at_k, keys, live, DOT)
        vs = load(v + row * H * V + at_v, values, live, DOT)
        lam = tl.load(level_scale + row * H * L + at_inside, mask=tiles(there, HB) & (l < INSIDE)[:, None] & live[None, :], other=0.0).to(ACC)
        lam = tl.where(i[:, None] <= i[None, :], tl.gather(lam, inside, 1 if HB > 1 else 0), 0.0)
        A = tl.dot(ks, turned(qs, HB), input_precision=PREC, out_dtype=ACC)
        vd, os = vs, zeros(BV, C, HB, ACC)
        if DECAY:
            gs = load_decay(g + row * H + at_g, keep, SUM)
            near, total = tl.cumsum(gs, -1), tl.sum(gs, -1)
            A *= weight(tl.expand_dims(near, -2) - tl.expand_dims(near, -1), ACC)
            vd = (vs * tl.expand_dims(weight(lines(total, HB) - near, ACC), -1)).to(DOT)
        if HEIGHTS > 0:
            new = tl.dot(turned(vd, HB), ks, input_precision=PREC, out_dtype=ACC)
            os, S0, age0 = _read(os, S0, age0, new, qs, near, total, at_level, keep, n, 0, L, HB, DECAY, DOT, ACC, PREC)
        if HEIGHTS > 1:
            os, S1, age1 = _read(os, S1, age1, new, qs, near, total, at_level, keep, n, 1, L, HB, DECAY, DOT, ACC, PREC)
        if HEIGHTS > 2:
            os, S2, age2 = _read(os, S2, age2, new, qs, near, total, at_level, keep, n, 2, L, HB, DECAY, DOT, ACC, PREC)
        if HEIGHTS > 3:
            os, S3, age3 = _read(os, S3, age3, new, qs, near, total, at_level, keep, n, 3, L, HB, DECAY, DOT, ACC, PREC)
        os = tl.dot(turned(vs, HB), (A * lam).to(DOT), acc=os, input_precision=PREC, out_dtype=ACC) * scale
        tl.store(o + row * H * V + to, os.to(o.dtype.element_ty), mask=whole & live[None, :])


@triton.jit
def _sums(pairs, HALF: tl.constexpr, HB: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr):
    """Sums over the nodes of Fenwick's tree, each in the column before its end."""
    C: tl.constexpr = pairs.shape[-1]
    j, x = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :] + 1
    ones = (j < x) & (j >= x - (x & -x)) & (x < C)
    if HALF:
        ones = zeros(C, C, HB, tl.bfloat16) + ones.to(tl.bfloat16)
        high = pairs.to(tl.bfloat16)
        sums = tl.dot(high, ones, out_dtype=ACC)
        return tl.dot((pairs - high.to(ACC)).to(tl.bfloat16), ones, acc=sums, out_dtype=ACC)
    else:
        ones = zeros(C, C, HB, ACC) + ones.to(ACC)
        return tl.dot(pairs, ones, input_precision=PREC, out_dtype=ACC)


@triton.jit
def _read_turned(
    dqs,
    S,
    age,
    new,
    qs,
    dos,
    near,
    total,
    at_level,
    to_level,
    scale,
    keep,
    n,
    M: tl.constexpr,
    L: tl.constexpr,
    HB: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """As `_read`, with the gradient of the level's weights."""
    if (n >> M) % 2 == 1:
        lam = tl.load(at_level + min(INSIDE + M, L - 1), mask=keep, other=0.0).to(ACC)
        by, w = _weights(lam, age, near, HB, DECAY, ACC)
        far = tl.dot(dos, S.to(DOT), input_precision=PREC, out_dtype=ACC)
        dlam = w * tl.sum(far * qs, -1)
        dqs += tl.expand_dims(by, -1) * far
        age += total
    else:
        dlam = near.to(ACC) * 0.0
        S = new + _kept(S, n % (2 << M) == 0, total, HB, DECAY, ACC)
        age = total * 0.0
    tl.store(to_level + INSIDE + M, dlam * scale, mask=keep)
    return dqs, S, age


@triton.jit
def _write(
    dS,
    dSt,
    sum,
    sum_t,
    age,
    qs,
    dos,
    near,
    total,
    at_level,
    keep,
    n,
    M: tl.constexpr,
    L: tl.constexpr,
    HB: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """Chunk n adds to the gradient of the state of height M, or takes it."""
    if (n >> M) % 2 == 1:
        lam = tl.load(at_level + min(INSIDE + M, L - 1), mask=keep, other=0.0).to(ACC)
        by, _ = _weights(lam, total * 0.0, near, HB, DECAY, ACC)
        scaled = (dos * tl.expand_dims(by, -1)).to(DOT)
        first = n % (2 << M) == (2 << M) - 1
        dS = _kept(dS, first, total, HB, DECAY, ACC)
        dSt = _kept(dSt, first, total, HB, DECAY, ACC)
        dS = tl.dot(turned(qs, HB), scaled, acc=dS, input_precision=PREC, out_dtype=ACC)
        dSt = tl.dot(turned(scaled, HB), qs, acc=dSt, input_precision=PREC, out_dtype=ACC)
        age = total * 0.0
    else:
        sum += _decayed(dS, age, HB, DECAY, ACC)
        sum_t += _decayed(dSt, age, HB, DECAY, ACC)
        age += total
    return dS, dSt, sum, sum_t, age


@triton.jit
def backward_kernel(
    q,
    k,
    v,
    g,
    level_scale,
    do,
    dq,  # [parts, B T, G, K]
    dk,
    dv,
    dlevel,  # [B T, G R, W]
    dg,  # [B T, G R]
    read,  # the same: q . dq, of this program alone
    scale,
    rows,  # B T
    T,
    G,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,  # 16
    L: tl.constexpr,
    W: tl.constexpr,
    HEIGHTS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HB: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    part, b, group, h, there = heads(G, R, HB, SHARED)
    i, kk, vv, H = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV), G * R
    # Of a chunk's rows, from its first one.
    at_k = tiles(group * K, HB) + (i[:, None] * (G * K) + kk[None, :])
    at_v = tiles(h * V, HB) + (i[:, None] * (H * V) + vv[None, :])
    at_g, mine = lines(h, HB) + i * H, lines(there, HB)
    keys, values = tiles(there, HB) & (kk < K)[None, :], tiles(there, HB) & (vv < V)[None, :]
    added: tl.constexpr = SHARED and HB > 1
    to, whole = at_k, keys
    if added:  # one gradient of q and k for all heads
        to, whole = tl.max(group, 0) * K + i[:, None] * (G * K) + kk[None, :], (kk < K)[None, :]
    inside = tl.minimum(_level(i[:, None] ^ i[None, :]), L - 1)
    none = tl.sum(tl.sum(zeros(16, 16, HB, SUM), -1), -1)
    near, total = tl.sum(zeros(C, 16, HB, SUM), -1), none

    at_pair = tiles(h * L, HB) + (i[:, None] * (H * L) + inside)
    pairs = tiles(there, HB) & (i[:, None] >= i[None, :])
    # The column of the node that token i sees at a level, or would see if it had that level.
    x = i[None, :] + 1
    lowest = x & -x
    sees = (x < C) & ((x ^ i[:, None]) < 2 * lowest) & tiles(there, HB)
    at_node = tiles(h * W, HB) + i[:, None] * (H * W) + _level(lowest)
    S0, S1, S2, S3 = zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC)
    age0, age1, age2, age3 = none, none, none, none
    for n in range(tl.cdiv(T, C)):
        row, live = b * T + n * C, i < T - n * C
        keep, at_level, to_level = mine & live, level_scale + row * H * L + at_g * L, dlevel + row * H * W + at_g * W
        qs = load(q + row * G * K + at_k, keys, live, DOT)
        ks = load(k + row * G * K + at_k, keys, live, DOT)
        vs = load(v + row * H * V + at_v, values, live, DOT)
        dos = load(do + row * H * V + at_v, values, live, DOT)
        lam = tl.load(level_scale + row * H * L + at_pair, mask=pairs & live[:, None], other=0.0).to(ACC)
        A = tl.dot(qs, turned(ks, HB), input_precision=PREC, out_dtype=ACC)
        D = tl.dot(dos, turned(vs, HB), input_precision=PREC, out_dtype=ACC)
        if DECAY:
            gs = load_decay(g + row * H + at_g, keep, SUM)
            near, total = tl.cumsum(gs, -1), tl.sum(gs, -1)
            D *= weight(tl.expand_dims(near, -1) - tl.expand_dims(near, -2), ACC)
            vd = (vs * tl.expand_dims(weight(lines(total, HB) - near, ACC), -1)).to(DOT)
        else:
            vd = vs
        A *= D * scale  # what a pair adds to its level
        itself = tl.sum(tl.where(i[:, None] == i[None, :], A, 0.0), -1)
        nodes = tl.where(i[:, None] & lowest != 0, _sums(A, HALF, HB, ACC, PREC), 0.0)
        tl.store(to_level, itself, mask=keep)
        tl.store(dlevel + row * H * W + at_node, nodes, mask=sees & live[:, None])
        dqs = tl.dot((D * lam).to(DOT), ks, input_precision=PREC, out_dtype=ACC)
        if HEIGHTS > 0:
            new = tl.dot(turned(vd, HB), ks, input_precision=PREC, out_dtype=ACC)
            dqs, S0, age0 = _read_turned(
                dqs, S0, age0, new, qs, dos, near, total, at_level, to_level, scale, keep, n, 0,
                L, HB, DECAY, DOT, ACC, PREC,
            )  # fmt: skip
        if HEIGHTS > 1:
            dqs, S1, age1 = _read_turned(
                dqs, S1, age1, new, qs, dos, near, total, at_level, to_level, scale, keep, n, 1,
                L, HB, DECAY, DOT, ACC, PREC,
            )  # fmt: skip
        if HEIGHTS > 2:
            dqs, S2, age2 = _read_turned(
                dqs, S2, age2, new, qs, dos, near, total, at_level, to_level, scale, keep, n, 2,
                L, HB, DECAY, DOT, ACC, PREC,
            )  # fmt: skip
        if HEIGHTS > 3:
            dqs, S3, age3 = _read_turned(
                dqs, S3, age3, new, qs, dos, near, total, at_level, to_level, scale, keep, n, 3,
                L, HB, DECAY, DOT, ACC, PREC,
            )  # fmt: skip
        for level in tl.static_range(INSIDE + HEIGHTS, W):  # that rows of T tokens do not have
            tl.store(to_level + level, near.to(ACC) * 0.0, mask=keep)
        dqs *= scale
        if DECAY:
            tl.store(read + row * H + at_g, tl.sum(dqs * qs, -1), mask=keep)
        if added:
            dqs = tl.sum(dqs, 0)
        store(dq + (part * rows + row) * G * K + to, dqs, whole, live)

    tl.debug_barrier()  # other threads load `read` than stored it
    # Turned: rows are those of keys and values.
    at_pair = tiles(h * L, HB) + (i[None, :] * (H * L) + inside)
    pairs = tiles(there, HB) & (i[:, None] <= i[None, :])
    dS0, dS1, dS2, dS3 = zeros(BK, BV, HB, ACC), zeros(BK, BV, HB, ACC), zeros(BK, BV, HB, ACC), zeros(BK, BV, HB, ACC)
    dT0, dT1, dT2, dT3 = zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC), zeros(BV, BK, HB, ACC)
    age0, age1, age2, age3 = none, none, none, none
    later = none.to(ACC)
    for step in range(tl.cdiv(T, C)):
        n = tl.cdiv(T, C) - 1 - step
        row, live = b * T + n * C, i < T - n * C
        keep, at_level = mine & live, level_scale + row * H * L + at_g * L
        qs = load(q + row * G * K + at_k, keys, live, DOT)
        ks = load(k + row * G * K + at_k, keys, live, DOT)
        vs = load(v + row * H * V + at_v, values, live, DOT)
        dos = load(do + row * H * V + at_v, values, live, DOT)
        lam = tl.load(level_scale + row * H * L + at_pair, mask=pairs & live[None, :], other=0.0).to(ACC)
        A = tl.dot(ks, turned(qs, HB), input_precision=PREC, out_dtype=ACC)
        D = tl.dot(vs, turned(dos, HB), input_precision=PREC, out_dtype=ACC)
        if DECAY:
            gs = load_decay(g + row * H + at_g, keep, SUM)
            near, total = tl.cumsum(gs, -1), tl.sum(gs, -1)
            between = weight(tl.expand_dims(near, -2) - tl.expand_dims(near, -1), ACC)
            A *= between
            D *= between
        dvs = tl.dot((A * lam).to(DOT), dos, input_precision=PREC, out_dtype=ACC)
        dks = tl.dot((D * lam).to(DOT), qs, input_precision=PREC, out_dtype=ACC)
        dS, dT = zeros(BK, BV, HB, ACC), zeros(BV, BK, HB, ACC)
        if HEIGHTS > 0:
            dS0, dT0, dS, dT, age0 = _write(
                dS0, dT0, dS, dT, age0, qs, dos, near, total, at_level, keep, n, 0, L, HB, DECAY, DOT, ACC, PREC
            )
        if HEIGHTS > 1:
            dS1, dT1, dS, dT, age1 = _write(
                dS1, dT1, dS, dT, age1, qs, dos, near, total, at_level, keep, n, 1, L, HB, DECAY, DOT, ACC, PREC
            )
        if HEIGHTS > 2:
            dS2, dT2, dS, dT, age2 = _write(
                dS2, dT2, dS, dT, age2, qs, dos, near, total, at_level, keep, n, 2, L, HB, DECAY, DOT, ACC, PREC
            )
        if HEIGHTS > 3:
            dS3, dT3, dS, dT, age3 = _write(
                dS3, dT3, dS, dT, age3, qs, dos, near, total, at_level, keep, n, 3, L, HB, DECAY, DOT, ACC, PREC
            )
        if HEIGHTS > 0:
            fardv = tl.dot(ks, dS.to(DOT), input_precision=PREC, out_dtype=ACC)
            fardk = tl.dot(vs, dT.to(DOT), input_precision=PREC, out_dtype=ACC)
            if DECAY:
                after = tl.expand_dims(weight(lines(total, HB) - near, ACC), -1)
                fardv *= after
                fardk *= after
            dvs += fardv
            dks += fardk
        dks *= scale
        store(dv + row * H * V + at_v, dvs * scale, values, live)
        if DECAY:
            u = tl.load(read + row * H + at_g, mask=keep, other=0.0) - tl.sum(dks * ks, -1)
            raw = tl.load(g + row * H + at_g, mask=keep, other=0.0)
            sums = lines(later, HB) + tl.cumsum(u, -1, reverse=True)
            tl.store(dg + row * H + at_g, tl.where(raw < WEAKEST, 0.0, sums), mask=keep)
            later += tl.sum(u, -1)
        if added:
            dks = tl.sum(dks, 0)
        store(dk + (part * rows + row) * G * K + to, dks, whole, live)


def plan(K: int, V: int, *, gradient: bool) -> Launch:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if max(K, V) > 16:
        return Launch(16, 4, 4, 2)
    return Launch(16, 8, 8 if gradient else 4, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    how: Launch | None = None,
) -> Tensor:
    """o of q, k [B, T, G, K], v [B, T, H, V], level_scale [B, T, H, L] and log_decay [B, T, H]."""
    call = Call(q, k, v, log_decay, how or plan(q.shape[3], v.shape[3], gradient=False))
    o, level_scale = call.v.new_empty(v.shape), level_scale.contiguous()
    forward_kernel[call.grid](
        call.q, call.k, call.v, call.g, level_scale, o, scale, **call.shared, **_tree(level_scale)
    )
    return o


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    do: Tensor,
    how: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, level_scale and log_decay."""
    call = Call(q, k, v, log_decay, how or plan(q.shape[3], v.shape[3], gradient=True))
    alone = call.parts == 1  # else the sums of several programs are added
    dq, dk = (call.q.new_empty((call.parts, *q.shape), dtype=q.dtype if alone else call.acc) for _ in range(2))
    dv = call.v.new_empty(v.shape)
    tree, L = _tree(level_scale), level_scale.shape[-1]
    W = max(L, INSIDE.value + tree["HEIGHTS"])  # further levels are added to the last
    dlevel = level_scale.new_empty((*v.shape[:3], W), dtype=level_scale.dtype if W == L else call.acc)
    dg, read = (None if call.g is None else torch.empty_like(call.g) for _ in range(2))
    backward_kernel[call.grid](
        call.q,
        call.k,
        call.v,
        call.g,
        level_scale.contiguous(),
        do.to(v.dtype).contiguous(),
        dq,
        dk,
        dv,
        dlevel,
        dg,
        read,
        scale,
        q.shape[0] * q.shape[1],
        W=W,
        HALF=half(q.dtype),
        **call.shared,
        **tree,
    )
    dq, dk = (x[0] if alone else x.sum(0).to(q.dtype) for x in (dq, dk))
    if W > L:
        dlevel = torch.cat([dlevel[..., : L - 1], dlevel[..., L - 1 :].sum(-1, keepdim=True)], -1)
    dg = dg if dg is None or log_decay is None else dg.to(log_decay.dtype)
    return dq, dk, dv, dlevel.to(level_scale.dtype), dg


def _tree(level_scale: Tensor) -> dict[str, int]:
    """Weights of a token, and heights of the nodes that rows see."""
    T, L = level_scale.shape[1], level_scale.shape[3]
    return {"L": L, "HEIGHTS": max(0, levels(T) - INSIDE.value)}
