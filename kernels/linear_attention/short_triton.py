"""Linear attention over short rows in Triton: one kernel forward, one backward, nothing but the results in memory.

The equations are those of triton.py, without an initial state. A program has all the tokens of a few narrow heads, side
by side as a batch of small products, each warp with heads of its own: `HB` heads that share q and k, whose gradients it
adds, or one head of each of `HB` groups. A batch of one has no axis. States stay in registers. The backward walks
forwards for dq and then back for dk and dv, and finds in the cache what it read on the way.

The decay's gradient: dg_t = sum over s >= t of (q_s . dq_s - k_s . dk_s), each of a head alone and before rounding. The
way forwards leaves q . dq in memory. What pairs within a chunk, a token with itself above all, add to both sides
cancels: both ways round the same number, (v_s . do_t) e^{G_t - G_s}, to an operand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from mixassay.kernels.common.triton import WEAKEST, weight

__all__ = ["Launch", "backward", "forward", "plan", "serves"]


@triton.jit
def forward_kernel(
    q,  # [B T, G, K]
    k,
    v,  # [B T, G R, V]
    g,  # [B T, G R]
    o,
    scale,
    T,
    G,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
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
    keys, values = tiles(there, HB) & (kk < K)[None, :], tiles(there, HB) & (vv < V)[None, :]
    S = zeros(BK, BV, HB, ACC)
    for start in range(0, T, C):
        row, live = b * T + start, i < T - start
        qs = load(q + row * G * K + at_k, keys, live, DOT)
        ks = load(k + row * G * K + at_k, keys, live, DOT)
        vs = load(v + row * H * V + at_v, values, live, DOT)
        A = tl.dot(qs, turned(ks, HB), input_precision=PREC, out_dtype=ACC)
        os = tl.dot(qs, S.to(DOT), input_precision=PREC, out_dtype=ACC)
        if DECAY:
            gs = load_decay(g + row * H + at_g, mine & live, SUM)
            near, total = tl.cumsum(gs, -1), tl.sum(gs, -1)
            A *= weight(tl.expand_dims(near, -1) - tl.expand_dims(near, -2), ACC)
            os *= tl.expand_dims(weight(near, ACC), -1)
        A = tl.where(i[:, None] >= i[None, :], A, 0.0)
        os = tl.dot(A.to(DOT), vs, acc=os, input_precision=PREC, out_dtype=ACC)
        store(o + row * H * V + at_v, os * scale, values, live)
        if DECAY:
            S *= tiles(weight(total, ACC), HB)
            vs = (vs * tl.expand_dims(weight(lines(total, HB) - near, ACC), -1)).to(DOT)
        S = tl.dot(turned(ks, HB), vs, acc=S, input_precision=PREC, out_dtype=ACC)


@triton.jit
def backward_kernel(
    q,
    k,
    v,
    g,
    do,
    dq,  # [parts, B T, G, K]
    dk,
    dv,
    dg,  # [B T, G R]
    read,  # the same: q . dq, of this program alone
    scale,
    rows,  # B T
    T,
    G,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
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

    S = zeros(BV, BK, HB, ACC)  # turned
    for start in range(0, T, C):
        row, live = b * T + start, i < T - start
        ks = load(k + row * G * K + at_k, keys, live, DOT)
        vs = load(v + row * H * V + at_v, values, live, DOT)
        dos = load(do + row * H * V + at_v, values, live, DOT)
        D = tl.dot(dos, turned(vs, HB), input_precision=PREC, out_dtype=ACC)
        dqs = tl.dot(dos, S.to(DOT), input_precision=PREC, out_dtype=ACC)
        if DECAY:
            gs = load_decay(g + row * H + at_g, mine & live, SUM)
            near, total = tl.cumsum(gs, -1), tl.sum(gs, -1)
            D *= weight(tl.expand_dims(near, -1) - tl.expand_dims(near, -2), ACC)
            dqs *= tl.expand_dims(weight(near, ACC), -1)
        D = tl.where(i[:, None] >= i[None, :], D, 0.0)
        dqs = tl.dot(D.to(DOT), ks, acc=dqs, input_precision=PREC, out_dtype=ACC) * scale
        if DECAY:
            qs = load(q + row * G * K + at_k, keys, live, DOT)
            tl.store(read + row * H + at_g, tl.sum(dqs * qs, -1), mask=mine & live)
            S *= tiles(weight(total, ACC), HB)
            vs = (vs * tl.expand_dims(weight(lines(total, HB) - near, ACC), -1)).to(DOT)
        if added:
            dqs = tl.sum(dqs, 0)
        store(dq + (part * rows + row) * G * K + to, dqs, whole, live)
        S = tl.dot(turned(vs, HB), ks, acc=S, input_precision=PREC, out_dtype=ACC)

    tl.debug_barrier()  # other threads load `read` than stored it
    dS = zeros(BK, BV, HB, ACC)
    dSt = zeros(BV, BK, HB, ACC)  # turned
    later = tl.sum(tl.sum(dS, -1), -1)  # zeros
    last = (T - 1) // C * C
    for step in range(0, T, C):
        row, live = b * T + last - step, i < T - last + step
        qs = load(q + row * G * K + at_k, keys, live, DOT)
        ks = load(k + row * G * K + at_k, keys, live, DOT)
        vs = load(v + row * H * V + at_v, values, live, DOT)
        dos = load(do + row * H * V + at_v, values, live, DOT)
        A = tl.dot(ks, turned(qs, HB), input_precision=PREC, out_dtype=ACC)
        D = tl.dot(vs, turned(dos, HB), input_precision=PREC, out_dtype=ACC)
        dvs = tl.dot(ks, dS.to(DOT), input_precision=PREC, out_dtype=ACC)
        dks = tl.dot(vs, dSt.to(DOT), input_precision=PREC, out_dtype=ACC)
        if DECAY:
            gs = load_decay(g + row * H + at_g, mine & live, SUM)
            near, total = tl.cumsum(gs, -1), tl.sum(gs, -1)
            between = weight(tl.expand_dims(near, -2) - tl.expand_dims(near, -1), ACC)
            A *= between
            D *= between
            after = tl.expand_dims(weight(lines(total, HB) - near, ACC), -1)
            dvs *= after
            dks *= after
        A = tl.where(i[:, None] <= i[None, :], A, 0.0)
        D = tl.where(i[:, None] <= i[None, :], D, 0.0)
        dvs = tl.dot(A.to(DOT), dos, acc=dvs, input_precision=PREC, out_dtype=ACC)
        dks = tl.dot(D.to(DOT), qs, acc=dks, input_precision=PREC, out_dtype=ACC) * scale
        store(dv + row * H * V + at_v, dvs * scale, values, live)
        if DECAY:
            keep = mine & live
            u = tl.load(read + row * H + at_g, mask=keep, other=0.0) - tl.sum(dks * ks, -1)
            raw = tl.load(g + row * H + at_g, mask=keep, other=0.0)
            sums = lines(later, HB) + tl.cumsum(u, -1, reverse=True)
            tl.store(dg + row * H + at_g, tl.where(raw < WEAKEST, 0.0, sums), mask=keep)
            later += tl.sum(u, -1)
            dS *= tiles(weight(total, ACC), HB)
            dSt *= tiles(weight(total, ACC), HB)
            dos = (dos * tl.expand_dims(weight(near, ACC), -1)).to(DOT)
        if added:
            dks = tl.sum(dks, 0)
        store(dk + (part * rows + row) * G * K + to, dks, whole, live)
        dS = tl.dot(turned(qs, HB), dos, acc=dS, input_precision=PREC, out_dtype=ACC)
        dSt = tl.dot(turned(dos, HB), qs, acc=dSt, input_precision=PREC, out_dtype=ACC)


def plan(K: int, V: int, *, gradient: bool) -> Launch:
    """A fixed table, not a search: the same call sums in the same order in every process. Narrow
    heads use the older products: of Hopper's own, those of 32 columns may be wrong (see `tile`)."""
    if max(K, V) > 32:
        return Launch(32, 1, 4, 2)
    if max(K, V) > 16:
        return Launch(16, 4, 4, 2)
    return Launch(16, 8, 4, 2, 168 if gradient else 128)  # three programs on a multiprocessor, or four


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, how: Launch | None = None
) -> Tensor:
    """o of q, k [B, T, G, K], v [B, T, H, V] and log_decay [B, T, H]."""
    call = Call(q, k, v, log_decay, how or plan(q.shape[3], v.shape[3], gradient=False))
    o = call.v.new_empty(v.shape)
    forward_kernel[call.grid](call.q, call.k, call.v, call.g, o, scale, **call.shared, **call.widths())
    return o


def backward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, do: Tensor, how: Launch | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and log_decay."""
    call = Call(q, k, v, log_decay, how or plan(q.shape[3], v.shape[3], gradient=True))
    alone = call.parts == 1  # else the sums of several programs are added
    dq, dk = (call.q.new_empty((call.parts, *q.shape), dtype=q.dtype if alone else call.acc) for _ in range(2))
    dv = call.v.new_empty(v.shape)
    dg, read = (None if call.g is None else torch.empty_like(call.g) for _ in range(2))
    do, rows = do.to(v.dtype).contiguous(), q.shape[0] * q.shape[1]
    backward_kernel[call.grid](
        call.q, call.k, call.v, call.g, do, dq, dk, dv, dg, read, scale, rows, **call.shared, **call.widths()
    )
    dq, dk = (x[0] if alone else x.sum(0).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg if dg is None or log_decay is None else dg.to(log_decay.dtype)
