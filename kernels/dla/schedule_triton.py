"""The schedule in Triton: scores and boundaries as `boundaries.py` has them, slots as `slots.py` has them. Nothing
waits for the device.

Scores, the open segment's state being C, have two ways. `walk_kernel` is a program for each head that goes from token
to token with C in registers. In chunks, `table_kernel` makes for all of them at once the scores of every token if a
segment began at any other of its chunk, hence for every token the boundaries that follow one there, as 64 bits;
`chain_kernel` then goes from chunk to chunk: with C it finds the first boundary and has the others; `pick_kernel` takes
the scores from the table. C is a sum in float32 or wider, and so products with it are made from three bfloat16 parts.

Slots are vectors by rank in one warp, `slots_kernel`, whose steps are boundaries: integers only. The rule ward also
needs the slots' states, `ward_kernel`: they lie in memory, in float64, each where `place` says, and only two that meet
and their neighbours are read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import load_rows, operands, tile
from mixassay.kernels.dla import slots

# Compiled once, whatever the sizes.
kernel = triton.jit(do_not_specialize=["T", "NT", "H", "R", "N"])

UNIT = tl.constexpr(slots.UNIT)
HIGHEST = tl.constexpr(slots.HIGHEST)
ROUNDING = tl.constexpr(slots.ROUNDING)
NOTHING = tl.constexpr(slots.NOTHING)
CHUNK = 0
"""Tokens of a chunk of scores. The walk until chunks, of 64, have been compared on a GPU."""


@triton.jit
def _token(at_k, at_v, kk, vv, K: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr):
    """A token's key as a column and its value as a row."""
    k = tl.load(at_k + kk[:, None], mask=(kk < K)[:, None], other=0.0)
    v = tl.load(at_v + vv[None, :], mask=(vv < V)[None, :], other=0.0)
    return k.to(ACC), v.to(ACC)


@kernel
def walk_kernel(
    k,  # [B, T, H / R, K]
    v,  # [B, T, H, V]
    log_decay,  # [B, T, H]
    threshold,  # [B, H]
    score,  # [B, T, H]
    boundary,
    T,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    READING: tl.constexpr,
    DECAY: tl.constexpr,
    FLOOR: tl.constexpr,
    ACC: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    first, h = index // H * T, index % H
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    keys = (H // R) * K
    at_k = k + first * keys + (h // R) * K
    at_v = v + (first * H + h) * V
    at = first * H + h
    tau = tl.load(threshold + index).to(ACC)
    C = tl.zeros([BK, BV], dtype=ACC)
    x, y = _token(at_k, at_v, kk, vv, K, V, ACC)
    for t in range(T):
        s = x * y
        own = tl.sum(x * x) * tl.sum(y * y)
        inner = tl.sum(C * s)
        memory = tl.sum(C * C)
        # The next token's, while this one's sums are on their way.
        at_k += tl.where(t + 1 < T, keys, 0)
        at_v += tl.where(t + 1 < T, H * V, 0)
        x, y = _token(at_k, at_v, kk, vv, K, V, ACC)
        far = _distance(inner, own, memory, READING == "memory_raw")
        far = tl.where(t == 0, tau, far).to(ACC)
        found = far >= tau
        tl.store(score + at, far)
        tl.store(boundary + at, found)
        if READING == "token":
            C = s
        elif DECAY:
            g = tl.maximum(tl.load(log_decay + at).to(ACC), FLOOR)
            C = C * tl.where(found, 0.0, tl.exp(g)) + s
        else:
            C = tl.where(found, 0.0, C) + s
        at += H


@triton.jit
def _distance(inner, own, memory, RAW: tl.constexpr):
    """As `boundaries.distance`."""
    some = (own > 0) & (memory > 0)
    own = tl.where(some, own, 1.0)
    memory = tl.where(some, memory, 1.0)
    if RAW:
        far = tl.sqrt(tl.maximum(own + memory - 2 * inner, 0.0) / memory)
    else:
        far = tl.sqrt(tl.maximum(2 - 2 * (inner / (tl.sqrt(own) * tl.sqrt(memory))), 0.0))
    return tl.where(some, far, 0.0)


@triton.jit
def _dot(x, y, acc, PARTS: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr):
    """acc + x y for x in DOT and y in ACC, with as many parts of y as hold its digits."""
    part = y.to(DOT)
    acc = tl.dot(x, part, acc=acc, input_precision=EXACT, out_dtype=ACC)
    for _ in tl.static_range(PARTS - 1):
        y -= part.to(ACC)
        part = y.to(DOT)
        acc = tl.dot(x, part, acc=acc, input_precision=EXACT, out_dtype=ACC)
    return acc


@triton.jit
def _decays(log_decay, at, i, left, H, FLOOR: tl.constexpr, ACC: tl.constexpr):
    """A chunk's log decays, and their sums before and after each token."""
    g = tl.maximum(tl.load(log_decay + at + i * H, mask=i < left, other=0.0).to(ACC), FLOOR)
    after = tl.cumsum(g)
    return g, after - g, after


@triton.jit
def _between(before, after, i, ACC: tl.constexpr):
    """[t, s]: the decay from s to the token before t, 0 for s >= t."""
    return tl.exp(tl.where(i[:, None] > i[None, :], tl.minimum(before[:, None] - after[None, :], 0.0), float("-inf")))


@kernel
def table_kernel(
    k,
    v,
    log_decay,
    threshold,
    table,  # [B H, NT, C, C]: the score of token t if the segment began at r
    chain,  # [B H, NT, C]: bits of the boundaries that follow one at r, with it
    sums,  # [3, B H, NT, C]: of a segment that began at the chunk's first token <C, s_t> and |C|^2, and |s_t|^2
    T,
    NT,
    H,
    R,
    N,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LOG: tl.constexpr,
    RAW: tl.constexpr,
    DECAY: tl.constexpr,
    FLOOR: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    head, n = chunk // NT, chunk % NT
    h = head % H
    row = head // H * T + n * C
    left = T - n * C
    i = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    keys = (H // R) * K
    ks = load_rows(k + row * keys + (h // R) * K, i, left, kk, keys, K, BK).to(DOT)
    vs = load_rows(v + (row * H + h) * V, i, left, vv, H * V, V, BV).to(DOT)
    gram = tl.dot(ks, tl.trans(ks), input_precision=EXACT, out_dtype=ACC)
    gram *= tl.dot(vs, tl.trans(vs), input_precision=EXACT, out_dtype=ACC)
    own = tl.sum(tl.where(i[:, None] == i[None, :], gram, 0.0), 1)
    if DECAY:
        g, before, after = _decays(log_decay, row * H + h, i, left, H, FLOOR, ACC)
        a = tl.exp(g)
        D = _between(before, after, i, ACC)
    else:
        a = tl.full([C], 1.0, dtype=ACC)
        D = (i[:, None] > i[None, :]).to(ACC)
    since = (i[:, None] >= i[None, :]).to(ACC)
    inner = tl.cumsum(gram * D, 1, reverse=True)  # [t, r]
    # |C|^2 decays by a^2 and grows by 2 a <C, s_t> + |s_t|^2.
    grown = (2 * a[:, None] * inner + own[:, None]) * since
    memory = tl.dot(D * D, grown, input_precision=EXACT, out_dtype=ACC)
    far = _distance(inner, own[:, None], memory, RAW)
    tau = tl.load(threshold + head).to(ACC)
    reached = (far >= tau) & (i[:, None] > i[None, :])
    follows = tl.min(tl.where(reached, i[:, None], C), 0)
    bits = tl.full([C], 1, dtype=tl.int64) << i
    for _ in tl.static_range(LOG):  # twice as far each time
        to = tl.minimum(follows, C - 1)
        bits |= tl.where(follows < C, tl.gather(bits, to, 0), 0)
        follows = tl.where(follows < C, tl.gather(follows, to, 0), C)
    tl.store(table + (chunk * C + i[:, None]) * C + i[None, :], far)
    tl.store(chain + chunk * C + i, bits)
    each = N.to(tl.int64) * NT * C
    at = sums + chunk * C + i
    tl.store(at, tl.sum(tl.where(i[None, :] == 0, inner, 0.0), 1))
    tl.store(at + each, tl.sum(tl.where(i[None, :] == 0, memory, 0.0), 1))
    tl.store(at + 2 * each, own)


@kernel
def chain_kernel(
    k,
    v,
    log_decay,
    threshold,
    chain,
    sums,
    score,  # [B, T, H]: of the tokens up to a chunk's first boundary
    boundary,
    T,
    NT,
    H,
    R,
    N,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    RAW: tl.constexpr,
    DECAY: tl.constexpr,
    PARTS: tl.constexpr,
    FLOOR: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    first, h = head // H * T, head % H
    i = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    keys = (H // R) * K
    tau = tl.load(threshold + head).to(ACC)
    each = N.to(tl.int64) * NT * C
    S = tl.zeros([BK, BV], dtype=ACC)
    for n in range(0, NT):
        row = first + n * C
        left = T - n * C
        ks = load_rows(k + row * keys + (h // R) * K, i, left, kk, keys, K, BK).to(DOT)
        vs = load_rows(v + (row * H + h) * V, i, left, vv, H * V, V, BV).to(ACC)
        at = (head * NT + n) * C
        inner = tl.load(sums + at + i)
        memory = tl.load(sums + at + each + i)
        own = tl.load(sums + at + 2 * each + i)
        read = tl.sum(_dot(ks, S, tl.zeros([C, BV], dtype=ACC), PARTS, DOT, ACC, EXACT) * vs, 1)
        if DECAY:
            g, before, after = _decays(log_decay, row * H + h, i, left, H, FLOOR, ACC)
            inner += tl.exp(before) * read
            D = _between(before, after, i, ACC)
            memory += tl.exp(2 * before) * tl.sum(S * S) + tl.sum(D * D * (2 * tl.exp(after) * read)[None, :], 1)
            total = tl.sum(g)
            w = tl.exp(tl.minimum(total - after, 0.0))
            kept = tl.exp(total)
        else:
            inner += read
            memory += tl.sum(S * S) + 2 * (tl.cumsum(read) - read)
            w = tl.full([C], 1.0, dtype=ACC)
            kept = tl.full([], 1.0, dtype=ACC)
        far = _distance(inner, own, memory, RAW)
        far = tl.where(n + i == 0, tau, far)
        found = tl.min(tl.where((far >= tau) & (i < left), i, C))
        bits = tl.load(chain + at + tl.minimum(found, C - 1))
        opens = (((bits >> i) & 1) != 0) & (found < C)
        tl.store(score + (row + i) * H + h, far, mask=(i < left) & (i <= found))
        tl.store(boundary + (row + i) * H + h, opens, mask=i < left)
        last = tl.max(tl.where(opens, i, -1))
        vs *= tl.where(i >= last, w, 0.0)[:, None]
        S = _dot(tl.trans(ks), vs, S * tl.where(last < 0, kept, 0.0), PARTS, DOT, ACC, EXACT)


@kernel
def pick_kernel(table, boundary, score, T, NT, H, C: tl.constexpr):
    """The scores of the tokens behind a chunk's first boundary."""
    chunk = tl.program_id(0).to(tl.int64)
    head, n = chunk // NT, chunk % NT
    i = tl.arange(0, C)
    at = (head // H * T + n * C + i) * H + head % H
    live = i < T - n * C
    opens = tl.load(boundary + at, mask=live, other=0) != 0
    earlier = opens[None, :] & (i[None, :] < i[:, None])
    since = tl.max(tl.where(earlier, i[None, :], -1), 1)
    behind = live & (since >= 0)
    far = tl.load(table + (chunk * C + i) * C + since, mask=behind, other=0.0)
    tl.store(score + at, far, mask=behind)


@triton.jit
def _units(score):
    """As `slots.units`: to the nearest, halves to the even one."""
    x = tl.minimum(score, HIGHEST) * UNIT
    whole = tl.floor(x)
    n = whole.to(tl.int64)
    half = x - whole
    return n + ((half > 0.5) | ((half == 0.5) & (n % 2 == 1))).to(tl.int64)


@triton.jit
def _of(x, r, rank):
    """The value at `rank` of a vector over ranks r."""
    return tl.sum(tl.where(r == rank, x, 0))


@triton.jit
def _above(x, r):
    """At every rank the value of the next newer one (at rank 0 its own)."""
    return tl.gather(x, tl.maximum(r - 1, 0), 0)


@triton.jit
def _pair(x, r, BS: tl.constexpr):
    """At every rank its value and the next older one's together."""
    return x + tl.gather(x, tl.minimum(r + 1, BS - 1), 0)


@triton.jit
def _added(x, r, shift, S: tl.constexpr):
    """As `slots.move`."""
    last = tl.minimum(shift, S - 2)
    return tl.where((r > 0) & (r - 1 <= last), _above(x, r), 0) + tl.where(r <= last, 0, x)


@triton.jit
def _replaced(x, r, shift, new):
    """As `slots.keep_older`."""
    return tl.where(r <= shift, tl.where(r == 0, new, _above(x, r)), x)


@triton.jit
def _bound(n, Q, square):
    sse = Q - square / tl.maximum(n, 1)
    return tl.sqrt(n * tl.where(sse > Q * NOTHING, sse, 0.0))


@triton.jit
def _product(x, states, place, r, rank, at, SIZE: tl.constexpr, keep):
    """<x, S_rank>"""
    other = tl.load(states + _of(place, r, rank) * SIZE + at, mask=keep, other=0.0)
    return tl.sum(x * other)


@kernel
def slots_kernel(
    boundary,  # [B, T, H]
    score,  # [B, T, H], or none
    opened,  # [B, T, H]
    shift,
    starts,  # [B, T, H, S]
    T,
    H,
    S: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    DENSITY: tl.constexpr,  # the rule; else weak
    HAS_SCORE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    at = head // H * T * H + head % H
    i = tl.arange(0, C)
    r = tl.arange(0, BS)
    start = tl.zeros([BS], dtype=tl.int32)
    n = tl.zeros([BS], dtype=tl.int32)
    total = tl.zeros([BS], dtype=tl.int64)  # of scores
    divide = tl.zeros([BS], dtype=tl.int64)  # the score that opened the slot
    units = tl.zeros([C], dtype=tl.int32)
    if HAS_SCORE:
        divide += _units(tl.load(score + at))
        next_score = tl.load(score + at + i * H, mask=i < T, other=0.0)
    next_opens = tl.load(boundary + at + i * H, mask=i < T, other=0) != 0
    used = tl.full([], 1, dtype=tl.int32)
    for first in range(0, T, C):
        left = tl.minimum(T - first, C)
        opens = next_opens & (first + i > 0) & (S > 1)
        ahead = at + (first + C + i) * H  # loaded while this chunk is worked on
        next_opens = tl.load(boundary + ahead, mask=first + C + i < T, other=0) != 0
        if HAS_SCORE:
            units = _units(next_score).to(tl.int32)
            next_score = tl.load(score + ahead, mask=first + C + i < T, other=0.0)
        before = tl.cumsum(units) - units
        number = tl.cumsum(opens.to(tl.int32))  # of the last boundary up to each token
        rows = tl.zeros([C, BS], dtype=tl.int32) + start[None, :]
        moves = tl.full([C], -1, dtype=tl.int64)
        taken = tl.zeros([], dtype=tl.int32)  # tokens of the chunk that `n` and `total` have
        summed = tl.zeros([], dtype=tl.int32)
        for j in range(1, tl.max(number) + 1):
            here = opens & (number == j)
            t = tl.sum(tl.where(here, i, 0))
            unit = tl.sum(tl.where(here, units, 0))
            upto = tl.sum(tl.where(here, before, 0))
            n += tl.where(r == 0, t - taken, 0)
            total += tl.where(r == 0, upto - summed, 0)
            taken = t
            summed = upto
            moved = tl.full([], S - 1, dtype=tl.int64)
            if used == S:
                cost = divide
                if DENSITY:
                    cost = _pair(total, r, BS) * UNIT // tl.maximum(_pair(n, r, BS), 1)
                least = tl.min(tl.where(r < S - 1, cost * BS + (BS - 1 - r), 2**62))  # of equals the oldest
                moved = BS - 1 - least % BS
            start = _replaced(start, r, moved, first + t)
            divide = _replaced(divide, r, moved, unit)
            n = _added(n, r, moved, S)
            total = _added(total, r, moved, S)
            used = tl.minimum(used + 1, S)
            rows = tl.where((number >= j)[:, None], start[None, :], rows)
            moves = tl.where(here, moved, moves)
        n += tl.where(r == 0, left - taken, 0)
        total += tl.where(r == 0, tl.sum(units) - summed, 0)
        to = at + (first + i) * H
        tl.store(opened + to, opens | (first + i == 0), mask=i < left)
        tl.store(shift + to, moves, mask=i < left)
        keep = (i < left)[:, None] & (r < S)[None, :]
        tl.store(starts + to[:, None] * S + r[None, :], rows, mask=keep)


@kernel
def ward_kernel(
    boundary,  # [B, T, H]
    k,
    v,
    states,  # [B, H, S, K, V] room
    opened,  # [B, T, H]
    shift,
    starts,  # [B, T, H, S]
    T,
    H,
    R,
    S: tl.constexpr,
    BS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    first, h = index // H * T, index % H
    at = first * H + h
    r = tl.arange(0, BS)
    start = tl.zeros([BS], dtype=tl.int32)
    n = tl.zeros([BS], dtype=tl.int32)
    used = tl.full([], 1, dtype=tl.int32)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    keys = (H // R) * K
    at_k = k + first * keys + (h // R) * K
    at_v = v + (first * H + h) * V
    own = kk[:, None] * V + vv[None, :]
    keep = (kk < K)[:, None] & (vv < V)[None, :]
    states += index * S * K * V
    C = tl.zeros([BK, BV], dtype=tl.float64)  # of the open slot
    place = tl.zeros([BS], dtype=tl.int64)
    Q = tl.zeros([BS], dtype=tl.float64)
    square = tl.zeros([BS], dtype=tl.float64)  # |S_r|^2, of closed slots
    inner = tl.zeros([BS], dtype=tl.float64)  # <S_r, S_{r+1}>, of closed slots
    next_opens = (tl.load(boundary + at) != 0) & False
    for t in range(T):
        opens = next_opens
        ahead = at + tl.where(t + 1 < T, H, 0)
        next_opens = (tl.load(boundary + ahead) != 0) & (S > 1)
        moved = tl.full([], -1, dtype=tl.int32)
        if opens:
            full = used == S
            moved = tl.full([], S - 1, dtype=tl.int32)
            tl.store(states + _of(place, r, 0) * K * V + own, C, mask=keep)
            square = tl.where(r == 0, tl.sum(C * C), square)
            if used > 1:
                inner = tl.where(r == 0, _product(C, states, place, r, 1, own, K * V, keep), inner)
            if full:
                pairs = r < S - 1
                apart = _bound(n, Q, square)
                joint = _bound(_pair(n, r, BS), _pair(Q, r, BS), _pair(square, r, BS) + 2 * inner)
                cost = joint - _pair(apart, r, BS)
                least = tl.min(tl.where(pairs, cost, float("inf"))) + tl.sum(tl.sqrt(n * Q)) * ROUNDING
                moved = tl.max(tl.where(pairs & (cost <= least), r, -1))
            free = used.to(tl.int64)
            if full:
                free = _of(place, r, moved)
                home = _of(place, r, moved + 1)
                both = tl.load(states + free * K * V + own, mask=keep, other=0.0)
                both += tl.load(states + home * K * V + own, mask=keep, other=0.0)
                tl.store(states + home * K * V + own, both, mask=keep)
                square = tl.where(r == moved + 1, tl.sum(both * both), square)
                if moved > 0:
                    newer = _product(both, states, place, r, moved - 1, own, K * V, keep)
                    inner = tl.where(r == moved - 1, newer, inner)
                if moved + 2 < S:
                    older = _product(both, states, place, r, moved + 2, own, K * V, keep)
                    inner = tl.where(r == moved + 1, older, inner)
            place = _replaced(place, r, moved, free)
            square = _replaced(square, r, moved, 0.0)
            inner = _replaced(inner, r, moved, 0.0)
            Q = _added(Q, r, moved, S)
            C = tl.zeros([BK, BV], dtype=tl.float64)
            start = _replaced(start, r, moved, t)
            n = _added(n, r, moved, S)
            used = tl.minimum(used + 1, S)
        n += (r == 0).to(tl.int32)
        x, y = _token(at_k, at_v, kk, vv, K, V, tl.float64)
        C += x * y
        Q += tl.where(r == 0, tl.sum(x * x) * tl.sum(y * y), 0.0)
        at_k += keys
        at_v += H * V
        tl.store(opened + at, (moved >= 0) | (t == 0))
        tl.store(shift + at, moved)
        tl.store(starts + at * S + r, start, mask=r < S)
        at += H


def schedule(
    k: Tensor,
    v: Tensor,
    threshold: Tensor | None,
    forced: Tensor | None,
    log_decay: Tensor | None,
    capacity: int,
    reading: str,
    rule: str,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """Scores (None for forced boundaries), boundary, shift and starts. k [B, T, G, K], v [B, T, H, V], threshold
    [B, H], forced bool [B, T, H]."""
    if forced is not None:
        return None, *fill(forced, None, k, v, capacity, rule)
    assert threshold is not None
    score, boundary = scores(k, v, threshold, log_decay, reading)
    return score, *fill(boundary, score, k, v, capacity, rule)


def scores(
    k: Tensor, v: Tensor, threshold: Tensor, log_decay: Tensor | None, reading: str, chunk_size: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """`boundaries.boundaries`; chunk_size 0 for the walk from token to token."""
    (B, T, H, _), dtype = v.shape, torch.promote_types(k.dtype, v.dtype)
    dot, acc, _ = operands(dtype)
    score = v.new_empty((B, T, H), dtype=torch.float64 if acc == tl.float64 else torch.float32)
    boundary = torch.empty_like(score, dtype=torch.bool)
    size, warps = sizes(k, v, 4096)  # one warp for most: sums over several wait for each other at every token
    given: dict[str, Any] = {"k": k.contiguous(), "v": v.contiguous(), "threshold": threshold.contiguous()}
    given |= {"log_decay": None if log_decay is None else log_decay.contiguous(), "DECAY": log_decay is not None}
    given |= {"FLOOR": -708.0 if acc == tl.float64 else -87.0, "ACC": acc, "T": T, "H": H} | size
    if not chunk_size or reading == "token":
        walk_kernel[(B * H,)](**given, score=score, boundary=boundary, READING=reading, num_warps=warps)
        return score, boundary
    N, NT, C = B * H, triton.cdiv(T, chunk_size), chunk_size
    given |= {"NT": NT, "N": N, "C": C, "RAW": reading == "memory_raw", "DOT": dot}
    given |= {"BK": tile(size["K"]), "BV": tile(size["V"])}
    given |= {"EXACT": "ieee" if acc == tl.float64 else "tf32x3"}
    given["num_warps"] = 8 if max(size["BK"], size["BV"]) > 64 else 4
    table, sums = score.new_empty((N, NT, C, C)), score.new_empty((3, N, NT, C))
    chain = score.new_empty((N, NT, C), dtype=torch.int64)
    table_kernel[(N * NT,)](**given, table=table, chain=chain, sums=sums, LOG=(C - 1).bit_length(), num_stages=1)
    parts = 3 if dot == tl.bfloat16 else 1
    chain_kernel[(N,)](**given, chain=chain, sums=sums, score=score, boundary=boundary, PARTS=parts, num_stages=1)
    pick_kernel[(N * NT,)](table, boundary, score, T, NT, H, C=C, num_warps=4)
    return score, boundary


def fill(
    boundary: Tensor, score: Tensor | None, k: Tensor | None, v: Tensor | None, capacity: int, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`slots.slots`."""
    B, T, H = boundary.shape
    boundary = boundary.contiguous()
    opened = torch.empty_like(boundary)
    shift = torch.empty_like(opened, dtype=torch.int64)
    starts = shift.new_empty((B, T, H, capacity), dtype=torch.int32)
    size = {"T": T, "H": H, "S": capacity, "BS": triton.next_power_of_2(capacity)}
    if rule == "ward":
        assert k is not None
        assert v is not None
        states = v.new_empty((B, H, capacity, k.shape[-1], v.shape[-1]), dtype=torch.float64)
        state, warps = sizes(k, v, 1024)
        ward_kernel[(B * H,)](
            boundary, k.contiguous(), v.contiguous(), states, opened, shift, starts, **size, **state, num_warps=warps
        )
    else:
        score = None if score is None else score.contiguous()
        how = {"DENSITY": rule == "density", "HAS_SCORE": score is not None, "C": 32, "num_warps": 1}
        slots_kernel[(B * H,)](boundary, score, opened, shift, starts, **size, **how)
    return opened, shift, starts


def sizes(k: Tensor, v: Tensor, share: int) -> tuple[dict[str, int], int]:
    """Of a state and its blocks, and the warps that hold one, each so many of its numbers."""
    K, V = k.shape[-1], v.shape[-1]
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    return {"R": v.shape[2] // k.shape[2], "K": K, "V": V, "BK": BK, "BV": BV}, min(8, max(1, BK * BV // share))
