"""The weights of a pair of tiles, in Triton: M[t, j] = rank_scale[t, rank of j at t], and the gradient of rank_scale.

The rank of j at t is the number of slots that start behind j and up to t: in t's row of starts those behind the first
token of the tile of j, less those up to j, a running sum over the tile's tokens whose `until` is above t. A tile with
one such token has two weights a row, one without any has one.

With F[t, j] the gradient of M[t, j], that of rank_scale[t, r] is the sum of F[t, j] over the tokens j of rank r at t.
It comes from running sums of F: what lies up to the start of a slot, less what lies up to that of the next older one.

Tiles have C tokens, t those from `now` on and j those from `begin` on; r are the BS columns of tables of SLOTS ranks.
"""

import triton
import triton.language as tl


@triton.jit
def by_rank(table, row, h, i, left, r, H, SLOTS: tl.constexpr):
    """Rows of a table [tokens, H, SLOTS] (starts or rank_scale), zeros elsewhere: [i, r], or [r, i], as i and r are."""
    return tl.load(table + (row * H + h) * SLOTS + i * H * SLOTS + r, mask=(i < left) & (r < SLOTS), other=0)


@triton.jit
def inner_starts(until, row, h, i, left, H):
    """`until` of a tile's tokens but the first, with which the tile's own slot starts: 0 where no slot does."""
    return tl.load(until + (row + i) * H + h, mask=(i > 0) & (i < left), other=0)


@triton.jit
def rank_of(j, st, AXIS: tl.constexpr):
    """Of one token j, for all that have starts st."""
    return tl.sum((st > j).to(tl.int32), AXIS)


@triton.jit
def pick(x, r, rank, AXIS: tl.constexpr):
    """Each token's value at its `rank`."""
    return tl.sum(tl.where(r == tl.expand_dims(rank, AXIS), x, 0.0), AXIS)


@triton.jit
def weight_at(rank, table, row, h, i, left, H, SLOTS: tl.constexpr):
    """rank_scale of the rows i at a rank each, clamped: loads, not a sum over a table of all ranks."""
    at = table + (row * H + h) * SLOTS + i * H * SLOTS
    return tl.load(at + tl.minimum(tl.maximum(rank, 0), SLOTS - 1), mask=i < left, other=0.0)


@triton.jit
def weights_at(rank, table, row, h, i, left, H, SLOTS: tl.constexpr):
    """The same, and the steps to the weights next to it."""
    w = weight_at(rank, table, row, h, i, left, H, SLOTS)
    up = weight_at(rank + 1, table, row, h, i, left, H, SLOTS) - w
    return w, up, w - weight_at(rank - 1, table, row, h, i, left, H, SLOTS)


@triton.jit
def ranks(rank, opened, t, j, AXIS: tl.constexpr):
    """Of all pairs, from the tile's first tokens' `rank` and what `inner_starts` loaded: [t, j] along AXIS 1 or
    [j, t] along AXIS 0."""
    t, j = tl.expand_dims(t, AXIS), tl.expand_dims(j, 1 - AXIS)
    open = (tl.expand_dims(opened, 1 - AXIS) > t) & (j <= t)
    return tl.expand_dims(rank, AXIS) - tl.cumsum(open.to(tl.int32), AXIS)


@triton.jit
def inner(opened, now, C: tl.constexpr):
    """Of the starts within a tile that tokens from `now` on see: the place of the only one (C: none), and whether there
    are several."""
    found = tl.sum(tl.where(opened > now, C + tl.arange(0, C), 0))
    return tl.where(found > 0, found - C, C), found >= 2 * C


@triton.jit
def weighed(A, st, table, opened, row, h, left, now, begin, H, C: tl.constexpr, BS: tl.constexpr, SLOTS: tl.constexpr):
    """A . M, [t, j], for the weights of the rows t in `table` and st [t, r]."""
    i = tl.arange(0, C)
    rank = rank_of(begin, st, 1)
    place, several = inner(opened, now, C)
    if several:
        W = by_rank(table, row, h, i[:, None], left, tl.arange(0, BS)[None, :], H, SLOTS)
        AM = A * tl.gather(W, ranks(rank, opened, now + i, begin + i, 1), 1)
    else:
        w = weight_at(rank, table, row, h, i, left, H, SLOTS)
        newer = weight_at(rank - (tl.max(opened) > now + i).to(tl.int32), table, row, h, i, left, H, SLOTS)
        AM = A * tl.where(i[None, :] >= place, newer[:, None], w[:, None])  # not M alone: so it lies as A does
    return AM


@triton.jit
def _running(F, st, begin, C: tl.constexpr):
    upto = tl.minimum(st - begin, C)
    sums = tl.gather(tl.cumsum(F, 1), tl.maximum(upto - 1, 0), 1)
    return tl.where(upto > 0, sums, 0.0)


@triton.jit
def up_to_starts(F, st, opened, now, begin, C: tl.constexpr):
    """Of F [t, j], for each t and r the sum over the tokens j before the start of t's slot of rank r; st [t, r]."""
    place, several = inner(opened, now, C)
    if several:
        before = _running(F, st, begin, C)
    else:
        some = tl.sum(tl.where(tl.arange(0, C)[None, :] < place, F, 0.0), 1)
        before = tl.where(st >= begin + C, tl.sum(F, 1)[:, None], tl.where(st > begin, some[:, None], 0.0))
    return before


@triton.jit
def by_slot(before, total, C: tl.constexpr, BS: tl.constexpr):
    """What lies within each slot [t, r], of what lies `before` it in the whole past, and that past's `total` [t]."""
    r = tl.arange(0, BS)
    newer = tl.gather(before, tl.zeros([C, BS], dtype=tl.int32) + tl.maximum(r - 1, 0)[None, :], 1)
    return tl.where(r[None, :] > 0, newer, total[:, None]) - before


# Of a tile with itself, where one slot at most starts behind the first token and stays: what is before it has rank 1 at
# the tokens t that find it open, all else rank 0. No table of all ranks is needed.


@triton.jit
def _opened_at(opened, place, now, C: tl.constexpr):
    """Whether that slot has started at t and has not met another."""
    i = tl.arange(0, C)
    return (i >= place) & (tl.max(opened) > now + i)


@triton.jit
def own_weighed(A, starts, table, opened, row, h, left, now, H, C: tl.constexpr, BS: tl.constexpr, SLOTS: tl.constexpr):
    """A . M, [t, j]."""
    i = tl.arange(0, C)
    r = tl.arange(0, BS)[None, :]
    place, several = inner(opened, now, C)
    open = _opened_at(opened, place, now, C)
    if several:
        rank = rank_of(now, by_rank(starts, row, h, i[:, None], left, r, H, SLOTS), 1)
        W = by_rank(table, row, h, i[:, None], left, r, H, SLOTS)
        AM = A * tl.gather(W, ranks(rank, opened, now + i, now + i, 1), 1)
    else:
        newest = weight_at(i * 0, table, row, h, i, left, H, SLOTS)
        older = weight_at(open.to(tl.int32), table, row, h, i, left, H, SLOTS)
        AM = A * tl.where(i[None, :] >= place, newest[:, None], older[:, None])
    return AM


@triton.jit
def own_sums(F, starts, opened, row, h, left, now, H, C: tl.constexpr, BS: tl.constexpr, SLOTS: tl.constexpr):
    """Of F [t, j], for each t and rank the sum over the tokens j of that rank at t."""
    i = tl.arange(0, C)
    r = tl.arange(0, BS)[None, :]
    place, several = inner(opened, now, C)
    open = _opened_at(opened, place, now, C)
    total = tl.sum(F, 1)
    if several:
        st = by_rank(starts, row, h, i[:, None], left, r, H, SLOTS)
        sums = by_slot(_running(F, st, now, C), total, C, BS)
    else:
        older = tl.where(open, tl.sum(tl.where(i[None, :] < place, F, 0.0), 1), 0.0)
        sums = tl.where(r == 0, (total - older)[:, None], tl.where(r == 1, older[:, None], 0.0))
    return sums


@triton.jit
def own_columns(
    A, dA, F, starts, table, opened, row, h, left, now, H,
    C: tl.constexpr, BS: tl.constexpr, SLOTS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """A . M and dA . M, [j, t], and the sums over t of F . M and, with a gate, of F times the steps to the weights up
    and down."""
    i = tl.arange(0, C)
    r = tl.arange(0, BS)[:, None]
    place, several = inner(opened, now, C)
    open = _opened_at(opened, place, now, C)
    up = tl.zeros([C], dtype=F.dtype)
    down = tl.zeros([C], dtype=F.dtype)
    if several:
        rank = rank_of(now, by_rank(starts, row, h, i[None, :], left, r, H, SLOTS), 0)
        W = by_rank(table, row, h, i[None, :], left, r, H, SLOTS)
        each = ranks(rank, opened, now + i, now + i, 0)
        M = tl.gather(W, each, 0)
        if GATE:
            up = tl.sum(F * (tl.gather(W, tl.minimum(each + 1, SLOTS - 1), 0) - M), 1)
            down = tl.sum(F * (M - tl.gather(W, tl.maximum(each - 1, 0), 0)), 1)
        AM, dAM, column = A * M, dA * M, tl.sum(F * M, 1)
    else:
        newest, newest_up, _ = weights_at(i * 0, table, row, h, i, left, H, SLOTS)
        w, w_up, w_down = weights_at(open.to(tl.int32), table, row, h, i, left, H, SLOTS)
        within = i[:, None] >= place
        if GATE:
            up = tl.sum(F * tl.where(within, newest_up[None, :], w_up[None, :]), 1)
            down = tl.sum(tl.where(within, 0.0, F * w_down[None, :]), 1)
        M = tl.where(within, newest[None, :], w[None, :])
        AM, dAM, column = A * M, dA * M, tl.sum(F * M, 1)
    return AM, dAM, column, up, down
