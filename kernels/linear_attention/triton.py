"""Linear attention with a scalar decay in Triton: kernels and their launches, forward and backward.

Within a chunk of C tokens, with G the inclusive cumulative log decay, Gam_ij = e^{G_i - G_j} for j <= i (else 0), s the
scale, S the state before the chunk and dS the gradient of the state after it (equations: README.md):

    A  = s (Q K^T) . Gam          O  = A V + s e^G Q S           S' = e^{G_C} S + (e^{G_C - G} K)^T V
    dA = s (dO V^T) . Gam         dQ = dA K + s e^G dO S^T       dS' = e^{G_C} dS + (s e^G Q)^T dO
    dK = dA^T Q + e^{G_C - G} V dS^T                             dV = A^T dO + e^{G_C - G} K dS

One program walks one segment of one head with the state in registers. Few heads: a sequence is cut into segments, and a
first pass gives every segment its border states. Nothing of size tokens x K x V reaches memory. Every result is linear
in the key columns and in the value columns of its operands, so states of more than BK x BV are cut into blocks (kb, vb)
that are worked on apart and whose parts are added in order.

The decay's gradient: d/dg_t adds the pairs (i, j) with j < t <= i, that is <S, dS> at the segment's start less the sum
over the tokens before t of u = (its pairs with earlier j) - (its pairs with later i). Sums over all tokens cancel, so
both sides must hold the same numbers: pairs within a chunk are summed by rows and by columns of one float32 matrix
without its diagonal, pairs with other chunks come from the state's part of dQ and, through `vdv`, of dV.

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
    load_log_decay,
    load_rows,
    operands,
    segment_of,
    store_rows,
    sum_dtype,
    weight,
)


@triton.jit
def _program(H, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Segment, head, key block and value block of this program; neighbours share their rows' cache lines."""
    index = tl.program_id(0).to(tl.int64)
    vb, index = (index % VALUES).to(tl.int32), index // VALUES
    kb, index = (index % KEYS).to(tl.int32), index // KEYS
    return index // H, index % H, kb, vb


@triton.jit
def border_kernel(
    x,  # k, or q for the gradient  [rows, H / R, K]
    y,  # v, or do                  [rows, H, V]
    g,
    borders,  # [slots, H, K, V]: a segment's own contribution to the border that it flows to
    totals,  # [slots, H]: the segment's log decay in base 2
    table,
    scale,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    GRADIENT: tl.constexpr,
    OUTER: tl.constexpr,  # the border that ends (gradient: begins) a sequence is wanted too
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """What a segment alone adds: sum_j e^{g after j} k_j v_j^T to its end, or s sum_i e^{g up to i} q_i do_i^T to its
    start. Walked away from that border, so that the sum is never rescaled."""
    segment, h, kb, vb = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV))
    first, live, slot = segment_of(segment, table, T, length, P, PACKED)
    outermost = (segment % P) == (0 if GRADIENT else P - 1)
    if (live > 0) & (OUTER | PACKED | (outermost == 0)):
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        S = tl.zeros([BK, BV], dtype=ACC)
        walked = tl.zeros([], dtype=SUM)
        last = (live - 1) // C * C
        for step in range(0, live, C):
            start = step if GRADIENT else last - step
            row = first + start
            xs = load_rows(x + row * keys + (h // R) * K, i, live - start, kk, keys, K, BK).to(DOT)
            ys = load_rows(y + (row * H + h) * V, i, live - start, vv, H * V, V, BV).to(DOT)
            if DECAY:
                gs = load_log_decay(g + row * H + h, i, live - start, H, SUM)
                G = tl.cumsum(gs)
                total = tl.sum(gs)
                away = G if GRADIENT else total - G
                ys = (ys * weight(walked + away, ACC)[:, None]).to(DOT)
                walked += total
            S = tl.dot(tl.trans(xs), ys, acc=S, input_precision=PREC, out_dtype=ACC)
        if GRADIENT:
            S *= scale
        to = slot if GRADIENT else slot + 1
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        tl.store(borders + (to * H + h) * K * V + kk[:, None] * V + vv[None, :], S, mask=keep)
        if DECAY:
            tl.store(totals + slot * H + h, walked)


@triton.jit
def scan_kernel(
    borders,
    totals,
    outer,  # the state before the first segment, or the gradient of the one after the last  [N, H, K, V]
    far,  # where the scan ends up  [N, H, K, V]
    slots,  # [N + 1]: first slot of every packed sequence
    P,
    H,
    SIZE: tl.constexpr,  # K V
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_FAR: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """border <- contribution + e^{decay of the segment between} (the border before it), in place."""
    index = tl.program_id(0).to(tl.int64)
    block, index = index % tl.cdiv(SIZE, BLOCK), index // tl.cdiv(SIZE, BLOCK)
    n, h = index // H, index % H
    if PACKED:
        begin, P = tl.load(slots + n), (tl.load(slots + n + 1) - tl.load(slots + n)).to(tl.int32) - 1
    else:
        begin = n * (P + 1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    keep = at < SIZE
    S = tl.load(outer + (n * H + h) * SIZE + at, mask=keep, other=0.0) if HAS_OUTER else tl.zeros([BLOCK], dtype=ACC)
    tl.store(borders + ((begin + (P if GRADIENT else 0)) * H + h) * SIZE + at, S, mask=keep)
    # Without `far` the last contribution was not computed.
    for step in range(0, P if HAS_FAR else P - 1):
        p = begin + (P - 1 - step if GRADIENT else step)  # the segment crossed
        to = borders + ((p if GRADIENT else p + 1) * H + h) * SIZE + at
        if DECAY:
            S *= tl.exp2(tl.load(totals + p * H + h))
        S += tl.load(to, mask=keep, other=0.0)
        tl.store(to, S, mask=keep)
    if HAS_FAR:
        tl.store(far + (n * H + h) * SIZE + at, S, mask=keep)
    elif GRADIENT:  # read, though only to be multiplied by a state of zeros
        tl.store(borders + (begin * H + h) * SIZE + at, tl.zeros([BLOCK], dtype=ACC), mask=keep)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    g,
    states,  # [slots, H, K, V] at the segments' starts
    o,  # [key blocks, rows, H, V]
    final,  # [B, H, K, V], written when a sequence is one segment
    table,
    scale,
    rows,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    segment, h, kb, vb = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV))
    first, live, slot = segment_of(segment, table, T, length, P, PACKED)
    if (live > 0) | HAS_FINAL:  # an empty sequence hands its state on
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        causal = i[:, None] >= i[None, :]
        at_state = (slot * H + h) * K * V + kk[:, None] * V + vv[None, :]
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        S = tl.load(states + at_state, mask=keep, other=0.0) if HAS_STATE else tl.zeros([BK, BV], dtype=ACC)
        for start in range(0, live, C):
            row = first + start
            at_key = row * keys + (h // R) * K
            qs = load_rows(q + at_key, i, live - start, kk, keys, K, BK).to(DOT)
            ks = load_rows(k + at_key, i, live - start, kk, keys, K, BK).to(DOT)
            vs = load_rows(v + (row * H + h) * V, i, live - start, vv, H * V, V, BV).to(DOT)
            A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
            if DECAY:
                gs = load_log_decay(g + row * H + h, i, live - start, H, SUM)
                G = tl.cumsum(gs)
                total = tl.sum(gs)
                A *= weight(G[:, None] - G[None, :], ACC)
            A = tl.where(causal, A, 0.0).to(DOT)
            os = tl.dot(qs, S.to(DOT), input_precision=PREC, out_dtype=ACC)
            if DECAY:
                os *= weight(G, ACC)[:, None]
            os = tl.dot(A, vs, acc=os, input_precision=PREC, out_dtype=ACC)
            at_value = ((kb * rows + row) * H + h) * V
            store_rows(o + at_value, os * scale, i, live - start, vv, H * V, V, BV)
            if DECAY:
                S *= weight(total, ACC)
                vs = (vs * weight(total - G, ACC)[:, None]).to(DOT)
            S = tl.dot(tl.trans(ks), vs, acc=S, input_precision=PREC, out_dtype=ACC)
        if HAS_FINAL:
            tl.store(final + at_state, S, mask=keep)


@triton.jit
def backward_kv_kernel(
    q,
    k,
    v,
    g,
    do,
    dstates,  # [slots, H, K, V]: gradients of the states at the segments' ends
    dk,  # [value blocks, rows, H, K]
    dv,  # [key blocks, rows, H, V]
    vdv,  # [blocks, rows, H]: v . (the state's part of dv)
    dinitial,  # [B, H, K, V], written when a sequence is one segment
    table,
    scale,
    rows,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """Backwards over the chunks with dS in registers. dK is computed as dK^T, for which dS is a left operand."""
    segment, h, kb, vb = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV))
    first, live, slot = segment_of(segment, table, T, length, P, PACKED)
    if (live > 0) | HAS_INITIAL:
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        upper = i[:, None] <= i[None, :]  # [j, i]
        causal = i[:, None] >= i[None, :]  # [i, j]
        at_state = (slot * H + h) * K * V + kk[:, None] * V + vv[None, :]
        keep = (kk < K)[:, None] & (vv < V)[None, :]
        dS = tl.load(dstates + at_state, mask=keep, other=0.0) if HAS_STATE else tl.zeros([BK, BV], dtype=ACC)
        last = (live - 1) // C * C
        for step in range(0, live, C):
            start = last - step
            row = first + start
            left = live - start
            at_key = row * keys + (h // R) * K
            at_value = (row * H + h) * V
            qs = load_rows(q + at_key, i, left, kk, keys, K, BK).to(DOT)
            ks = load_rows(k + at_key, i, left, kk, keys, K, BK).to(DOT)
            vs = load_rows(v + at_value, i, left, vv, H * V, V, BV).to(DOT)
            dos = load_rows(do + at_value, i, left, vv, H * V, V, BV).to(DOT)
            if DECAY:
                gs = load_log_decay(g + row * H + h, i, left, H, SUM)
                G = tl.cumsum(gs)
                total = tl.sum(gs)
                to_end = weight(total - G, ACC)
            dS_read = dS.to(DOT)

            AT = tl.dot(ks, tl.trans(qs), input_precision=PREC, out_dtype=ACC) * scale  # [j, i]
            if DECAY:
                AT *= weight(G[None, :] - G[:, None], ACC)
            AT = tl.where(upper, AT, 0.0).to(DOT)
            dvs = tl.dot(ks, dS_read, input_precision=PREC, out_dtype=ACC)
            if DECAY:
                dvs *= to_end[:, None]
                at_scalar = ((kb * tl.cdiv(V, BV) + vb) * rows + row + i) * H + h
                tl.store(vdv + at_scalar, tl.sum(dvs * vs, 1), mask=i < left)
            dvs = tl.dot(AT, dos, acc=dvs, input_precision=PREC, out_dtype=ACC)
            store_rows(dv + ((kb * rows + row) * H + h) * V, dvs, i, left, vv, H * V, V, BV)

            dA = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC) * scale  # [i, j]
            if DECAY:
                dA *= weight(G[:, None] - G[None, :], ACC)
            dA = tl.where(causal, dA, 0.0).to(DOT)
            dkT = tl.dot(dS_read, tl.trans(vs), input_precision=PREC, out_dtype=ACC)
            if DECAY:
                dkT *= to_end[None, :]
            dkT = tl.dot(tl.trans(qs), dA, acc=dkT, input_precision=PREC, out_dtype=ACC)
            at_dk = dk + ((vb * rows + row) * H + h) * K + kk[:, None] + i[None, :] * (H * K)
            tl.store(at_dk, dkT.to(dk.dtype.element_ty), mask=(kk < K)[:, None] & (i < left)[None, :])

            if DECAY:
                dS *= weight(total, ACC)
                dos = (dos * (scale * weight(G, ACC))[:, None]).to(DOT)
            else:
                dos = (dos * scale).to(DOT)
            dS = tl.dot(tl.trans(qs), dos, acc=dS, input_precision=PREC, out_dtype=ACC)
        if HAS_INITIAL:
            tl.store(dinitial + at_state, dS, mask=keep)


@triton.jit
def backward_q_kernel(
    q,
    k,
    v,
    g,
    do,
    states,  # [slots, H, K, V] at the segments' starts
    dstates,  # the gradients of the same
    vdv,
    dq,  # [value blocks, rows, H, K]
    dg,  # [blocks, rows, H]
    table,
    scale,
    rows,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """Forwards over the chunks with S^T in registers, held transposed since it is a right operand."""
    segment, h, kb, vb = _program(H, tl.cdiv(K, BK), tl.cdiv(V, BV))
    first, live, slot = segment_of(segment, table, T, length, P, PACKED)
    if live > 0:
        i = tl.arange(0, C)
        kk = kb * BK + tl.arange(0, BK)
        vv = vb * BV + tl.arange(0, BV)
        keys = (H // R) * K
        causal = i[:, None] >= i[None, :]
        before = i[:, None] > i[None, :]
        E = tl.zeros([], dtype=ACC)
        if HAS_STATE:
            at_state = (slot * H + h) * K * V + kk[None, :] * V + vv[:, None]
            keep = (kk < K)[None, :] & (vv < V)[:, None]
            ST = tl.load(states + at_state, mask=keep, other=0.0)
            if DECAY:
                E = tl.sum(ST * tl.load(dstates + at_state, mask=keep, other=0.0))
        else:
            ST = tl.zeros([BV, BK], dtype=ACC)
        for start in range(0, live, C):
            row = first + start
            left = live - start
            at_key = row * keys + (h // R) * K
            at_value = (row * H + h) * V
            ks = load_rows(k + at_key, i, left, kk, keys, K, BK).to(DOT)
            vs = load_rows(v + at_value, i, left, vv, H * V, V, BV).to(DOT)
            dos = load_rows(do + at_value, i, left, vv, H * V, V, BV).to(DOT)
            dA = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC) * scale
            if DECAY:
                gs = load_log_decay(g + row * H + h, i, left, H, SUM)
                G = tl.cumsum(gs)
                total = tl.sum(gs)
                dA *= weight(G[:, None] - G[None, :], ACC)
                qs = load_rows(q + at_key, i, left, kk, keys, K, BK).to(DOT)
                inside = dA * tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)  # [i, j]
                inside = tl.where(before, inside, 0.0)
                u = tl.sum(inside, 1) - tl.sum(inside, 0)
            dA = tl.where(causal, dA, 0.0).to(DOT)
            dqs = tl.dot(dos, ST.to(DOT), input_precision=PREC, out_dtype=ACC)
            if DECAY:
                dqs *= (scale * weight(G, ACC))[:, None]
                at_scalar = ((kb * tl.cdiv(V, BV) + vb) * rows + row + i) * H + h
                u += tl.sum(qs * dqs, 1) - tl.load(vdv + at_scalar, mask=i < left, other=0.0)
                dgs = E - (tl.cumsum(u) - u)
                E -= tl.sum(u)
                raw = tl.load(g + (row + i) * H + h, mask=i < left, other=0.0)
                tl.store(dg + at_scalar, tl.where(raw < WEAKEST, 0.0, dgs), mask=i < left)
            else:
                dqs *= scale
            dqs = tl.dot(dA, ks, acc=dqs, input_precision=PREC, out_dtype=ACC)
            store_rows(dq + ((vb * rows + row) * H + h) * K, dqs, i, left, kk, H * K, K, BK)
            if DECAY:
                ST *= weight(total, ACC)
                ks = (ks * weight(total - G, ACC)[:, None]).to(DOT)
            ST = tl.dot(tl.trans(vs), ks, acc=ST, input_precision=PREC, out_dtype=ACC)


class Launch(NamedTuple):
    C: int  # tokens in a chunk
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    block: int  # largest BK and BV
    programs: int  # cut sequences until there are about as many programs
    border: Launch
    forward: Launch
    backward_kv: Launch
    backward_q: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if dtype == torch.bfloat16 and max(K, V) > 64:
        back = Launch(64, 8, 1)  # a second stage would spill more than it hides
        return Plan(128, 264, border=Launch(64, 4, 3), forward=Launch(128, 8, 2), backward_kv=back, backward_q=back)
    if dtype == torch.bfloat16:
        back = Launch(64, 4, 2)
        return Plan(64, 264, border=Launch(128, 4, 3), forward=Launch(64, 4, 3), backward_kv=back, backward_q=back)
    exact = operands(dtype)[2] == "ieee"  # without tensor cores, whose chunks want more rows
    other = Launch(16, 8, 1) if exact else Launch(32, 4, 1)
    return Plan(64, 264, border=other, forward=other, backward_kv=other, backward_q=other)


def sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Cut, tuple[int, int, int], torch.dtype]:
    """How a call's sequences are cut, and the shape and dtype of a state."""
    call = _Call(q, q, v, None, 1.0, cu_seqlens, None, None)
    return call.cut, call.shape, call.acc


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o, the final state if asked for, and the states at the borders of segments if sequences were cut."""
    call = _Call(q, k, v, log_decay, scale, cu_seqlens, how, length)
    initial = None if initial_state is None else initial_state.to(call.acc).contiguous()
    final = call.state() if output_final_state else None
    states = call.borders(call.k, call.v, initial, final, gradient=False) if call.cut.inner else None
    o = call.parts(call.keys, v)
    start = initial if states is None else states
    call.launch(
        forward_kernel,
        call.how.forward,
        (call.q, call.k, call.v, call.g, start, o, None if call.cut.inner else final),
        rows=call.rows,
        HAS_STATE=start is not None,
        HAS_FINAL=final is not None and not call.cut.inner,
    )
    return call.joined(o, v), final, states


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor | None,
    do: Tensor,
    dfinal: Tensor | None,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, log_decay and initial_state; `states` as returned by `forward` with the same plan."""
    call = _Call(q, k, v, log_decay, scale, cu_seqlens, how, length)
    cut, rows, H = call.cut.inner, call.rows, v.shape[2]
    initial = None if initial_state is None else initial_state.to(call.acc).contiguous()
    dfinal = None if dfinal is None else dfinal.to(call.acc).contiguous()
    dinitial = None if initial is None else call.state()
    do = do.to(v.dtype).contiguous()
    dstates = call.borders(call.q, do, dfinal, dinitial, gradient=True) if cut else None

    dq, dk, dv = call.parts(call.values, q), call.parts(call.values, k), call.parts(call.keys, v)
    vdv, dg = (
        None if log_decay is None else q.new_empty((call.keys * call.values, rows, H), dtype=call.acc) for _ in range(2)
    )
    end = dfinal if dstates is None else dstates[1:]
    call.launch(
        backward_kv_kernel,
        call.how.backward_kv,
        (call.q, call.k, call.v, call.g, do, end, dk, dv, vdv, None if cut else dinitial),
        rows=rows,
        HAS_STATE=end is not None,
        HAS_INITIAL=dinitial is not None and not cut,
    )
    start, dstart = (initial, dinitial) if states is None else (states, dstates)
    call.launch(
        backward_q_kernel,
        call.how.backward_q,
        (call.q, call.k, call.v, call.g, do, start, dstart, vdv, dq, dg),
        rows=rows,
        HAS_STATE=start is not None,
    )
    if dg is not None and log_decay is not None:
        dg = dg.sum(0).view(log_decay.shape).to(log_decay.dtype)
    if dinitial is not None and initial_state is not None:
        dinitial = dinitial.to(initial_state.dtype)
    return call.joined(dq, q), call.joined(dk, k), call.joined(dv, v), dg, dinitial


class _Call:
    """The sizes of one call, its operands made contiguous, and what its launches share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
        length: int | None,
    ) -> None:
        (B, T, G, K), (H, V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, K, V)
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.g = None if log_decay is None else log_decay.to(self.acc).contiguous()
        self.BK, self.BV = (min(self.how.block, max(16, triton.next_power_of_2(D))) for D in (K, V))
        self.keys, self.values = triton.cdiv(K, self.BK), triton.cdiv(V, self.BV)
        self.rows, self.heads, self.shape = B * T, H, (H, K, V)
        self.scale, self.group = scale, H // G
        self.cut = Cut.of(B, T, cu_seqlens, self.how.programs // (H * self.keys * self.values), length)

    def launch(self, kernel: Any, launch: Launch, tensors: tuple[Tensor | None, ...], **flags: Any) -> None:
        H, K, V = self.shape
        dot, acc, precision = operands(self.q.dtype)
        kernel[(self.cut.segments * H * self.keys * self.values,)](
            *tensors,
            table=self.cut.table,
            scale=self.scale,
            T=self.cut.T,
            length=self.cut.length,
            P=self.cut.P,
            H=H,
            R=self.group,
            K=K,
            V=V,
            C=launch.C,
            BK=self.BK,
            BV=self.BV,
            DECAY=self.g is not None,
            PACKED=self.cut.table is not None,
            DOT=dot,
            SUM=sum_dtype(self.q.dtype),
            ACC=acc,
            PREC=precision,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **flags,
        )

    def borders(self, x: Tensor, y: Tensor, outer: Tensor | None, far: Tensor | None, *, gradient: bool) -> Tensor:
        """States at the segments' borders (of k and v), or their gradients (of q and do)."""
        H, K, V = self.shape
        borders = x.new_empty((self.cut.borders, H, K, V), dtype=self.acc)
        totals = x.new_empty((self.cut.borders, H), dtype=self.acc)
        self.launch(
            border_kernel, self.how.border, (x, y, self.g, borders, totals), GRADIENT=gradient, OUTER=far is not None
        )
        BLOCK = 1024
        scan_kernel[(self.cut.sequences * H * triton.cdiv(K * V, BLOCK),)](
            borders,
            totals,
            outer,
            far,
            self.cut.slots,
            self.cut.P,
            H,
            SIZE=K * V,
            BLOCK=BLOCK,
            DECAY=self.g is not None,
            GRADIENT=gradient,
            HAS_OUTER=outer is not None,
            HAS_FAR=far is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
        )
        return borders

    def state(self) -> Tensor:
        return self.q.new_empty((self.cut.sequences, *self.shape), dtype=self.acc)

    def parts(self, n: int, like: Tensor) -> Tensor:
        """Room for n addends of every head of `like`, in its dtype if nothing is to be added."""
        heads, width = like.shape[2:]
        alone = n == 1 and heads == self.shape[0]
        return like.new_empty((n, self.rows, self.shape[0], width), dtype=like.dtype if alone else self.acc)

    def joined(self, parts: Tensor, like: Tensor) -> Tensor:
        """Sum the addends, and the heads that share a head of `like`."""
        if parts.shape[0] == 1 and parts.shape[2] == like.shape[2]:
            return parts.view(like.shape)
        parts = parts.unflatten(2, (like.shape[2], -1))  # [n, rows, G, H / G, width]
        return parts.sum((0, 3)).view(like.shape).to(like.dtype)
