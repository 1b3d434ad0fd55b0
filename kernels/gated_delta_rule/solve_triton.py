"""What the gated delta rule's chunks are before any state is known, in Triton: of all chunks at once

    G  the inclusive cumulative log decay, in base 2
    A  = strictly lower part of (b K K^T) . Gam             M  = (I + A)^-1

with the names of triton.py. Other operators that solve such a system take M from here.
"""

import torch
import triton
import triton.language as tl

from mixassay.kernels.common.triton import half, load_log_decay, load_rows, operands, store_rows, weight

# Compiled once, whatever the sizes: offsets are multiples of K and V, which are known.
kernel = triton.jit(do_not_specialize=["rows", "T", "length", "P", "H", "R"])


@triton.jit
def chunk_decay(at, i, live, C: tl.constexpr):
    """Base-2 log decay up to each row of a chunk (dead rows: up to the last live one), and over the whole chunk."""
    total = tl.load(at + tl.minimum(live, C) - 1)
    return tl.where(i < live, tl.load(at + i, mask=i < live, other=0.0), total), total


@triton.jit
def chunk_of(index, table, T, length, P, PACKED: tl.constexpr):
    """`segment_of` for programs too short for its wide division: first row, live rows, and sequence (packed: 0)."""
    if PACKED:
        sequence = 0
        first = tl.load(table + 3 * index)
        live = (tl.load(table + 3 * index + 1) - first).to(tl.int32)
    else:
        sequence = index // P
        first = sequence.to(tl.int64) * T + (index % P).to(tl.int64) * length
        live = tl.minimum(length, T - index % P * length)
    return first, live, sequence


@kernel
def solve_kernel(
    k,
    beta,
    g,
    M,  # [rows, H, C]
    G,  # [B, H, T], base 2
    table,
    T,
    length,
    P,
    H,
    R,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    DECAY: tl.constexpr,
    PACKED: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    SUM: tl.constexpr,
    PREC: tl.constexpr,
    EXACT: tl.constexpr,
):
    """M of one chunk, in blocks of 16 x 16: first those on the diagonal, then block rows from the blocks above.

    A diagonal block is inverted by doubling: with D the inverse of its blocks of n x n and L what of A lies in its
    blocks of 2 n x 2 n but not in those, the inverse of the latter is D - D L D.
    """
    N: tl.constexpr = C // 16
    index = tl.program_id(0)
    h = (index % H).to(tl.int64)
    first, live, sequence = chunk_of(index // H, table, T, length, P, PACKED)
    if live > 0:
        i = tl.arange(0, 16)
        kk = tl.arange(0, BK)
        keys = (H // R) * K
        at_key = k + first * keys + (h // R) * K
        at_M = M + (first * H + h) * C
        at_G = G + (sequence * (H - 1) + h) * T + first
        bs = ()
        gs = ()
        for a in tl.static_range(N):
            bs += (tl.load(beta + (first + 16 * a + i) * H + h, mask=16 * a + i < live, other=0.0).to(ACC),)
            if DECAY:
                gs += (load_log_decay(g + first * H + h, 16 * a + i, live, H, SUM),)
            else:
                gs += (tl.zeros([16], dtype=SUM),)
        As = ()  # blocks (0, 0), (1, 0), (1, 1), (2, 0), ...
        for start in tl.static_range(0, K, BK):
            ks = ()
            for a in tl.static_range(N):
                ks += (load_rows(at_key, 16 * a + i, live, start + kk, keys, K, BK).to(DOT),)
            sums = ()
            for a in tl.static_range(N):
                for c in tl.static_range(a + 1):
                    before = As[a * (a + 1) // 2 + c] if start > 0 else tl.zeros([16, 16], dtype=ACC)
                    sums += (tl.dot(ks[a], tl.trans(ks[c]), acc=before, input_precision=PREC, out_dtype=ACC),)
            As = sums
        Gs = ()
        total = tl.zeros([], dtype=SUM)
        for a in tl.static_range(N):
            Gs += (total + tl.cumsum(gs[a]),)
            total += tl.sum(gs[a])
            tl.store(at_G + 16 * a + i, Gs[a], mask=16 * a + i < live)
        Ls = ()
        Ds = ()
        for a in tl.static_range(N):
            for c in tl.static_range(a + 1):
                L = As[a * (a + 1) // 2 + c] * (bs[a][:, None] * weight(Gs[a][:, None] - Gs[c][None, :], ACC))
                Ls += (L,)
            pair = (i[:, None] > i[None, :]) & (i[:, None] // 2 == i[None, :] // 2)
            D = tl.where(i[:, None] == i[None, :], 1.0, tl.where(pair, -Ls[a * (a + 1) // 2 + a], 0.0))
            Ds += (D.to(ACC),)
        for level in tl.static_range(1, 4):
            between = (i[:, None] > i[None, :]) & ((i[:, None] >> level) ^ (i[None, :] >> level) == 1)
            LDs = ()
            for a in tl.static_range(N):
                L = tl.where(between, Ls[a * (a + 1) // 2 + a], 0.0)
                LDs += (tl.dot(L, Ds[a], input_precision=EXACT, out_dtype=ACC),)
            doubled = ()
            for a in tl.static_range(N):
                doubled += (Ds[a] - tl.dot(Ds[a], LDs[a], input_precision=EXACT, out_dtype=ACC),)
            Ds = doubled
        Ms = ()
        for a in tl.static_range(N):
            row = 16 * a + i
            for c in tl.static_range(a):
                below = tl.zeros([16, 16], dtype=ACC)
                for d in tl.static_range(c, a):
                    L = Ls[a * (a + 1) // 2 + d]
                    below = tl.dot(L, Ms[d * (d + 1) // 2 + c], acc=below, input_precision=EXACT, out_dtype=ACC)
                Ms += (-tl.dot(Ds[a], below, input_precision=EXACT, out_dtype=ACC),)
            Ms += (Ds[a],)
            for c in tl.static_range(N):
                block = Ms[a * (a + 1) // 2 + c] if c <= a else tl.zeros([16, 16], dtype=ACC)
                store_rows(at_M, block, row, live, 16 * c + i, H * C, C, 16)


def precision(dtype: torch.dtype, K: int) -> str:
    """Of the products. Twice as wide operands of tensor cores, and keys wider than 128, are too much for a chunk."""
    return "ieee" if K > 128 else operands(dtype)[2]


def inverse_precision(dtype: torch.dtype, K: int) -> str:
    """Of the products that make M, which is kept in the inputs' dtype."""
    return "tf32" if half(dtype) else precision(dtype, K)
