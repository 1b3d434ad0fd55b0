"""Slots in Triton, as `slots.py` has them. Nothing waits for the device.

Three kernels: `list_kernel` lists the segments, `slots_kernel` goes from one to the next with the slots as vectors by
rank in one warp, integers only, `rows_kernel` gives each token what its segment has. The rule ward needs the slots'
states too, `ward_kernel`: they lie in memory, in float64, each where `place` says, and only two that meet and their
neighbours are read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.dla import slots
from mixassay.kernels.dla.boundaries_triton import load_token, sizes

# Compiled once, whatever the sizes.
kernel = triton.jit(do_not_specialize=["T", "H", "R"])

UNIT = tl.constexpr(slots.UNIT)
HIGHEST = tl.constexpr(slots.HIGHEST)
ROUNDING = tl.constexpr(slots.ROUNDING)
NOTHING = tl.constexpr(slots.NOTHING)


@triton.jit
def _units(score):
    """As `slots.units`: to the nearest, halves to the even one."""
    x = tl.minimum(score, HIGHEST) * UNIT
    whole = tl.floor(x)
    n = whole.to(tl.int64)
    half = x - whole
    return n + ((half > 0.5) | ((half == 0.5) & ((n & 1) == 1))).to(tl.int64)


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
def _added(x, r, shift, new, S: tl.constexpr):
    """As `slots.move`, with `new` for rank 0."""
    last = tl.minimum(shift, S - 2)
    return tl.where(r == 0, new, tl.where(r - 1 <= last, _above(x, r), 0) + tl.where(r <= last, 0, x))


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


@triton.jit
def _lightest(total, n, r, S: tl.constexpr, BS: tl.constexpr):
    """As `slots._pick` for the rule density, in a full cache. float32, whose error is below 2^-20 here, leaves one pair
    or few; integers decide between these."""
    total, n = _pair(total, r, BS), tl.maximum(_pair(n, r, BS), 1)
    rough = tl.where(r < S - 1, total.to(tl.float32) / n.to(tl.float32), float("inf"))
    least = tl.min(rough.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # at once, of integers
    near = rough <= least + tl.abs(least) * 2**-18 + 2**-18  # densities below one unit are rounded to 2^-20 of it
    moved = tl.max(tl.where(near, r, -1))
    if tl.sum(near.to(tl.int32)) > 1:
        cost = total * UNIT // n
        cost -= (cost * n > total * UNIT).to(tl.int64)  # to the lower one: a first score may be a negative threshold
        lowest = tl.min(tl.where(near, cost * BS + (BS - 1 - r), 2**62))  # of equals the oldest
        moved = (BS - 1 - (lowest & (BS - 1))).to(tl.int32)
    return moved


@kernel
def list_kernel(
    boundary,  # [B, T, H]
    score,  # [B, T, H], or none
    count,  # [B H]: segments
    token,  # [B H, T]: where each begins
    units,  # [B H, T]: for density the scores of all tokens before it, for weak that of its first
    number,  # [B, T, H]: the segment of each token
    T,
    H,
    C: tl.constexpr,
    SPLIT: tl.constexpr,  # whether there is more than one slot
    DENSITY: tl.constexpr,  # the rule; else weak
    HAS_SCORE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    at = head // H * T * H + head % H
    i = tl.arange(0, C)
    listed = tl.zeros([], dtype=tl.int32)
    summed = tl.zeros([], dtype=tl.int64)
    for start in range(0, T, C):
        t = start + i
        opens = (tl.load(boundary + at + t * H, mask=t < T, other=0) != 0) & SPLIT | (t == 0)
        j = listed + tl.cumsum(opens.to(tl.int32)) - 1
        listed += tl.sum(opens.to(tl.int32))
        tl.store(number + at + t * H, j, mask=t < T)
        tl.store(token + head * T + j, t, mask=opens)
        if HAS_SCORE:
            unit = _units(tl.load(score + at + t * H, mask=t < T, other=0.0))
            if DENSITY:
                before = summed + tl.cumsum(unit) - unit
                summed += tl.sum(unit)
                unit = before
            tl.store(units + head * T + j, unit, mask=opens)
    tl.store(count + head, listed)


@triton.jit
def _segments(token, units, j, count, DENSITY: tl.constexpr, HAS_SCORE: tl.constexpr):
    """Of segments j their first tokens, lengths and scores. (The last one's length is never asked for.)"""
    t = tl.load(token + j, mask=j < count, other=0)
    length = tl.load(token + j + 1, mask=j + 1 < count, other=0) - t
    if HAS_SCORE:
        unit = tl.load(units + j, mask=j < count, other=0)
        if DENSITY:
            unit = tl.load(units + j + 1, mask=j + 1 < count, other=0) - unit
    else:
        unit = t.to(tl.int64) * 0
    return t, length, unit


@kernel
def slots_kernel(
    count,
    token,
    units,
    shift,  # [B, T, H], at the tokens where segments after the first begin
    starts,  # [B, T, H, S], at those where any begins
    T,
    H,
    S: tl.constexpr,
    BS: tl.constexpr,
    DENSITY: tl.constexpr,
    HAS_SCORE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    at = head // H * T * H + head % H
    token += head * T
    units += head * T
    r = tl.arange(0, BS)
    segments = tl.load(count + head)
    _, n, total = _segments(token, units, r, segments, DENSITY, HAS_SCORE)
    n = tl.where(r == 0, n, 0)
    total = tl.where(r == 0, total, 0)  # for weak the score that opened the slot
    start = tl.zeros([BS], dtype=tl.int32)
    tl.store(starts + at * S + r, start, mask=r < S)
    next_t, next_length, next_unit = _segments(token, units, 1 + r, segments, DENSITY, HAS_SCORE)
    for first in range(1, segments, BS):
        ts, lengths, unit = next_t, next_length, next_unit
        next_t, next_length, next_unit = _segments(token, units, first + BS + r, segments, DENSITY, HAS_SCORE)
        moves = tl.full([BS], -1, dtype=tl.int32)
        for j in range(tl.minimum(BS, segments - first)):
            lane = r * 0 + j
            t = tl.gather(ts, lane, 0)
            moved = tl.full([], S - 1, dtype=tl.int32)
            if first + j >= S:
                if not HAS_SCORE:
                    moved = tl.full([], S - 2, dtype=tl.int32)
                elif DENSITY:
                    moved = _lightest(total, n, r, S, BS)
                else:
                    opener = tl.where(r < S - 1, total, 2**30).to(tl.int32)
                    moved = tl.max(tl.where(opener == tl.min(opener), r, -1))
            start = _replaced(start, r, moved, t)
            if HAS_SCORE:
                new = tl.gather(unit, lane, 0)
                if DENSITY:
                    n = _added(n, r, moved, tl.gather(lengths, lane, 0), S)
                    total = _added(total, r, moved, new, S)
                else:
                    total = _replaced(total, r, moved, new)
            tl.store(starts + (at + t * H) * S + r, start, mask=r < S)
            moves = tl.where(r == j, moved, moves)
        tl.store(shift + at + ts * H, moves, mask=first + r < segments)


@kernel
def rows_kernel(
    token,
    number,
    opened,  # [B, T, H]
    shift,
    starts,
    T,
    H,
    S: tl.constexpr,
    BS: tl.constexpr,
    C: tl.constexpr,
):
    """Of tokens that begin no segment what the token has that began theirs, and no shift."""
    parts = tl.cdiv(T * H, C)
    b = (tl.program_id(0) // parts).to(tl.int64)
    row = tl.program_id(0) % parts * C + tl.arange(0, C)  # of the sequence: to divide 64 bits in each thread is slow
    live = row < T * H
    r = tl.arange(0, BS)
    t, h = row // H, row % H
    row += b * T * H
    j = tl.load(number + row, mask=live, other=0)
    begin = tl.load(token + (b * H + h) * T + j, mask=live, other=0)
    opens = begin == t
    tl.store(opened + row, opens, mask=live)
    tl.store(shift + row, tl.full([C], -1, dtype=tl.int64), mask=live & ((t == 0) | (opens == 0)))
    keep = (live & (opens == 0))[:, None] & (r < S)[None, :]
    source = (b * T + begin) * H + h
    start = tl.load(starts + source[:, None] * S + r[None, :], mask=keep, other=0)
    tl.store(starts + row[:, None] * S + r[None, :], start, mask=keep)


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
            Q = _added(Q, r, moved, 0.0, S)
            C = tl.zeros([BK, BV], dtype=tl.float64)
            start = _replaced(start, r, moved, t)
            n = _added(n, r, moved, 0, S)
            used = tl.minimum(used + 1, S)
        n += (r == 0).to(tl.int32)
        x, y = load_token(at_k, at_v, kk, vv, K, V, tl.float64)
        C += x * y
        Q += tl.where(r == 0, tl.sum(x * x) * tl.sum(y * y), 0.0)
        at_k += keys
        at_v += H * V
        tl.store(opened + at, (moved >= 0) | (t == 0))
        tl.store(shift + at, moved)
        tl.store(starts + at * S + r, start, mask=r < S)
        at += H


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
        return opened, shift, starts
    size["BS"] = max(32, size["BS"])  # a warp reduces 32 integers at once
    count, token = starts.new_empty(B * H), starts.new_empty((B * H, T))
    number = torch.empty_like(boundary, dtype=torch.int32)
    units = shift.new_empty((B * H, T)) if score is not None else shift
    how = {"DENSITY": rule == "density", "HAS_SCORE": score is not None}
    tokens = min(4096, triton.next_power_of_2(max(T, 32)))
    list_kernel[(B * H,)](
        boundary, None if score is None else score.contiguous(), count, token, units, number, T, H,
        C=tokens, SPLIT=capacity > 1, **how, num_warps=max(1, tokens // 256),
    )  # fmt: skip
    slots_kernel[(B * H,)](count, token, units, shift, starts, **size, **how, num_warps=1)
    rows_kernel[(B * triton.cdiv(T * H, 64),)](token, number, opened, shift, starts, C=64, **size)
    return opened, shift, starts
