"""The mask of a short sequence as a matrix, and the gradient of what it is made of, in Triton.

With W = rank_scale, G the inclusive cumulative log decay and j <= t (else 0),

    M[t, j] = W[t, rank of j at t] e^{G_t - G_j}

From E[t, j], the gradient of M[t, j], come with F[t, j] = E[t, j] e^{G_t - G_j}

    dW[t, r] = sum of F[t, j] over the tokens j of rank r at t
    u = row sums less column sums of F[t, j] W[t, rank]; with a gate, of F up and F down, the steps to the weights next
    dlog_decay_i, dgate_i = sums of u_t over t >= i; which gate takes what: straight_through.py

A thread has some rows t and walks back over j: the rank is 0 at t and rises behind each token with which a slot starts
(those whose `until` is above t). That is 20 to 50 instructions for a number of either matrix; in a tile of a product,
whose rows are spread over threads, it takes running sums and gathers. Both matrices have t innermost, [heads, side (j),
side (t)]: neighbouring threads read and write side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import LOG2_E, WEAKEST


@triton.jit
def _rows(first, T, H, side, ROWS: tl.constexpr):
    """A program's block of rows, most work first: head in all, its first token in [B, T, H], where its matrix begins in
    a buffer of the heads from `first` on, the block, and its tokens."""
    index = tl.program_id(0).to(tl.int64)
    blocks = side // ROWS
    head = first + index // blocks
    block = (blocks - 1 - index % blocks).to(tl.int32)
    # A thread's rows are not to be neighbours: what is loaded one by one and what is stored together then lie alike.
    t = tl.max_contiguous(block * ROWS + tl.arange(0, ROWS), 1)
    return head, head // H * T * H + head % H, index // blocks * side * side, block, t


@triton.jit
def _decayed(D, log_decay, at, j, t, T, DECAY: tl.constexpr, DIAGONAL: tl.constexpr):
    """The decays of the tokens behind j."""
    if DECAY:
        g = tl.maximum(tl.load(log_decay + at, mask=j < T, other=0.0), WEAKEST).to(D.dtype)
        a = tl.exp2(g * LOG2_E)
        D *= tl.where(j <= t, a, 1.0) if DIAGONAL else a
    return D


@triton.jit
def _mask_row(M, weights, until, log_decay, state, at, j, t, first, T, DECAY: tl.constexpr, DIAGONAL: tl.constexpr):
    """`state`: where the row's weight is, the weight, and the decay."""
    here, w, D = state
    m = w * D if DECAY else w
    if DIAGONAL:
        m = tl.where(j <= t, m, 0.0)
    tl.store(M + t, m.to(M.dtype.element_ty))
    D = _decayed(D, log_decay, at, j, t, T, DECAY, DIAGONAL)
    last = tl.load(until + at, mask=(j < T) & (j > 0), other=0)
    if last > first:
        starts = (last > t) & (j <= t) if DIAGONAL else last > t
        here += starts.to(tl.int32)
        w = tl.load(weights + here, mask=starts, other=w)
    return here, w, D


@triton.jit(do_not_specialize=["first", "T", "H"])
def mask_kernel(
    rank_scale,  # [B, T, H, SLOTS]
    until,  # [B, T, H]
    log_decay,
    M,
    first,
    T,
    H,
    side,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    DECAY: tl.constexpr,
):
    _, begin, matrix, block, t = _rows(first, T, H, side, ROWS)
    weights = rank_scale + begin * SLOTS
    here = t * (H * SLOTS)
    w = tl.load(weights + here, mask=t < T, other=0.0)
    state = (here, w, tl.full([ROWS], 1.0, dtype=w.dtype))
    j = block * ROWS + ROWS
    M += matrix + j.to(tl.int64) * side
    at = begin + j * H
    for part in tl.static_range(2):  # the block's own tokens, then those before
        for _ in range(block * ROWS if part else ROWS):
            j -= 1
            at -= H
            M -= side
            state = _mask_row(M, weights, until, log_decay, state, at, j, t, block * ROWS, T, DECAY, part == 0)


@triton.jit
def _rank_row(
    f, weights, drank_scale, until, log_decay, columns, more, state, last, at, j, t, first, T,
    DECAY: tl.constexpr, GATE: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """`state`: where the row's weight is, the weight, the next older one's, the step from the next newer one's, the
    decay, the sum of F since the slot's end, and the row's three sums."""
    here, w, older, down, D, inside, u, u_up, u_down = state
    if DECAY:
        f *= D
        x = f * w
        u += x
        tl.store(columns, tl.sum(x))
    inside += f
    up = older - w
    if GATE:
        x = f * up
        u_up += x
        tl.store(columns + more, tl.sum(x))
        x = f * down
        u_down += x
        tl.store(columns + 2 * more, tl.sum(x))
    D = _decayed(D, log_decay, at, j, t, T, DECAY, DIAGONAL)
    until_j = tl.load(until + at, mask=j < T, other=0)
    if until_j > first:
        starts = (until_j > t) & (j <= t) if DIAGONAL else until_j > t
        tl.store(drank_scale + here, inside, mask=starts)
        inside = tl.where(starts, 0.0, inside)
        here += starts.to(tl.int32)
        if DECAY or GATE:
            w = tl.where(starts, older, w)
            older = tl.load(weights + tl.minimum(here + 1, last), mask=starts, other=older)
        if GATE:
            down = tl.where(starts, up, down)
    return here, w, older, down, D, inside, u, u_up, u_down


@triton.jit(do_not_specialize=["first", "T", "H", "N"])
def rank_kernel(
    E,
    rank_scale,
    until,
    log_decay,
    drank_scale,  # zeros on entry
    u,  # [3 or 1, B H, T]: row sums
    columns,  # [3 or 1, B H, side / ROWS, side]: column sums of each block of rows
    first,
    T,
    H,
    N,
    side,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    DECAY: tl.constexpr,
    GATE: tl.constexpr,
):
    head, begin, matrix, block, t = _rows(first, T, H, side, ROWS)
    weights = rank_scale + begin * SLOTS
    drank_scale += begin * SLOTS
    here = t * (H * SLOTS)
    last = here + SLOTS - 1
    w = tl.load(weights + here, mask=t < T, other=0.0)
    older = tl.load(weights + tl.minimum(here + 1, last), mask=t < T, other=0.0)
    zero = tl.zeros_like(w)
    state = (here, w, older, zero, zero + 1.0, zero, zero, zero, zero)
    j = block * ROWS + ROWS
    E += matrix + j.to(tl.int64) * side
    at = begin + j * H
    blocks = side // ROWS
    more = N.to(tl.int64) * blocks * side
    columns += (head * blocks + block) * side + j
    f = tl.load(E - side + t, mask=(j - 1 <= t) & (t < T), other=0.0)
    for part in tl.static_range(2):  # the block's own tokens, then those before
        for _ in range(block * ROWS if part else ROWS):
            j -= 1
            at -= H
            E -= side
            columns -= 1
            ahead = tl.load(E - side + t, mask=(j - 1 <= t) & (t < T) & (j > 0), other=0.0)  # does not wait
            state = _rank_row(
                f, weights, drank_scale, until, log_decay, columns, more, state, last, at, j, t, block * ROWS, T,
                DECAY, GATE, part == 0,
            )  # fmt: skip
            f = ahead
    u += head * T + t
    if DECAY:
        tl.store(u, state[6], mask=t < T)
    if GATE:
        tl.store(u + N.to(tl.int64) * T, state[7], mask=t < T)
        tl.store(u + 2 * N.to(tl.int64) * T, state[8], mask=t < T)


@triton.jit
def _less_columns(x, columns, first, t, T, blocks, side, ROWS: tl.constexpr):
    """Row sums x less the column sums of all blocks of rows that have any."""
    if columns is not None:
        for block in range(blocks):
            at = first + block * side + t
            x -= tl.load(columns + at, mask=(t < T) & (t < (block + 1) * ROWS), other=0.0)
    return x.to(tl.float64)


@triton.jit(do_not_specialize=["T", "H", "N", "blocks"])
def sum_kernel(
    u, columns, log_decay, until, dg, dgate, T, H, N, blocks, side,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DECAY: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Sums from each token to the end."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    i = tl.arange(0, BLOCK)
    each = N.to(tl.int64) * T
    more = N.to(tl.int64) * blocks * side
    first = head * blocks * side
    last = (T - 1) // BLOCK * BLOCK
    behind = tl.zeros([], dtype=tl.float64)
    behind_up = tl.zeros([], dtype=tl.float64)
    behind_down = tl.zeros([], dtype=tl.float64)
    for step in range(0, T, BLOCK):
        t = last - step + i
        at = u + head * T + t
        to = (b * T + t) * H + h
        if DECAY:
            x = _less_columns(tl.load(at, mask=t < T, other=0.0), columns, first, t, T, blocks, side, ROWS)
            total = tl.sum(x)
            raw = tl.load(log_decay + to, mask=t < T, other=0.0)
            tl.store(dg + to, tl.where(raw < WEAKEST, 0.0, behind + total - tl.cumsum(x) + x), mask=t < T)
            behind += total
        if GATE:
            x = tl.load(at + each, mask=t < T, other=0.0)
            x = _less_columns(x, columns, first + more, t, T, blocks, side, ROWS)
            total = tl.sum(x)
            up = behind_up + total - tl.cumsum(x) + x
            behind_up += total
            x = tl.load(at + 2 * each, mask=t < T, other=0.0)
            x = _less_columns(x, columns, first + 2 * more, t, T, blocks, side, ROWS)
            total = tl.sum(x)
            down = behind_down + total - tl.cumsum(x) + x
            behind_down += total
            opens = tl.load(until + to, mask=t < T, other=0) != 0
            tl.store(dgate + to, tl.where(opens, down, up), mask=t < T)


def sums(
    u: Tensor, columns: Tensor | None, log_decay: Tensor | None, until: Tensor, gated: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of log_decay and gate [B, T, H], None where there is none, from row sums u [3 or 1, B H, T] and the
    column sums [3 or 1, B H, blocks, side], None where u has them subtracted."""
    B, T, H = until.shape
    dg = None if log_decay is None else torch.empty_like(log_decay)
    dgate = u.new_empty(until.shape) if gated else None
    if dg is not None or gated:
        blocks, side = (0, 0) if columns is None else columns.shape[2:]
        options = {"ROWS": side // max(1, blocks), "BLOCK": min(1024, triton.next_power_of_2(T)), "num_warps": 4}
        options |= {"DECAY": dg is not None, "GATE": gated}
        sum_kernel[(B * H,)](u, columns, log_decay, until, dg, dgate, T, H, B * H, blocks, side, **options)
    return dg, dgate
