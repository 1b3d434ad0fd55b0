"""The segments into which linear attention cuts sequences, in Triton: states at their borders, the decay's gradient.

With the names of triton.py, a segment alone adds to the state at its end, or to the gradient of the one at its start,

    sum_j e^{g after j} k_j v_j^T          s sum_i e^{g up to i} q_i do_i^T

which `border_kernel` has. `scan_kernel` then goes from border to border: each is what the segment adds plus e^{its
decay} times the border before.

The decay's gradient: d/dg_t adds the pairs (i, j) with j < t <= i, that is <S, dS> at the segment's start less the sum
over the tokens before t of u = (its pairs with earlier j) - (its pairs with later i). Sums over all tokens cancel, so
both sides must hold the same numbers: walk_triton.py says how its parts are made.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import WEAKEST, load_log_decay, load_rows, segment_of, weight

LONGEST = 2048
"""Tokens of a segment, at most. Within a segment the decay's gradient is a running sum of differences of products that
were rounded apart: its error in bfloat16, up to 1.8 % after 4096 tokens and 2.5 % after 8192, grows with the root of
their number."""


@triton.jit
def program_of(H, KEYS: tl.constexpr, VALUES: tl.constexpr):
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
    segment, h, kb, vb = program_of(H, tl.cdiv(K, BK), tl.cdiv(V, BV))
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
    segment, h, _, _ = program_of(H, 1, 1)
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
