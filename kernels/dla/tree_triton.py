"""The tree, in Triton: what heads with very many boundaries read of the past instead of states of slots.

Slots only ever meet, so tiles that lie in one slot once do so for good. A binary tree has the states of 2^h tiles side
by side, each as of its end: a tile's own, and of a left and a right half

    S = sum of e^{G_end - G_j} k_j v_j^T over the tile's tokens j          S = e^{decay of the right} S_left + S_right

Which nodes a tile reads, and what it makes of them, is in `tree_reads_triton.py`; who reads a node, and the gradients
of nodes, keys and values, in `tree_keys_triton.py`.

Nodes lie in `tree` [B H, SPACE, K, V] by their height, the lowest first. Heads whose states have room (`fits`) take no
part: their programs do nothing.
"""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import weight
from mixassay.kernels.dla.heads_triton import load_heads
from mixassay.kernels.dla.slot_states_triton import dot, fits, state_at

TILES = tl.constexpr(8)  # of a program, or nodes: heads with states of slots, most or all, are to be done with soon

# Compiled once, whatever the sizes.
kernel = triton.jit(do_not_specialize=["T", "NT", "H", "R", "N", "NODES", "HEIGHT", "ROOM", "SPACE"])


@triton.jit
def share(count, news, H, NT, ROOM):
    """Head in all, its batch row and number; a program's first of `count` tiles (or nodes), the end, and the step."""
    parts = tl.cdiv(count, TILES)
    index = tl.program_id(0).to(tl.int64)
    head = index // parts
    last = tl.where(fits(news, head, NT, ROOM), 0, count)
    return head, head // H, head % H, (index % parts).to(tl.int32), last, parts


@triton.jit
def decay_since(end, n, P, head, NT, C: tl.constexpr, SUM: tl.constexpr):
    """Log decay from token `end`, the first of a tile, to tile n."""
    at = P + head * (NT + 1)
    return (tl.load(at + n) - tl.load(at + end // C)).to(SUM)


@kernel
def leaf_kernel(
    k,
    v,
    G,
    P,
    news,
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
    """A tile's own state at its end."""
    head, b, h, part, last, parts = share(NT, news, H, NT, ROOM)
    for n in range(part, last, parts):
        row = b * T + n * C
        left = T - n * C
        i = tl.arange(0, C)
        ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
        vs = load_heads(v, row, h, i, left, H, V, BV).to(ACC)
        if DECAY:
            at_P = P + head * (NT + 1) + n
            total = tl.load(at_P + 1) - tl.load(at_P)
            Gs = tl.load(G + head * T + n * C + i, mask=i < left, other=0.0)
            vs *= weight(total.to(Gs.dtype) - Gs, ACC)[:, None]
        S = dot(tl.trans(ks), vs, tl.zeros([BK, BV], dtype=ACC), TWICE, DOT, ACC, PREC)
        at, keep = state_at(K, V, BK, BV)
        tl.store(tree + (head * SPACE + n) * K * V + at, S, mask=keep)


@kernel
def up_kernel(
    tree,
    P,
    news,
    NT,
    HEIGHT,
    below,
    here,
    ROOM,
    SPACE,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAY: tl.constexpr,
):
    """The nodes of 2^HEIGHT tiles; `below` and `here` are where the nodes of a height begin."""
    count = NT >> HEIGHT
    index = tl.program_id(0).to(tl.int64)
    block, index = index % tl.cdiv(SIZE, BLOCK), index // tl.cdiv(SIZE, BLOCK)
    head, node = index // count, index % count
    at = block * BLOCK + tl.arange(0, BLOCK)
    keep = at < SIZE
    if not fits(news, head, NT, ROOM):
        child = tree + (head * SPACE + below + 2 * node) * SIZE + at
        S = tl.load(child, mask=keep, other=0.0)
        if DECAY:
            at_P = P + head * (NT + 1) + (2 * node + 1 << HEIGHT - 1)
            S *= weight(tl.load(at_P + (1 << HEIGHT - 1)) - tl.load(at_P), S.dtype)
        S += tl.load(child + SIZE, mask=keep, other=0.0)
        tl.store(tree + (head * SPACE + here + node) * SIZE + at, S, mask=keep)
