"""Sums over equal words in Triton: the gradient of a table whose rows were looked up.

    S[v] = sum of g[t] over the tokens t whose word is v

Floats added as they come would give other bits in every run, and to sort the tokens first takes longer than to add. So
every term is cut to a multiple of 2^-k and added as an integer, which is exact and the same in any order. k is the
largest for which N terms like the largest cannot overflow 63 bits, k = 61 - ceil(log2 N) - floor(log2 max |g|): a term
keeps all bits down to 2^(ceil(log2 N) - 62) of the largest, 2^-45 for 100,000 tokens, where float32 ends at 2^-24.

A table that has a term which is not finite is NaN throughout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.norm.triton import Shares, scope

BLOCK = 1024  # numbers that a program reads back
INFINITE = tl.constexpr(128)  # exponent of a float32 that is infinite or NaN


@triton.jit
def magnitude(g):
    """|g|, infinite for NaN too, which a maximum may drop."""
    size = tl.abs(g)
    return tl.where(size < float("inf"), size, float("inf"))


@triton.jit
def raise_peak(peaks, member, most):
    """Makes a member's peak `most`, if that is larger: as bits, floats that are not negative compare like integers."""
    tl.atomic_max(peaks + member, most.to(tl.float32).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def exponents(peaks, member, log_tokens):
    """floor(log2) of a member's peak, and k."""
    top = (tl.load(peaks + member) >> 23) - 127
    return top, tl.minimum(61 - log_tokens - top, 126)


@triton.jit
def power(k):
    """2^k, float32, for k from -126 to 127."""
    return ((127 + k) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens", "share", "programs", "log_tokens"])
def add_kernel(
    g, ids, peaks, totals, tokens, share, programs, log_tokens, V,
    N: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first, last, _, member = scope(tokens, share, programs, 1)
    column = tl.arange(0, BN)[None, :]
    top, k = exponents(peaks, member, log_tokens)
    if top < INFINITE:
        unit = power(k).to(g.dtype.element_ty)
        for token in range(first, last, BR):
            rows = token + tl.arange(0, BR)
            live = (rows < last)[:, None] & (column < N)
            word = member * V + tl.load(ids + rows, mask=rows < last, other=0)
            term = tl.load(g + rows[:, None] * N + column, mask=live, other=0.0) * unit
            tl.atomic_add(totals + word[:, None] * N + column, term.to(tl.int64), mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["size", "log_tokens"])
def read_kernel(totals, peaks, found, size, log_tokens, BLOCK: tl.constexpr):
    member = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top, k = exponents(peaks, member, log_tokens)
    total = tl.load(totals + member * size + at, mask=at < size, other=0).to(found.dtype.element_ty)
    total *= power(-k).to(found.dtype.element_ty)
    tl.store(found + member * size + at, tl.where(top < INFINITE, total, float("nan")), mask=at < size)


def sums(g: Tensor, tokens: Tensor, peaks: Tensor, V: int, how: Shares) -> Tensor:
    """[M, V, D], for g [M, B, T, D], tokens int64 [M, B, T] and peaks int32 [M], the bits of each member's largest
    `magnitude`."""
    M, D = len(g), g.shape[-1]
    totals, found = g.new_zeros((M, V, D), dtype=torch.int64), g.new_empty((M, V, D))
    log_tokens = (how.tokens - 1).bit_length()
    add_kernel[(M * how.programs,)](
        g, tokens, peaks, totals, how.tokens, how.share, how.programs, log_tokens, V,
        N=D, BR=how.rows, BN=how.width, num_warps=how.warps,
    )  # fmt: skip
    read_kernel[(triton.cdiv(V * D, BLOCK), M)](totals, peaks, found, V * D, log_tokens, BLOCK=BLOCK)
    return found
