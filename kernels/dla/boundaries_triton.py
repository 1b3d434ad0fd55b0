"""Scores and boundaries in Triton, as `boundaries.py` has them. Nothing waits for the device.

The open segment's state being C, there are two ways. `walk_kernel` is a program for each head that goes from token to
token with C in registers. In chunks, `table_kernel` makes for all of them at once the scores of every token if a
segment began at any other of its chunk, hence for every token the boundaries that follow one there, as bits;
`chain_kernel` then goes from chunk to chunk: with C it finds the first boundary and has the others; `pick_kernel` takes
the scores from the table. C is a sum in float32 or wider, and so products with it are made from three bfloat16 parts.

Long sequences are cut into blocks of chunks, chained side by side as if a segment began with each. From a boundary on
nothing depends on what was before: a second run of `chain_kernel`, one program a head, goes into each block with the C
that it has, until the block's own chain has a boundary where it finds one, and on with what that chain left.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import load_rows, operands, store_rows, tile

# Compiled once, whatever the sizes.
kernel = triton.jit(do_not_specialize=["T", "NT", "H", "R", "N", "P", "L"])

CHUNK = 32
"""Tokens of a chunk of scores: a table of 32 x 32 is one warp's."""
LONG = 512
"""Tokens from which on scores are made in chunks; a quarter of them if a walk would drag along a wide state."""
WIDE = 1024
"""Numbers of a state up to which it is not."""
BLOCK = 2048
"""Tokens of a block of chunks, at least."""
BLOCKS = 512
"""Of all heads, as many as run side by side."""


@triton.jit
def load_token(at_k, at_v, kk, vv, K: tl.constexpr, V: tl.constexpr, ACC: tl.constexpr):
    """A token's key as a column and its value as a row."""
    k = tl.load(at_k + kk[:, None], mask=(kk < K)[:, None], other=0.0)
    v = tl.load(at_v + vv[None, :], mask=(vv < V)[None, :], other=0.0)
    return k.to(ACC), v.to(ACC)


@triton.jit
def _inverse(square):
    """1 / the root, 0 for 0."""
    return tl.where(square > 0, tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)


@triton.jit
def _distance(inner, own, inverse, memory, RAW: tl.constexpr):
    """As `boundaries.distance`; `inverse` is that of `own`."""
    if RAW:
        far = tl.sqrt(tl.maximum(own + memory - 2 * inner, 0.0) / tl.where(memory > 0, memory, 1.0))
    else:
        far = tl.sqrt(tl.maximum(2 - 2 * (inner * inverse * _inverse(memory)), 0.0))
    return tl.where((own > 0) & (memory > 0), far, 0.0)


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
    x, y = load_token(at_k, at_v, kk, vv, K, V, ACC)
    for t in range(T):
        s = x * y
        own = tl.sum(x * x) * tl.sum(y * y)
        inner = tl.sum(C * s)
        memory = tl.sum(C * C)
        # The next token's, while this one's sums are on their way.
        at_k += tl.where(t + 1 < T, keys, 0)
        at_v += tl.where(t + 1 < T, H * V, 0)
        x, y = load_token(at_k, at_v, kk, vv, K, V, ACC)
        far = _distance(inner, own, _inverse(own), memory, READING == "memory_raw")
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
def _high(x, DOT: tl.constexpr, ACC: tl.constexpr):
    """x to the digits of DOT: bfloat16 by integers, since a conversion there and back costs sixteen additions."""
    if tl.bfloat16 == DOT:
        return ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    else:
        return x.to(DOT).to(ACC)


@triton.jit
def _dot(x, y, acc, PARTS: tl.constexpr, LEFT: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr):
    """acc + x y, where the digits of one (x if LEFT, else y) are more than DOT holds: that many parts of it."""
    rest = x if LEFT else y
    for step in tl.static_range(PARTS):
        part = _high(rest, DOT, ACC) if step + 1 < PARTS else rest
        if LEFT:
            acc = tl.dot(part.to(DOT), y, acc=acc, input_precision=EXACT, out_dtype=ACC)
        else:
            acc = tl.dot(x, part.to(DOT), acc=acc, input_precision=EXACT, out_dtype=ACC)
        rest -= part
    return acc


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
    table,  # [B H, NT, C, C]: the score of token t if the segment began at r < t
    follow,  # [B H, NT, C]: bits of the boundaries that follow one at r, with it
    sums,  # [3, B H, NT, C]: <C, s_t> of a segment that began with the chunk, |s_t|^2, sums of log decays
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
    PARTS: tl.constexpr,
    FLOOR: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    BITS: tl.constexpr,
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
    # In parts, all of them: a segment of one token has no other errors to balance its own. [t, r]: <C, s_t>.
    ones = (i[:, None] >= i[None, :]).to(DOT)
    at = sums + chunk * C + i
    each = N.to(tl.int64) * NT * C
    if DECAY:
        g = tl.load(log_decay + (row + i) * H + h, mask=i < left, other=0.0).to(ACC)
        g = tl.maximum(g, FLOOR)
        after = tl.cumsum(g)
        a = tl.exp(g)
        gram *= _between(after - g, after, i, ACC)
        tl.store(at + 2 * each, after)
    else:
        a = tl.full([C], 1.0, dtype=ACC)
        gram = tl.where(i[:, None] > i[None, :], gram, 0.0)
    inner = _dot(gram, ones, tl.zeros([C, C], dtype=ACC), PARTS, True, DOT, ACC, EXACT)
    tl.store(at, tl.sum(gram, 1))
    tl.store(at + each, own)
    # From here on a thread has the r's that it will have; what another has comes by memory.
    table += chunk * C * C
    tl.store(table + i[:, None] * C + i[None, :], inner, mask=i[:, None] > i[None, :])
    tl.debug_barrier()
    tau = tl.load(threshold + head).to(ACC)
    inverse = _inverse(own)
    follows = tl.full([C], C, dtype=tl.int32)
    inner = tl.zeros([C], dtype=ACC)
    memory = tl.zeros([C], dtype=ACC)
    ahead = tl.load(table + C + i, mask=i < 1, other=0.0)
    ahead2 = tl.load(table + 2 * C + i, mask=i < 2, other=0.0)
    ahead3 = tl.load(table + 3 * C + i, mask=i < 3, other=0.0)
    for t in tl.static_range(1, C):
        # |C|^2 decays by a^2 and grows by 2 a <C, s> + |s|^2.
        to = i * 0 + t - 1
        a_t = tl.gather(a, to, 0)
        memory = a_t * (a_t * memory + 2 * inner) + tl.gather(own, to, 0)
        memory = tl.where(i < t, memory, 0.0)
        inner, ahead, ahead2 = ahead, ahead2, ahead3
        ahead3 = tl.load(table + (t + 3) * C + i, mask=(i < t + 3) & (t + 3 < C), other=0.0)
        far = _distance(inner, tl.gather(own, to + 1, 0), tl.gather(inverse, to + 1, 0), memory, RAW)
        tl.store(table + t * C + i, far, mask=i < t)
        follows = tl.where((far >= tau) & (i < t), tl.minimum(follows, t), follows)
    bits = tl.full([C], 1, dtype=BITS) << i
    for _ in tl.static_range(LOG):  # twice as far each time
        to = tl.minimum(follows, C - 1)
        bits |= tl.where(follows < C, tl.gather(bits, to, 0), 0)
        follows = tl.where(follows < C, tl.gather(follows, to, 0), C)
    tl.store(follow + chunk * C + i, bits)


@triton.jit
def _chunk(
    k,
    v,
    sums,
    follow,
    marks,
    n,
    each,
    T,
    H,
    keys,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DECAY: tl.constexpr,
    JOIN: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
):
    """What a head's chain reads of chunk n."""
    i = tl.arange(0, C)
    left = T - n * C
    row = n.to(tl.int64) * C
    ks = load_rows(k + row * keys, i, left, tl.arange(0, BK), keys, K, BK).to(DOT)
    vs = load_rows(v + row * H * V, i, left, tl.arange(0, BV), H * V, V, BV)
    inner = tl.load(sums + row + i, mask=left > 0, other=0.0)
    own = tl.load(sums + each + row + i, mask=left > 0, other=0.0)
    before, after = inner, inner
    if DECAY:
        at = sums + 2 * each + row + i
        before = tl.load(at - 1, mask=(left > 0) & (i > 0), other=0.0)
        after = tl.load(at, mask=left > 0, other=0.0)
    bits = tl.load(follow + row + i, mask=left > 0, other=0)
    old = tl.load(marks + n, mask=left > 0, other=0) if JOIN else 0
    return ks, vs, inner, own, before, after, bits, old


@triton.jit
def _then(a, x, b, y):
    """One step (a, x), that makes a N + x of N, and another."""
    return a * b, b * x + y


@kernel
def chain_kernel(
    k,
    v,
    threshold,
    follow,
    sums,
    first,  # [B H, NT, C]: scores against the segment that a chunk finds open
    marks,  # [B H, NT]: bits of its boundaries
    exits,  # [B H, P, K, V]: C after each block
    T,
    NT,
    H,
    R,
    N,
    P,
    L,  # chunks of a block
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    RAW: tl.constexpr,
    DECAY: tl.constexpr,
    JOIN: tl.constexpr,  # blocks that have been chained, one after the other
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    head, p = (index, index * 0) if JOIN else (index // P, index % P)
    h = head % H
    begin = head // H * T
    keys = (H // R) * K
    k += begin * keys + (h // R) * K
    v += (begin * H + h) * V
    follow += head * NT * C
    sums += head * NT * C
    first += head * NT * C
    marks += head * NT
    each = N.to(tl.int64) * NT * C
    tau = tl.load(threshold + head).to(ACC)
    i = tl.arange(0, C)
    exits += head * P * K * V
    n = (p * L).to(tl.int32)
    end = tl.minimum(n + L, NT)
    S = tl.zeros([BK, BV], dtype=ACC)
    if JOIN:
        n += L
        end = NT
        S = load_rows(exits, tl.arange(0, BK), K, tl.arange(0, BV), V, V, BV)
    opening = n
    ks, vs, inner, own, before, after, bits, old = _chunk(
        k, v, sums, follow, marks, n, each, T, H, keys, K, V, BK, BV, C, DECAY, JOIN, DOT, ACC
    )
    while n < end:
        # The next chunk's, while this one is worked on.
        ks1, vs1, inner1, own1, before1, after1, bits1, old1 = _chunk(
            k, v, sums, follow, marks, n + 1, each, T, H, keys, K, V, BK, BV, C, DECAY, JOIN, DOT, ACC
        )
        y = vs.to(ACC)
        # In two parts: errors of 2^-18 in the numbers of C are as good as those of a sum.
        read = tl.sum(_dot(ks, S, tl.zeros([C, BV], dtype=ACC), PARTS, False, DOT, ACC, EXACT) * y, 1)
        inner += tl.exp(before) * read if DECAY else read
        if DECAY:
            a = tl.exp(after - before)
            _, memory = tl.associative_scan((a * a, 2 * a * inner + own), 0, _then)
            memory = tl.where(i > 0, tl.gather(memory, tl.maximum(i - 1, 0), 0), 0.0)
            memory += tl.exp(2 * before) * tl.sum(S * S)
            total = tl.min(after)
            w = tl.exp(tl.minimum(total - after, 0.0))
            kept = tl.exp(total)
        else:
            grown = 2 * inner + own
            memory = tl.sum(S * S) + (tl.cumsum(grown) - grown)
            w = tl.full([C], 1.0, dtype=ACC)
            kept = tl.full([], 1.0, dtype=ACC)
        far = _distance(inner, own, _inverse(own), memory, RAW)
        if not JOIN:
            far = tl.where((n == opening) & (i == 0), tau, far)
        found = tl.min(tl.where((far >= tau) & (i < T - n * C), i, C))
        found = tl.sum(tl.where(i == found, bits, 0))  # the boundaries
        last = tl.max(tl.where(((found >> i) & 1) != 0, i, -1))
        y *= tl.where(i >= last, w, 0.0)[:, None]
        S = _dot(tl.trans(ks), y, S * tl.where(last < 0, kept, 0.0), PARTS if DECAY else 1, False, DOT, ACC, EXACT)
        tl.store(first + n * C + i, far)
        tl.store(marks + n, found)
        n += 1
        met = (old & found) != 0
        ks, vs, inner, own, before, after, bits, old = ks1, vs1, inner1, own1, before1, after1, bits1, old1
        if JOIN:
            block = (n - 1) // L
            if met:
                S = load_rows(exits + block * K * V, tl.arange(0, BK), K, tl.arange(0, BV), V, V, BV)
                n = (block + 1) * L
                ks, vs, inner, own, before, after, bits, old = _chunk(
                    k, v, sums, follow, marks, n, each, T, H, keys, K, V, BK, BV, C, DECAY, JOIN, DOT, ACC
                )
    if not JOIN:
        store_rows(exits + p * K * V, S, tl.arange(0, BK), K, tl.arange(0, BV), V, V, BV)


@kernel
def pick_kernel(table, first, marks, score, boundary, T, NT, H, C: tl.constexpr):
    """[B, T, H] of what [B H, NT] chunks have."""
    chunk = tl.program_id(0).to(tl.int64)
    head, n = chunk // NT, chunk % NT
    i = tl.arange(0, C)
    opens = ((tl.load(marks + chunk) >> i) & 1) != 0
    since = tl.max(tl.where(opens[None, :] & (i[None, :] < i[:, None]), i[None, :], -1), 1)
    far = tl.load(first + chunk * C + i)
    far = tl.where(since < 0, far, tl.load(table + (chunk * C + i) * C + since, mask=since >= 0, other=0.0))
    at = (head // H * T + n * C + i) * H + head % H
    tl.store(score + at, far, mask=i < T - n * C)
    tl.store(boundary + at, opens, mask=i < T - n * C)


def scores(
    k: Tensor,
    v: Tensor,
    threshold: Tensor,
    log_decay: Tensor | None,
    reading: str,
    chunk_size: int | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`boundaries.boundaries`. chunk_size 0 is the walk from token to token, 16, 32 or 64 the tokens of a chunk, None a
    choice by T, K and V; `block` tokens of a block, None `BLOCK` or more."""
    (B, T, H, _), dtype = v.shape, torch.promote_types(k.dtype, v.dtype)
    dot, acc, _ = operands(torch.float32 if dtype == torch.float16 else dtype)  # states may be out of its range
    score = v.new_empty((B, T, H), dtype=torch.float64 if acc == tl.float64 else torch.float32)
    boundary = torch.empty_like(score, dtype=torch.bool)
    size, warps = sizes(k, v, 4096)  # one warp for most: sums over several wait for each other at every token
    given: dict[str, Any] = {"k": k.contiguous(), "v": v.contiguous(), "threshold": threshold.contiguous()}
    given |= {"DECAY": log_decay is not None, "ACC": acc, "T": T, "H": H} | size
    decay: dict[str, Any] = {"log_decay": None if log_decay is None else log_decay.contiguous()}
    decay |= {"FLOOR": -708.0 if acc == tl.float64 else -87.0}
    least = LONG // 4 if size["K"] * size["V"] > WIDE else LONG
    C = (CHUNK if least <= T else 0) if chunk_size is None else chunk_size
    if not C or reading == "token":
        walk_kernel[(B * H,)](**given, **decay, score=score, boundary=boundary, READING=reading, num_warps=warps)
        return score, boundary
    N, NT = B * H, triton.cdiv(T, C)
    L = max(1, (block or max(BLOCK, N * T // BLOCKS)) // C)
    P = triton.cdiv(NT, L)
    given |= {"NT": NT, "N": N, "C": C, "RAW": reading == "memory_raw", "DOT": dot}
    given |= {"BK": tile(size["K"]), "BV": tile(size["V"])}
    given |= {"EXACT": "ieee" if acc == tl.float64 else "tf32x3"}
    warps = max(1, C * C // 1024, given["BK"] * given["BV"] * k.element_size() // 2**15)
    bits, follow_type = (torch.int32, tl.int32) if C <= 32 else (torch.int64, tl.int64)
    table, sums, first = (score.new_empty(shape) for shape in ((N, NT, C, C), (3, N, NT, C), (N, NT, C)))
    follow, marks = (score.new_empty(shape, dtype=bits) for shape in ((N, NT, C), (N, NT)))
    given |= {"follow": follow, "sums": sums}
    parts = 3 if dot == tl.bfloat16 else 1
    how = {"BITS": follow_type, "LOG": (C - 1).bit_length(), "PARTS": parts, "num_warps": warps}
    table_kernel[(N * NT,)](**given, **decay, **how, table=table)
    exits = score.new_empty((N, P, size["K"], size["V"]))
    given |= {"first": first, "marks": marks, "exits": exits, "P": P, "L": L, "PARTS": min(parts, 2)}
    given |= resources(given["BK"] * given["BV"] * k.element_size())
    chain_kernel[(N * P,)](**given, JOIN=False)
    if P > 1:
        chain_kernel[(N,)](**given, JOIN=True)
    pick_kernel[(N * NT,)](table, first, marks, score, boundary, T, NT, H, C=C, num_warps=warps)
    return score, boundary


def resources(size: int) -> dict[str, int]:
    """Of a chain whose state would be `size` bytes in the inputs' dtype."""
    return {"num_warps": min(8, max(1, size // 2048))}


def sizes(k: Tensor, v: Tensor, share: int) -> tuple[dict[str, int], int]:
    """Of a state and its blocks, and the warps that hold one, each so many of its numbers."""
    K, V = k.shape[-1], v.shape[-1]
    BK, BV = triton.next_power_of_2(K), triton.next_power_of_2(V)
    return {"R": v.shape[2] // k.shape[2], "K": K, "V": V, "BK": BK, "BV": BV}, min(8, max(1, BK * BV // share))
