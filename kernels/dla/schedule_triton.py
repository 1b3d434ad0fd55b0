"""The schedule in Triton: scores and boundaries as `boundaries.py` has them, slots as `slots.py` has them.

One program walks the tokens of one head and nothing waits for the device. The mathematics is in those two files; this
is their definition token by token (`schedule_reference.py`), with the slots side by side in a vector, by rank.

`score_kernel` holds the state C of the open segment and its norm, and reads a token's key and value as the outer
product s_t that C adds up. `slots_kernel` takes boundaries and scores as given: integers only, but for the rule ward,
which needs the slots' states. These lie in memory, in float64, each where `place` says; only two that meet and their
neighbours are read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import operands
from mixassay.kernels.dla import slots

# Compiled once, whatever the sizes.
kernel = triton.jit(do_not_specialize=["T", "H", "R"])

UNIT = tl.constexpr(slots.UNIT)
HIGHEST = tl.constexpr(slots.HIGHEST)
ROUNDING = tl.constexpr(slots.ROUNDING)
NOTHING = tl.constexpr(slots.NOTHING)


@triton.jit
def _token(at_k, at_v, kk, vv, K: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr):
    """A token's key as a column and its value as a row."""
    k = tl.load(at_k + kk[:, None], mask=(kk < K)[:, None], other=0.0)
    v = tl.load(at_v + vv[None, :], mask=(vv < V)[None, :], other=0.0)
    return k.to(ACC), v.to(ACC)


@kernel
def score_kernel(
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
        inner = tl.sum(C * s)
        memory = tl.sum(C * C)
        # The next token's, while this one's sums are on their way.
        at_k += tl.where(t + 1 < T, keys, 0)
        at_v += tl.where(t + 1 < T, H * V, 0)
        x, y = _token(at_k, at_v, kk, vv, K, V, ACC)
        own = tl.sum(s * s)
        some = (own > 0) & (memory > 0)
        own = tl.where(some, own, 1.0)
        memory = tl.where(some, memory, 1.0)
        if READING == "memory_raw":
            far = tl.sqrt(tl.maximum(own + memory - 2 * inner, 0.0) / memory)
        else:
            far = tl.sqrt(tl.maximum(2 - 2 * (inner / (tl.sqrt(own) * tl.sqrt(memory))), 0.0))
        far = tl.where(t == 0, tau, tl.where(some, far, 0.0)).to(ACC)
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
    k,  # [B, T, H / R, K], for ward
    v,
    states,  # [B, H, S, K, V] room, for ward
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
    RULE: tl.constexpr,
    HAS_SCORE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    first, h = index // H * T, index % H
    at = first * H + h
    r = tl.arange(0, BS)
    start = tl.zeros([BS], dtype=tl.int32)
    n = tl.zeros([BS], dtype=tl.int32)
    total = tl.zeros([BS], dtype=tl.int64)  # of scores
    divide = tl.zeros([BS], dtype=tl.int64)  # the score that opened the slot
    used = tl.full([], 1, dtype=tl.int32)
    if RULE == "ward":
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
    next_unit = tl.zeros([], dtype=tl.int64)
    if HAS_SCORE:
        next_unit = _units(tl.load(score + at))
    divide = tl.where(r == 0, next_unit, 0)
    for t in range(T):
        opens = next_opens
        unit = next_unit
        ahead = at + tl.where(t + 1 < T, H, 0)
        next_opens = (tl.load(boundary + ahead) != 0) & (S > 1)
        if HAS_SCORE:
            next_unit = _units(tl.load(score + ahead))
        moved = tl.full([], -1, dtype=tl.int32)
        if opens:
            full = used == S
            moved = tl.full([], S - 1, dtype=tl.int32)
            if RULE == "ward":
                tl.store(states + _of(place, r, 0) * K * V + own, C, mask=keep)
                square = tl.where(r == 0, tl.sum(C * C), square)
                if used > 1:
                    inner = tl.where(r == 0, _product(C, states, place, r, 1, own, K * V, keep), inner)
            if full:
                pairs = r < S - 1
                if RULE == "density":
                    cost = _pair(total, r, BS) * UNIT // tl.maximum(_pair(n, r, BS), 1)
                    least = tl.min(tl.where(pairs, cost, 2**62))
                elif RULE == "weak":
                    cost = divide
                    least = tl.min(tl.where(pairs, cost, 2**62))
                else:
                    apart = _bound(n, Q, square)
                    joint = _bound(_pair(n, r, BS), _pair(Q, r, BS), _pair(square, r, BS) + 2 * inner)
                    cost = joint - _pair(apart, r, BS)
                    least = tl.min(tl.where(pairs, cost, float("inf"))) + tl.sum(tl.sqrt(n * Q)) * ROUNDING
                moved = tl.max(tl.where(pairs & (cost <= least), r, -1))
            if RULE == "ward":
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
            divide = _replaced(divide, r, moved, unit)
            n = _added(n, r, moved, S)
            total = _added(total, r, moved, S)
            used = tl.minimum(used + 1, S)
        n += (r == 0).to(tl.int32)
        total += tl.where(r == 0, unit, 0)
        if RULE == "ward":
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


def scores(k: Tensor, v: Tensor, threshold: Tensor, log_decay: Tensor | None, reading: str) -> tuple[Tensor, Tensor]:
    """`boundaries.boundaries`."""
    (B, T, H, _), acc = v.shape, operands(torch.promote_types(k.dtype, v.dtype))[1]
    score = v.new_empty((B, T, H), dtype=torch.float64 if acc == tl.float64 else torch.float32)
    boundary = torch.empty_like(score, dtype=torch.bool)
    size, warps = sizes(k, v)
    score_kernel[(B * H,)](
        k.contiguous(),
        v.contiguous(),
        None if log_decay is None else log_decay.contiguous(),
        threshold.contiguous(),
        score,
        boundary,
        T=T,
        H=H,
        READING=reading,
        DECAY=log_decay is not None,
        FLOOR=-708.0 if acc == tl.float64 else -87.0,
        ACC=acc,
        num_warps=warps,
        **size,
    )
    return score, boundary


def fill(
    boundary: Tensor, score: Tensor | None, k: Tensor | None, v: Tensor | None, capacity: int, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`slots.slots`."""
    B, T, H = boundary.shape
    states, size, warps = None, dict.fromkeys(("R", "K", "V", "BK", "BV"), 1), 1
    if rule == "ward":
        assert k is not None
        assert v is not None
        k, v = k.contiguous(), v.contiguous()
        states = v.new_empty((B, H, capacity, k.shape[-1], v.shape[-1]), dtype=torch.float64)
        size, warps = sizes(k, v)
    opened = torch.empty_like(boundary, memory_format=torch.contiguous_format)
    shift = torch.empty_like(opened, dtype=torch.int64)
    starts = torch.empty((B, T, H, capacity), dtype=torch.int32, device=boundary.device)
    slots_kernel[(B * H,)](
        boundary.contiguous(),
        score,
        k,
        v,
        states,
        opened,
        shift,
        starts,
        T=T,
        H=H,
        S=capacity,
        BS=triton.next_power_of_2(capacity),
        RULE=rule,
        HAS_SCORE=score is not None,
        num_warps=warps,
        **size,
    )
    return opened, shift, starts


def sizes(k: Tensor, v: Tensor) -> tuple[dict[str, int], int]:
    """Of a state and its blocks, and the warps that hold one."""
    K, V = k.shape[-1], v.shape[-1]
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    return {"R": v.shape[2] // k.shape[2], "K": K, "V": V, "BK": BK, "BV": BV}, min(8, max(1, BK * BV // 1024))
