"""Linear attention with a scalar decay in Triton: kernels and their launches, forward and backward.

With G the inclusive cumulative log decay, s the scale, S the state before a chunk of C tokens and dS the gradient of
the state after it (equations: README.md), all four results are one operation: s times the sum over j <= i (or j >= i)
of e^{-|G_i - G_j|} (x_i . y_j) z_j, where what lies outside of the chunk is read from a state.

           x   y   z     the state    after the chunk, or before it
    o      q   k   v     S            e^{G_C} S + (e^{G_C - G} K)^T V
    dq     do  v   k     S^T          the same
    dk     v   do  q     dS^T         the same as for dv
    dv     k   q   do    dS           e^{G_C} dS + (s e^G Q)^T dO

`walk_kernel` is that operation, forwards or backwards: a program walks one segment of one head with the state in
registers. Few heads: a sequence is cut into segments, and a first pass (`border_kernel`, `scan_kernel`) gives every
segment its border states. Nothing of size tokens x K x V reaches memory. A state is cut into blocks of at most `inner`
x `outer`: columns of z are independent of each other, results of blocks of columns of x and y are added in order.

The decay's gradient: d/dg_t adds the pairs (i, j) with j < t <= i, that is <S, dS> at the segment's start less the sum
over the tokens before t of u = (its pairs with earlier j) - (its pairs with later i). Sums over all tokens cancel, so
both sides must hold the same numbers: pairs within a chunk are summed from float32 products, without the diagonal, by
the walks for dq and for dv; pairs with other chunks are the state's part of dq times q, and of dv times v.

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
    segment_of,
    store_rows,
    sum_dtype,
    tile,
    weight,
)
from mixassay.kernels.linear_attention import short_triton

LONGEST = 2048
"""Tokens of a segment, at most. Within a segment the decay's gradient is a running sum of differences of products that
were rounded apart: its error in bfloat16, up to 1.8 % after 4096 tokens and 2.5 % after 8192, grows with the root of
their number."""


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
    segment, h, nb, mb = _program(H, tl.cdiv(N, BN), tl.cdiv(M, BM))
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


@triton.jit
def decay_kernel(
    states,  # [slots, H, K, V] at the segments' starts
    dstates,  # the gradients of the same
    read,  # [READ, H, rows]
    written,  # [WRITTEN, H, rows]
    g,
    dg,  # [rows, H]
    table,
    rows,
    T,
    length,
    P,
    H,
    SIZE: tl.constexpr,  # K V
    READ: tl.constexpr,
    WRITTEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PACKED: tl.constexpr,
    ACC: tl.constexpr,
):
    """<S, dS> at the segment's start less the u of all tokens before."""
    segment, h, _, _ = _program(H, 1, 1)
    first, live, slot = segment_of(segment, table, T, length, P, PACKED)
    i = tl.arange(0, BLOCK)
    pairs = tl.zeros([BLOCK], dtype=ACC)
    if HAS_STATE and live > 0:
        for start in range(0, SIZE, BLOCK):
            at = (slot * H + h) * SIZE + start + i
            keep = start + i < SIZE
            pairs += tl.load(states + at, mask=keep, other=0.0) * tl.load(dstates + at, mask=keep, other=0.0)
    E = tl.sum(pairs)
    for start in range(0, live, BLOCK):
        keep = start + i < live
        row = first + start + i
        u = tl.zeros([BLOCK], dtype=ACC)
        for n in tl.static_range(READ):
            u += tl.load(read + (n * H + h) * rows + row, mask=keep, other=0.0)
        for n in tl.static_range(WRITTEN):
            u += tl.load(written + (n * H + h) * rows + row, mask=keep, other=0.0)
        raw = tl.load(g + row * H + h, mask=keep, other=0.0)
        tl.store(dg + row * H + h, tl.where(raw < WEAKEST, 0.0, E - (tl.cumsum(u) - u)), mask=keep)
        E -= tl.sum(u)


class Launch(NamedTuple):
    C: int  # tokens in a chunk
    inner: int  # largest block of a state's rows, the columns of x and y
    outer: int  # and of its columns, those of z
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    programs: int  # cut sequences until there are about as many programs
    border: Launch
    walk: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if half(dtype) and max(K, V) > 64:
        return Plan(528, border=Launch(64, 128, 128, 4, 3), walk=Launch(64, 128, 64, 4, 2))
    if half(dtype):
        return Plan(264, border=Launch(128, 64, 64, 4, 3), walk=Launch(64, 64, 64, 4, 3))
    exact = operands(dtype)[2] == "ieee"  # without tensor cores, whose chunks want more rows
    other = Launch(16, 64, 64, 8, 1) if exact else Launch(32, 64, 64, 4, 1)
    return Plan(264, border=other, walk=other)


def sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Cut, tuple[int, int, int], torch.dtype]:
    """How a call's sequences are cut, and the shape and dtype of a state."""
    call = _Call(q, q, v, None, 1.0, cu_seqlens, None, None)
    return call.cut, (call.H, call.K, call.V), call.acc


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
    if how is None and initial_state is None and not output_final_state and _short(q, v, cu_seqlens):
        return short_triton.forward(q, k, v, log_decay, scale), None, None
    call = _Call(q, k, v, log_decay, scale, cu_seqlens, how, length)
    cut = call.cut.inner
    initial = call.wide(initial_state)
    final = call.state() if output_final_state else None
    states = call.borders(call.k, call.v, initial, final, gradient=False) if cut else None
    start = states if cut else initial
    o, _ = call.walk(call.q, call.k, call.v, start, final=None if cut else final)
    return o, final, states


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
    if how is None and initial_state is None and dfinal is None and _short(q, v, cu_seqlens):
        return *short_triton.backward(q, k, v, log_decay, scale, do), None
    call = _Call(q, k, v, log_decay, scale, cu_seqlens, how, length)
    q, k, v, do = call.q, call.k, call.v, do.to(v.dtype).contiguous()
    initial, dfinal = call.wide(initial_state), call.wide(dfinal)
    dinitial = None if initial is None else call.state()
    if states is None:
        start, dstart, dend = initial, dinitial, dfinal
    else:
        dstates = call.borders(q, do, dfinal, dinitial, gradient=True)
        start, dstart, dend = states, dstates, dstates[1:]
    far = dinitial if states is None else None
    dv, written = call.walk(k, q, do, dend, reverse=True, final=far, w=v)
    dk, _ = call.walk(v, do, q, dend, reverse=True, turned=True)
    dq, read = call.walk(do, v, k, start, turned=True, w=q)
    dg = None if log_decay is None else call.decay(start, dstart, read, written).to(log_decay.dtype)
    if dinitial is not None and initial_state is not None:
        dinitial = dinitial.to(initial_state.dtype)
    return dq, dk, dv, dg, dinitial


def _short(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    return cu_seqlens is None and short_triton.serves(q.dtype, q.shape[1], q.shape[3], v.shape[3])


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches."""

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
        (self.B, self.T, self.G, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, self.K, self.V)
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.g = self.wide(log_decay)
        self.scale, self.rows = scale, self.B * self.T
        blocks = self.H * triton.cdiv(self.K, self.how.walk.inner) * triton.cdiv(self.V, self.how.walk.outer)
        self.cut = Cut.of(self.B, self.T, cu_seqlens, self.how.programs // blocks, length, LONGEST)

    def wide(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.acc).contiguous()

    def state(self) -> Tensor:
        return self.q.new_empty((self.cut.sequences, self.H, self.K, self.V), dtype=self.acc)

    def walk(
        self,
        x: Tensor,
        y: Tensor,
        z: Tensor,
        states: Tensor | None,
        *,
        reverse: bool = False,
        turned: bool = False,
        final: Tensor | None = None,
        w: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The result, shaped as z, and with `w` and decays its tokens' parts of u. `turned`: x and y are V wide."""
        how = self.how.walk
        N, M = (self.V, self.K) if turned else (self.K, self.V)
        BN, BM = block(N, how.inner), block(M, how.outer)
        parts, blocks = triton.cdiv(N, BN), triton.cdiv(N, BN) * triton.cdiv(M, BM)
        alone = parts == 1 and z.shape[2] == self.H  # else parts, or the heads that share one of z, are added
        out = z.new_empty((parts, self.rows, self.H, M), dtype=z.dtype if alone else self.acc)
        part = None
        if w is not None and self.g is not None:
            part = z.new_empty((blocks, self.H, self.rows), dtype=self.acc)
        walk_kernel[(self.cut.segments * self.H * blocks,)](
            x,
            y,
            z,
            self.g,
            w,
            states,
            out,
            final,
            part,
            scale=self.scale,
            rows=self.rows,
            RX=self.H // x.shape[2],
            RZ=self.H // z.shape[2],
            N=N,
            M=M,
            SN=1 if turned else self.V,
            SM=self.V if turned else 1,
            C=how.C,
            BN=BN,
            BM=BM,
            REVERSE=reverse,
            HAS_STATE=states is not None,
            HAS_FINAL=final is not None,
            PART=part is not None,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
            **self.shared(),
        )
        if not alone:
            out = out.unflatten(2, (z.shape[2], -1)).sum((0, 3))
        return out.view(z.shape).to(z.dtype), part

    def borders(self, x: Tensor, y: Tensor, outer: Tensor | None, far: Tensor | None, *, gradient: bool) -> Tensor:
        """States at the segments' borders (of k and v), or their gradients (of q and do)."""
        how, size = self.how.border, self.K * self.V
        BK, BV = block(self.K, how.inner), block(self.V, how.outer)
        borders = x.new_empty((self.cut.borders, self.H, self.K, self.V), dtype=self.acc)
        totals = x.new_empty((self.cut.borders, self.H), dtype=self.acc)
        border_kernel[(self.cut.segments * self.H * triton.cdiv(self.K, BK) * triton.cdiv(self.V, BV),)](
            x,
            y,
            self.g,
            borders,
            totals,
            scale=self.scale,
            R=self.H // self.G,
            K=self.K,
            V=self.V,
            C=how.C,
            BK=BK,
            BV=BV,
            GRADIENT=gradient,
            OUTER=far is not None,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
            **self.shared(),
        )
        BLOCK = 1024
        scan_kernel[(self.cut.sequences * self.H * triton.cdiv(size, BLOCK),)](
            borders,
            totals,
            outer,
            far,
            self.cut.slots,
            self.cut.P,
            self.H,
            SIZE=size,
            BLOCK=BLOCK,
            DECAY=self.g is not None,
            GRADIENT=gradient,
            HAS_OUTER=outer is not None,
            HAS_FAR=far is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
        )
        return borders

    def decay(self, states: Tensor | None, dstates: Tensor | None, read: Any, written: Any) -> Tensor:
        """The gradient of log_decay from states, their gradients, and the parts of u by the readers and the writers."""
        dg = self.q.new_empty((self.B, self.T, self.H), dtype=self.acc)
        decay_kernel[(self.cut.segments * self.H,)](
            states,
            dstates,
            read,
            written,
            self.g,
            dg,
            self.cut.table,
            self.rows,
            self.cut.T,
            self.cut.length,
            self.cut.P,
            self.H,
            SIZE=self.K * self.V,
            READ=read.shape[0],
            WRITTEN=written.shape[0],
            BLOCK=2048,
            HAS_STATE=states is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
            num_warps=8,
        )
        return dg

    def shared(self) -> dict[str, Any]:
        """What the kernels that walk segments have in common."""
        dot, acc, precision = operands(self.q.dtype)
        return {
            "table": self.cut.table,
            "T": self.cut.T,
            "length": self.cut.length,
            "P": self.cut.P,
            "H": self.H,
            "DECAY": self.g is not None,
            "PACKED": self.cut.table is not None,
            "DOT": dot,
            "SUM": sum_dtype(self.q.dtype),
            "ACC": acc,
            "PREC": precision,
        }


def block(width: int, largest: int) -> int:
    return min(largest, tile(width))
