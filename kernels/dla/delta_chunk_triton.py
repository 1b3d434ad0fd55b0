"""What the delta rule leaves to one chunk alone, in Triton: before its pairs with other chunks, and after them.

With the names of delta_triton.py and N = (I + strictly lower part of b K K^T)^-1 of the chunk, pairs need of it
(`chunk_kernel`)

    P = (lower part of Q K^T) N    U = N^T K

and give back dP, dU, dY, d(bK) and d(bV) (`delta_pairs_triton.py`), of which `gradients_kernel` makes

    dA = lower part of dP N^T      dL = - strictly lower part of (P^T dP + U dU^T) N^T
    dQ = dY + dA K                 dbK = d(bK) - P^T dY + dL K
    dK = b dbK + dA^T Q + dL^T bK + N dU             db = dbK . K + d(bV) . V, summed over columns
"""

import triton
import triton.language as tl

from mixassay.kernels.dla.heads_triton import load_heads, store_heads

kernel = triton.jit(do_not_specialize=["first", "T", "NT", "H", "R"])


@triton.jit
def chunk_of(first, T, H, NT, C: tl.constexpr):
    """A program's head, counted from `first` on and in its row, its sequence's first token, and its chunk: the last
    ones, which have most to read, come first."""
    index = tl.program_id(0).to(tl.int64)
    head = index // NT
    n = (NT - 1 - index % NT).to(tl.int32)
    return head, (first + head) % H, (first + head) // H * T, n


@triton.jit
def strengths(beta, row, h, i, left, H, ACC: tl.constexpr):
    return tl.load(beta + (row + i) * H + h, mask=i < left, other=0.0).to(ACC)


@kernel
def chunk_kernel(
    q,
    k,
    inverse,  # N  [B, T, H, C]
    scores,  # P  [B, T, H, C]
    keys,  # U  [B, T, H, K]
    first,
    T,
    NT,
    H,
    R,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """What a chunk's queries read of its own tokens, and its keys as of its end."""
    _, h, row, n = chunk_of(first, T, H, NT, C)
    row += n * C
    left = T - n * C
    i = tl.arange(0, C)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
    N = load_heads(inverse, row, h, i, left, H, C, C)
    A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
    A = tl.where(i[:, None] >= i[None, :], A, 0.0).to(DOT)
    store_heads(scores, tl.dot(A, N, input_precision=PREC, out_dtype=ACC), row, h, i, left, H, C, C)
    store_heads(keys, tl.dot(tl.trans(N), ks, input_precision=PREC, out_dtype=ACC), row, h, i, left, H, K, BK)


@kernel
def gradients_kernel(
    q,
    k,
    beta,
    inverse,
    scores,
    keys,
    dscores,
    dy,
    dkeys,
    dbk,
    dq,  # [B, T, H, K]
    dk,
    dbeta,  # of b V on entry, whole on return
    first,
    T,
    NT,
    H,
    R,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """What is left to one chunk alone: gradients of its queries, keys and strengths."""
    _, h, row, n = chunk_of(first, T, H, NT, C)
    row += n * C
    left = T - n * C
    i = tl.arange(0, C)
    lower = i[:, None] >= i[None, :]
    upper = i[:, None] <= i[None, :]
    off = i[:, None] != i[None, :]
    N = load_heads(inverse, row, h, i, left, H, C, C)
    P = load_heads(scores, row, h, i, left, H, C, C)
    dP = load_heads(dscores, row, h, i, left, H, C, C)
    us = load_heads(keys, row, h, i, left, H, K, BK)
    dus = load_heads(dkeys, row, h, i, left, H, K, BK)
    ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
    bs = strengths(beta, row, h, i, left, H, ACC)

    x = tl.dot(tl.trans(P), dP, input_precision=PREC, out_dtype=ACC)
    x = tl.dot(us, tl.trans(dus), acc=x, input_precision=PREC, out_dtype=ACC).to(DOT)
    x = tl.dot(x, tl.trans(N), input_precision=PREC, out_dtype=ACC)
    dL = tl.where(lower & off, -x, 0.0).to(DOT)
    dys = load_heads(dy, row, h, i, left, H, K, BK)
    dbK = load_heads(dbk, row, h, i, left, H, K, BK).to(ACC)
    dbK = tl.dot(dL, ks, acc=dbK, input_precision=PREC, out_dtype=ACC)
    dbK -= tl.dot(tl.trans(P), dys, input_precision=PREC, out_dtype=ACC)
    at = dbeta + (row + i) * H + h
    tl.store(at, tl.load(at, mask=i < left, other=0.0) + tl.sum(dbK * ks.to(ACC), 1), mask=i < left)
    dks = tl.dot(N, dus, acc=dbK * bs[:, None], input_precision=PREC, out_dtype=ACC)

    x = tl.dot(tl.trans(dP), P, input_precision=PREC, out_dtype=ACC)
    x = tl.dot(dus, tl.trans(us), acc=x, input_precision=PREC, out_dtype=ACC).to(DOT)
    x = tl.dot(N, x, input_precision=PREC, out_dtype=ACC)
    dL = tl.where(upper & off, -x * bs[None, :], 0.0).to(DOT)  # transposed, with the b of bK
    dks = tl.dot(dL, ks, acc=dks, input_precision=PREC, out_dtype=ACC)

    dA = tl.dot(dP, tl.trans(N), input_precision=PREC, out_dtype=ACC)
    dA = tl.where(lower, dA, 0.0).to(DOT)
    dqs = tl.dot(dA, ks, acc=dys.to(ACC), input_precision=PREC, out_dtype=ACC)
    store_heads(dq, dqs, row, h, i, left, H, K, BK)
    dA = tl.dot(N, tl.trans(dP), input_precision=PREC, out_dtype=ACC)
    dA = tl.where(upper, dA, 0.0).to(DOT)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    dks = tl.dot(dA, qs, acc=dks, input_precision=PREC, out_dtype=ACC)
    store_heads(dk, dks, row, h, i, left, H, K, BK)
