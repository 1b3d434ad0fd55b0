"""The states of slots, in Triton: one for each slot that a tile of queries finds in its past.

The first token of tile n finds the tokens before it cut into slots, the open one and closed ones. Most of them the tile
before found too. The others are new: what was open, now a tile longer or closed, and unions of slots that met. A new
one consists of whole slots of the tile before and of tokens of that tile. So states are numbered as they are found,
with the numbers into which they go:

    state = the tokens' own, sum of e^{G_end - G_j} k_j v_j^T over its tokens j in the tile before the one that finds it
          + sum of e^{G_end - G_end of s} state_s over the states s that go into it

and with all later ones to come, the gradient of state s gets e^{..} times that of the one that it goes into.

At every tile whose number is a multiple of LIFE all states are new, those too that go on without a change: so no one
has more readers than that, whose sum is one loop.

How many there are depends on the slots: one a tile, and some two for each boundary. There is room for ROOM a head. A
head with more (boundaries every few tokens) leaves them unused.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import weight
from mixassay.kernels.dla.heads_triton import load_heads

# What the table says of a state: its first token and the one behind its last, the first tile that reads it and the one
# behind the last, and the number into which it goes (-1: none).
BEGIN, END, FIRST, STOP, INTO, FIELDS = (tl.constexpr(x) for x in range(6))

# Compiled once, whatever the sizes.
kernel = triton.jit(do_not_specialize=["T", "NT", "H", "R", "N", "ROOM", "SPACE"])


@triton.jit
def tile_of(H, NT):
    """Head in all, its batch row and number, and the tile: the last tiles, which have most to read, come first."""
    index = tl.program_id(0).to(tl.int64)
    head, n = index // NT, (NT - 1 - index % NT).to(tl.int32)
    return head, head // H, head % H, n


@triton.jit
def fits(news, head, NT, ROOM):
    """Whether all states of this head have room."""
    return tl.load(news + head * (NT + 2) + NT) <= ROOM


@triton.jit
def field(table, head, state, ROOM, ROW: tl.constexpr):
    return tl.load(table + (head * FIELDS + ROW) * ROOM + state)


@triton.jit
def decay_to(end, G, P, head, T, NT, C: tl.constexpr):
    """Log decay of all tokens before `end`, float64."""
    within = tl.load(G + head * T + end - 1, mask=end % C > 0, other=0.0)
    return tl.load(P + head * (NT + 1) + end // C) + within.to(tl.float64)


@triton.jit
def parts(x, TWICE: tl.constexpr):
    """x, or TWICE: its high and low parts, of which bfloat16 holds all that counts."""
    high = x
    if TWICE:  # cut off, not rounded: conversions both ways take a fourth of a GPU's speed
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def dot(x, y, acc, TWICE: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr):
    """acc + x y for x in DOT and y in ACC; TWICE: of y's high and low parts."""
    high, low = parts(y, TWICE)
    acc = tl.dot(x, high.to(DOT), acc=acc, input_precision=PREC, out_dtype=ACC)
    if TWICE:
        acc = tl.dot(x, low.to(DOT), acc=acc, input_precision=PREC, out_dtype=ACC)
    return acc


@triton.jit
def state_at(K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Where the numbers of a state [K, V] lie, and which of a block's there are."""
    kk = tl.arange(0, BK)[:, None]
    vv = tl.arange(0, BV)[None, :]
    return kk * V + vv, (kk < K) & (vv < V)


@triton.jit
def _slots(starts, b, h, n, T, H, r, there, C: tl.constexpr, SLOTS: tl.constexpr):
    """The slots that the first token of tile n finds in its past, by their ranks: empty ones have end <= begin."""
    at = starts + ((b * T + n * C) * H + h) * SLOTS + r
    begin = tl.load(at, mask=there & (r < SLOTS), other=0)
    end = tl.load(at - 1, mask=there & (r > 0) & (r < SLOTS), other=0)
    return begin, tl.where(r == 0, n * C, end)


@kernel
def link_kernel(
    starts,
    links,  # [B H, NT, SLOTS]: of a slot that tile n finds, its rank at tile n - 1, -1: empty, -2, -3, ..: the new ones
    goes,  # [B H, NT, SLOTS]: of a slot that tile n finds, the rank at tile n + 1 of what it goes into, -1: it stays
    counts,  # [B H, NT]: new ones
    T,
    NT,
    H,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
    LIFE: tl.constexpr,
):
    head, b, h, n = tile_of(H, NT)
    r = tl.arange(0, BS)
    begin, end = _slots(starts, b, h, n, T, H, r, True, C, SLOTS)
    old_begin, old_end = _slots(starts, b, h, n - 1, T, H, r, n > 0, C, SLOTS)
    inside = (begin[:, None] <= old_begin[None, :]) & (end[:, None] > old_begin[None, :])
    inside = inside & (old_begin < old_end)[None, :]
    same = inside & (begin[:, None] == old_begin[None, :]) & (end[:, None] == old_end[None, :]) & (n % LIFE > 0)
    link = tl.max(tl.where(same, r[None, :], -1), 1)
    new = ((begin < end) & (link < 0)).to(tl.int32)
    at = (head * NT + n) * SLOTS + r
    tl.store(links + at, tl.where(new > 0, -1 - tl.cumsum(new), link), mask=r < SLOTS)
    into = tl.max(tl.where(inside & (same == 0), r[:, None], -1), 0)
    tl.store(goes + at - SLOTS, into, mask=(n > 0) & (r < SLOTS))
    tl.store(counts + head * NT + n, tl.sum(new))


@kernel
def chain_kernel(
    links,
    news,  # [B H, NT + 2]: states found by the tiles before, the number of the first new one
    numbers,  # [B H, NT, SLOTS]: the state of each rank at the first token of a tile, -1: no token before it
    NT,
    SLOTS: tl.constexpr,
    BW: tl.constexpr,
):
    """A head's tiles in sequence."""
    head = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BW)
    links += head * NT * SLOTS + r
    numbers += head * NT * SLOTS + r
    number = tl.full([BW], -1, dtype=tl.int32)
    for n in tl.range(0, NT, num_stages=4):  # loads a few tiles ahead
        link = tl.load(links + n * SLOTS, mask=r < SLOTS, other=-1)
        first = tl.load(news + head * (NT + 2) + n)
        number = tl.gather(number, tl.maximum(link, 0), 0)
        number = tl.where(link < 0, tl.where(link < -1, first - 2 - link, -1), number)
        tl.store(numbers + n * SLOTS, number, mask=r < SLOTS)


@kernel
def table_kernel(
    starts,
    links,
    goes,
    numbers,
    table,  # [B H, FIELDS, ROOM]
    T,
    NT,
    H,
    ROOM,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
):
    """Of what tile n finds new, where it lies and who reads it first; of what goes with it, who read it last."""
    head, b, h, n = tile_of(H, NT)
    r = tl.arange(0, BS)
    begin, end = _slots(starts, b, h, n, T, H, r, True, C, SLOTS)
    at = (head * NT + n) * SLOTS
    number = tl.load(numbers + at + r, mask=r < SLOTS, other=-1)
    there = (number >= 0) & (number < ROOM)
    new = there & (tl.load(links + at + r, mask=r < SLOTS, other=-1) < -1)
    table += head * FIELDS * ROOM + number
    tl.store(table + BEGIN * ROOM, begin, mask=new)
    tl.store(table + END * ROOM, end, mask=new)
    tl.store(table + FIRST * ROOM, tl.zeros([BS], dtype=tl.int32) + n, mask=new)
    rank = tl.load(goes + at + r, mask=(r < SLOTS) & (n + 1 < NT), other=-1)
    into = tl.load(numbers + at + SLOTS + rank, mask=rank >= 0, other=-1)
    gone = there & ((rank >= 0) | (n + 1 == NT))
    tl.store(table + STOP * ROOM, tl.zeros([BS], dtype=tl.int32) + n + 1, mask=gone)
    tl.store(table + INTO * ROOM, into, mask=gone)


def find(starts: Tensor, C: int, life: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """numbers, news and table."""
    B, T, H, SLOTS = starts.shape
    NT, BS = triton.cdiv(T, C), max(16, triton.next_power_of_2(SLOTS))
    numbers, links, goes = (starts.new_empty(B * H, NT, SLOTS) for _ in range(3))
    counts, table = starts.new_empty(B * H, NT), starts.new_empty(B * H, FIELDS.value, room)
    warps = min(16, max(1, BS**2 // 1024))
    link_kernel[(B * H * NT,)](
        starts, links, goes, counts, T, NT, H, SLOTS=SLOTS, BS=BS, C=C, LIFE=life, num_warps=warps
    )
    found = counts.cumsum(1, dtype=torch.int32)
    news = torch.cat([torch.zeros_like(found[:, :1]), found, found[:, -1:]], 1)
    chain_kernel[(B * H,)](links, news, numbers, NT, SLOTS=SLOTS, BW=max(32, BS), num_warps=1)
    table_kernel[(B * H * NT,)](
        starts, links, goes, numbers, table, T, NT, H, room, SLOTS=SLOTS, BS=BS, C=C, num_warps=1
    )
    return numbers, news, table


@kernel
def end_kernel(
    G,
    P,
    news,
    table,
    ends,  # [B H, ROOM], float64: log decay of all tokens before a state's end
    fades,  # [B H, ROOM]: decay from there to the end of the one that it goes into
    T,
    NT,
    ROOM,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    head, block = index // tl.cdiv(ROOM, BLOCK), index % tl.cdiv(ROOM, BLOCK)
    state = block * BLOCK + tl.arange(0, BLOCK)
    found = (state < tl.load(news + head * (NT + 2) + NT)) & (state < ROOM)
    table += head * FIELDS * ROOM
    into = tl.load(table + INTO * ROOM + state, mask=found, other=0)
    here = decay_to(tl.load(table + END * ROOM + state, mask=found, other=0), G, P, head, T, NT, C)
    end = tl.load(table + END * ROOM + into, mask=found & (into >= 0) & (into < ROOM), other=0)
    tl.store(ends + head * ROOM + state, here, mask=found)
    tl.store(fades + head * ROOM + state, weight(decay_to(end, G, P, head, T, NT, C) - here, ACC), mask=found)


@kernel
def own_kernel(
    k,
    v,
    G,
    P,
    news,
    table,
    ends,
    tree,  # [B H, SPACE, K, V]
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
    C: tl.constexpr,
    DECAY: tl.constexpr,
    TWICE: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """What the tokens of tile m are to the states that the next tile finds new."""
    head, b, h, m = tile_of(H, NT)
    row = b * T + m * C
    left = T - m * C
    i = tl.arange(0, C)
    j = m * C + i
    ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
    vs = load_heads(v, row, h, i, left, H, V, BV)
    if DECAY:
        before = tl.load(P + head * (NT + 1) + m)
        Gs = tl.load(G + head * T + j, mask=i < left, other=0.0)
    first = tl.load(news + head * (NT + 2) + m + 1)
    last = tl.load(news + head * (NT + 2) + m + 2)
    for state in range(first, tl.where(fits(news, head, NT, ROOM), last, first)):
        begin = field(table, head, state, ROOM, BEGIN)
        end = field(table, head, state, ROOM, END)
        w = tl.where((j >= begin) & (j < end), 1.0, 0.0).to(ACC)
        if DECAY:
            w *= weight((tl.load(ends + head * ROOM + state) - before).to(Gs.dtype) - Gs, ACC)
        S = dot(tl.trans(ks), vs.to(ACC) * w[:, None], tl.zeros([BK, BV], dtype=ACC), TWICE, DOT, ACC, PREC)
        at, keep = state_at(K, V, BK, BV)
        tl.store(tree + (head * SPACE + state) * K * V + at, S, mask=keep)


@triton.jit
def _way(state, count, table, fades, head, ROOM, DECAY: tl.constexpr, ACC: tl.constexpr):
    """The number into which a state goes and the decay up to there."""
    there = (state >= 0) & (state < count)
    into = tl.load(table + (head * FIELDS + INTO) * ROOM + state, mask=there, other=-1)
    fade = tl.full([], 1.0, dtype=ACC)
    if DECAY:
        fade = tl.load(fades + head * ROOM + state, mask=there, other=0.0)
    return into.to(tl.int64), fade


@kernel
def join_kernel(
    x,  # [some, B H, SPACE, SIZE]: states, or their gradients
    states,  # [2 or 1, B H, SPACE, SIZE]: states in the dtype of products, TWICE: their high and low parts
    news,
    table,
    fades,
    NT,
    N,
    ROOM,
    SPACE,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BACK: tl.constexpr,
    TWICE: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Adds each state to the one that it goes into or, BACK, the gradients of those to its own; in sequence. A state is
    whole when its turn comes: all that go into it have had theirs. Often the next turn's is the sum of this one, which
    stays at hand."""
    index = tl.program_id(0).to(tl.int64)
    block, row = index % tl.cdiv(SIZE, BLOCK), index // tl.cdiv(SIZE, BLOCK)
    head = row % N
    # A thread's are four, and not eight in half precision, so that both lie alike.
    at = tl.max_contiguous(block * BLOCK + tl.arange(0, BLOCK), 4)
    keep = at < SIZE
    held = tl.zeros([BLOCK], dtype=x.dtype.element_ty)
    x += row * SPACE * SIZE + at
    count = tl.where(fits(news, head, NT, ROOM), tl.load(news + head * (NT + 2) + NT), 0)
    holder = tl.full([], -1, dtype=tl.int64)  # whose sum that is
    state = tl.where(BACK, count - 1, 0).to(tl.int64)
    into, fade = _way(state, count, table, fades, head, ROOM, DECAY, held.dtype)
    for _ in range(count):
        following = state - 1 if BACK else state + 1
        ahead, fade_ahead = _way(following, count, table, fades, head, ROOM, DECAY, held.dtype)
        own = tl.load(x + state * SIZE, mask=keep & (state != holder), other=0.0)
        other = tl.load(x + into * SIZE, mask=keep & (into >= 0) & (into != holder), other=0.0)
        if BACK:
            held = own + tl.where(into == holder, held, other) * fade
            holder = state
            tl.store(x + state * SIZE, held, mask=keep & (into >= 0))
        else:
            own = tl.where(state == holder, held, own)
            stored = into >= 0
            if states is not None:
                high, low = parts(own, TWICE)
                copy = states + (row * SPACE + state) * SIZE + at
                tl.store(copy, high.to(states.dtype.element_ty), mask=keep)
                if TWICE:
                    tl.store(copy + N.to(tl.int64) * SPACE * SIZE, low.to(states.dtype.element_ty), mask=keep)
                stored = stored & (into != state + 1)  # nobody but the next turn looks at it again
            held = tl.where(into == holder, held, other) + own * fade
            holder = into
            tl.store(x + into * SIZE, held, mask=keep & stored)
        state, into, fade = following, ahead, fade_ahead
