"""Who reads the states of slots, in Triton, and the gradients of these reads.

With S_r the state of the slot that the first token of a tile finds at rank r, and for the tile's tokens t

    w[t, r] = rank_scale[t, rank of that slot at t] e^{decay from the slot's end to t}

the past of the tile gives

    o_t    = scale sum over r of w[t, r] S_r^T q_t
    dq_t   = scale sum over r of w[t, r] S_r do_t
    dS     = scale sum over its readers t of w[t] q_t do_t^T
    drank_scale[t, rank] = scale e^{decay} q_t^T S_r do_t, for all r of one rank at t

w is computed once (`weight_kernel`) and the states lie as products take them (`join_kernel`), so that the loops of
reads only load, multiply and add, and the next turn's loads do not wait for them. The weights lie twice: those of a
tile side by side and, for the gradient of a state, those of its readers, a run of tiles: tile n has row place + n.

Heads that take the tree have no reads here.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import weight
from mixassay.kernels.dla.heads_triton import load_heads, store_heads
from mixassay.kernels.dla.slot_states_triton import (
    FIRST,
    STOP,
    decay_to,
    field,
    fits,
    kernel,
    parts,
    state_at,
    tile_of,
)
from mixassay.kernels.dla.weights_triton import by_rank, by_slot


@triton.jit
def _ranks(starts, at, n, filled, C: tl.constexpr, BS: tl.constexpr, SLOTS: tl.constexpr):
    """The ranks that have a state at the first token of tile n, the first and the one behind the last; `at` is where
    that token's row of `starts` is. All tokens lie in slots: the oldest slot starts at token 0."""
    r = tl.arange(0, BS)
    begins = tl.load(starts + at + r, mask=r < SLOTS, other=0)
    last = tl.sum((begins > 0).to(tl.int32)) + 1
    first = (tl.load(starts + at) >= n * C).to(tl.int32)  # the tile begins a slot, which has no past
    return first, tl.where(filled, last, first)


@triton.jit
def _reader(starts, news, T, NT, H, ROOM, SLOTS: tl.constexpr, BS: tl.constexpr, C: tl.constexpr):
    """A program's tile of queries: head in all and in its row, the tile, its first row, the tokens from there on and
    their numbers; whether the head's states have room, and the ranks that the tile reads (`_ranks`)."""
    head, b, h, n = tile_of(H, NT)
    row = b * T + n * C
    left = T - n * C
    i = tl.arange(0, C)
    filled = fits(news, head, NT, ROOM)
    first, last = _ranks(starts, (row * H + h) * SLOTS, n, filled, C, BS, SLOTS)
    return head, h, n, row, left, i, filled, first, last


@triton.jit
def _read(numbers, weights, row, keep, C: tl.constexpr):
    """The number of a state that a tile reads, and the weights; loaded a turn ahead, they keep nobody waiting."""
    number = tl.load(numbers + row, mask=keep, other=0)
    return number, tl.load(weights + row * C + tl.arange(0, C), mask=keep, other=0.0)


@triton.jit
def _load_state(states, number, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    at, keep = state_at(K, V, BK, BV)
    at += states + number * K * V
    if K == BK and V == BV:
        S = tl.load(at)
    else:
        S = tl.load(at, mask=keep, other=0.0)
    return S


@kernel
def weight_kernel(
    rank_scale,  # [B, T, H, SLOTS]
    starts,
    G,
    P,
    news,
    numbers,
    place,  # [B H, ROOM]: of a state, the row of its weights in tile n, less n
    weights,  # [B H, NT, SLOTS, C]: w
    turned,  # [3 or 1, B H, NT SLOTS, C]: w of a state's readers; GATE: and the steps to the weights up and down
    passed,  # [B H, NT, SLOTS]: decay from the end of a slot to the tile
    T,
    NT,
    H,
    N,
    ROOM,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
    ACC: tl.constexpr,
):
    """The weights with which tile n reads states."""
    head, b, h, n = tile_of(H, NT)
    if (n > 0) & fits(news, head, NT, ROOM):
        i = tl.arange(0, C)
        r = tl.arange(0, BS)
        left = T - n * C
        row = ((b * T + n * C) * H + h) * SLOTS
        end = tl.load(starts + row + r - 1, mask=(r > 0) & (r < SLOTS), other=0)
        end = tl.where(r == 0, n * C, end)
        rank = tl.zeros([BS, C], dtype=tl.int32)
        for s in range(SLOTS):
            start = tl.load(starts + row + i * H * SLOTS + s, mask=i < left, other=0)
            rank += (start[None, :] >= end[:, None]).to(tl.int32)
        keep = (r < SLOTS)[:, None] & (i < left)[None, :]
        at = rank_scale + row + i[None, :] * H * SLOTS
        w = tl.load(at + tl.minimum(rank, SLOTS - 1), mask=keep, other=0.0)
        if GATE:
            up = tl.load(at + tl.minimum(rank + 1, SLOTS - 1), mask=keep, other=0.0) - w
            down = w - tl.load(at + tl.maximum(rank - 1, 0), mask=keep, other=0.0)
        if DECAY:
            to = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
            since = (tl.load(P + head * (NT + 1) + n) - decay_to(end, G, P, head, T, NT, C)).to(to.dtype)
            D = weight(since[:, None] + to[None, :], ACC)
            w *= D
            if GATE:
                up *= D
                down *= D
        rows = (head * NT + n) * SLOTS + r
        tl.store(weights + rows[:, None] * C + i[None, :], w, mask=(r < SLOTS)[:, None])
        if turned is not None:
            number = tl.load(numbers + rows, mask=r < SLOTS, other=-1)
            live = number >= 0
            rows = head * NT * SLOTS + n + tl.load(place + head * ROOM + number, mask=live, other=0)
            if DECAY:
                tl.store(passed + (head * NT + n) * SLOTS + r, weight(since, ACC), mask=r < SLOTS)
            at = turned + rows[:, None] * C + i[None, :]
            tl.store(at, w, mask=live[:, None])
            if GATE:
                each = N.to(tl.int64) * NT * SLOTS * C
                tl.store(at + each, up, mask=live[:, None])
                tl.store(at + 2 * each, down, mask=live[:, None])


@kernel
def read_kernel(
    q,
    starts,
    news,
    numbers,
    states,  # [2 or 1, B H, SPACE, K, V]: in DOT
    weights,
    past,  # [B, T, H, V]: o of the past, without scale
    T,
    NT,
    H,
    R,
    ROOM,
    SPACE,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    head, h, n, row, left, i, filled, first, last = _reader(starts, news, T, NT, H, ROOM, SLOTS, BS, C)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    rows = (head * NT + n) * SLOTS
    out = tl.zeros([C, BV], dtype=ACC)
    number, w = _read(numbers, weights, rows + first, first < last, C)
    for r in range(first, last):
        S = _load_state(states, head * SPACE + number, K, V, BK, BV)
        number, ahead = _read(numbers, weights, rows + r + 1, r + 1 < last, C)
        out += tl.dot(qs, S, input_precision=PREC, out_dtype=ACC) * w[:, None]
        w = ahead
    if filled:
        store_heads(past, out, row, h, i, left, H, V, BV)


@kernel
def pull_kernel(
    q,
    do,
    starts,
    news,
    numbers,
    states,
    weights,
    past,  # [B, T, H, K]: dq of the past, without scale
    reads,  # [B H, NT, C, SLOTS]: q_t^T S_r do_t
    T,
    NT,
    H,
    R,
    N,
    ROOM,
    SPACE,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    TWICE: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    head, h, n, row, left, i, filled, first, last = _reader(starts, news, T, NT, H, ROOM, SLOTS, BS, C)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(ACC)
    dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
    rows = (head * NT + n) * SLOTS
    dqs = tl.zeros([C, BK], dtype=ACC)
    read = tl.zeros([C, BS], dtype=ACC)
    columns = tl.arange(0, BS)
    number, w = _read(numbers, weights, rows + first, first < last, C)
    for r in range(first, last):
        S = _load_state(states, head * SPACE + number, K, V, BK, BV)
        x = tl.dot(dos, tl.trans(S), input_precision=PREC, out_dtype=ACC)
        if TWICE:
            S = _load_state(states, (N + head) * SPACE + number, K, V, BK, BV)
            x = tl.dot(dos, tl.trans(S), acc=x, input_precision=PREC, out_dtype=ACC)
        number, ahead = _read(numbers, weights, rows + r + 1, r + 1 < last, C)
        dqs += x * w[:, None]
        read = tl.where(columns[None, :] == r, tl.sum(x * qs, 1)[:, None], read)
        w = ahead
    if filled:
        at = reads + ((head * NT + n) * C + i)[:, None] * SLOTS + columns[None, :]
        tl.store(at, read, mask=(columns < SLOTS)[None, :])
        store_heads(past, dqs, row, h, i, left, H, K, BK)


@triton.jit
def _add(x, y, acc, TWICE: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr):
    """acc + x y for x in ACC and y in DOT; TWICE: of x's high and low parts."""
    high, low = parts(x, TWICE)
    acc = tl.dot(high.to(DOT), y, acc=acc, input_precision=PREC, out_dtype=ACC)
    if TWICE:
        acc = tl.dot(low.to(DOT), y, acc=acc, input_precision=PREC, out_dtype=ACC)
    return acc


@kernel
def push_kernel(
    q,
    do,
    news,
    table,
    place,
    turned,
    dtree,  # [3 or 1, B H, SPACE, K, V]
    scale,
    T,
    NT,
    H,
    R,
    N,
    ROOM,
    SPACE,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SLOTS: tl.constexpr,
    C: tl.constexpr,
    GATE: tl.constexpr,
    TWICE: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The gradient of a state by those who read it; with a gate, also what it were with the steps up and down."""
    index = tl.program_id(0).to(tl.int64)
    head, state = index // ROOM, (index % ROOM).to(tl.int32)
    b, h = head // H, head % H
    count = tl.load(news + head * (NT + 2) + NT)
    if (count <= ROOM) & (state < count):
        start = field(table, head, state, ROOM, FIRST)
        stop = field(table, head, state, ROOM, STOP)
        i = tl.arange(0, C)
        weights = turned + (head * NT * SLOTS + tl.load(place + head * ROOM + state)) * C + i
        each = N.to(tl.int64) * NT * SLOTS * C
        kk = tl.arange(0, BK)
        dS = tl.zeros([BK, BV], dtype=ACC)
        if GATE:
            dS_up = tl.zeros([BK, BV], dtype=ACC)
            dS_down = tl.zeros([BK, BV], dtype=ACC)
        for n in range(start, stop):
            row = b * T + n * C
            left = T - n * C
            at = q + ((row + i)[None, :] * (H // R) + h // R) * K + kk[:, None]  # transposed as it is loaded
            qs = tl.load(at, mask=(i < left)[None, :] & (kk < K)[:, None], other=0.0).to(ACC)
            dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
            w = tl.load(weights + n * C)
            dS = _add(qs * w[None, :], dos, dS, TWICE, DOT, ACC, PREC)
            if GATE:
                w = tl.load(weights + each + n * C)
                dS_up = _add(qs * w[None, :], dos, dS_up, TWICE, DOT, ACC, PREC)
                w = tl.load(weights + 2 * each + n * C)
                dS_down = _add(qs * w[None, :], dos, dS_down, TWICE, DOT, ACC, PREC)
        at, keep = state_at(K, V, BK, BV)
        at += dtree + (head * SPACE + state) * K * V
        tl.store(at, dS * scale, mask=keep)
        if GATE:
            each = N.to(tl.int64) * SPACE * K * V
            tl.store(at + each, dS_up * scale, mask=keep)
            tl.store(at + 2 * each, dS_down * scale, mask=keep)


@kernel
def rank_kernel(
    rank_scale,
    starts,
    G,
    news,
    passed,
    reads,
    drank_scale,  # [B, T, H, SLOTS]: on entry without the reads of states
    u,  # [3, B H, T]: row sums of F . M, F . up, F . down
    scale,
    T,
    NT,
    H,
    N,
    ROOM,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
    ACC: tl.constexpr,
):
    """The gradient of rank_scale, whole, and the row sums, which are its products with rank_scale."""
    head, b, h, n = tile_of(H, NT)
    row = b * T + n * C
    left = T - n * C
    i = tl.arange(0, C)
    r = tl.arange(0, BS)
    begin = (row * H + h) * SLOTS
    first, last = _ranks(starts, begin, n, fits(news, head, NT, ROOM), C, BS, SLOTS)
    st = by_rank(starts, row, h, i[:, None], left, r[None, :], H, SLOTS)
    at = begin + i[:, None] * H * SLOTS + r[None, :]
    live = (i < left)[:, None] & (r < SLOTS)[None, :]
    rows = head * NT + n
    reads += rows * C * SLOTS + i * SLOTS
    passed += rows * SLOTS
    some = (r >= first) & (r < last)
    x = tl.load(reads[:, None] + r[None, :], mask=some[None, :], other=0.0)
    if DECAY:
        x *= tl.load(passed + r, mask=some, other=0.0)[None, :]
    total = tl.sum(x, 1)
    upto = tl.zeros([C, BS], dtype=ACC)
    for rank in tl.range(first, last, num_stages=3):
        end = tl.load(starts + begin + rank - 1, mask=rank > 0, other=n * C)
        read = tl.load(reads + rank)
        if DECAY:
            read *= tl.load(passed + rank)
        upto += tl.where(st >= end, read[:, None], 0.0)
    within = by_slot(upto, total, C, BS) * scale
    if DECAY:
        to = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
        within *= weight(to, ACC)[:, None]
    dw = tl.load(drank_scale + at, mask=live, other=0.0) + within
    tl.store(drank_scale + at, dw, mask=live)
    if DECAY or GATE:
        u += head * T + n * C + i
        W = tl.load(rank_scale + at, mask=live, other=0.0)
        tl.store(u, tl.sum(W * dw, 1), mask=i < left)
        if GATE:
            each = N.to(tl.int64) * T
            more = live & (r + 1 < SLOTS)[None, :]
            fewer = live & (r > 0)[None, :]
            up = tl.where(more, tl.load(rank_scale + at + 1, mask=more, other=0.0) - W, 0.0)
            down = tl.where(fewer, W - tl.load(rank_scale + at - 1, mask=fewer, other=0.0), 0.0)
            tl.store(u + each, tl.sum(up * dw, 1), mask=i < left)
            tl.store(u + 2 * each, tl.sum(down * dw, 1), mask=i < left)
