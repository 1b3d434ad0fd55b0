"""Bias and bound of one cut of one sequence. Queries are keys of stored tokens at unit norm, each token once.

Per token means: divided by sum_t |u_t|, which is the number of tokens where these have unit norm. A bias of one token
is divided by the mean of |u_t|.
"""

from collections.abc import Sequence
from math import log, nan
from typing import NamedTuple

import torch
from torch import Tensor

ZERO = 1e-6
"""A bound per token below this is the rounding of zero."""

QUERIES = 64  # at a time: what fits a core's cache


class Questions(NamedTuple):
    """For a sequence of writes: what asks for each of them, and the right answer."""

    query: Tensor  # [T, K]
    key: Tensor  # int64 [T], which key was written
    value: Tensor  # int64 [T], and the answer: its place among the last `values` of v
    values: int

    def upto(self, end: int) -> "Questions":
        return Questions(self.query[:end], self.key[:end], self.value[:end], self.values)


class Tokens(NamedTuple):
    """A sequence of T tokens, float64, and what is known about it."""

    k: Tensor  # [T, K]
    v: Tensor  # [T, V]
    segment: Tensor  # int64 [T], the true segment
    needle: Tensor  # bool [T], tokens that are unrelated to their segment
    questions: Questions | None = None

    def upto(self, end: int) -> "Tokens":
        asked = self.questions.upto(end) if self.questions is not None else None
        return Tokens(self.k[:end], self.v[:end], self.segment[:end], self.needle[:end], asked)


class Blocks:
    """The blocks of a cut, by their first tokens (ascending, the first is 0)."""

    def __init__(self, tokens: Tokens, starts: Sequence[int]) -> None:
        k, v, T = tokens.k, tokens.v, len(tokens.k)
        self.n = torch.tensor([*starts, T]).diff()
        self.of = torch.repeat_interleave(torch.arange(len(starts)), self.n)  # [T], the block of each token
        u = k[:, :, None] * v[:, None]  # [T, K, V]
        means = torch.zeros(len(starts), *u.shape[1:], dtype=u.dtype).index_add_(0, self.of, u)
        self.means = means / self.n[:, None, None]
        self.residual = u - self.means[self.of]
        sse = torch.zeros(len(starts), dtype=u.dtype).index_add_(0, self.of, self.residual.square().sum((1, 2)))
        self.bound = float((self.n * sse).sqrt().sum())
        self.mass = float((k.norm(dim=1) * v.norm(dim=1)).sum())


def measure(tokens: Tokens, starts: Sequence[int]) -> dict[str, float]:
    """All per token, |q| = 1; NaN where there is nothing to measure.

    bound: B. worst: D1, mean over queries. segment_bias: of reading exactly the segment of the query's token.
    token_bias: of reading that token alone. The two with _recent: queries of log-uniform age instead of any.
    needle_bias: token_bias of needles. ratio: the largest D1 or segment_bias over B.
    """
    k, v, segment, needle, _ = tokens
    blocks, T = Blocks(tokens, starts), len(k)
    q = k / k.norm(dim=1, keepdim=True).clamp(min=1e-300)
    worst = torch.cat([_worst(q[i : i + QUERIES], k, v, blocks) for i in range(0, T, QUERIES)])
    single = torch.einsum("tk,tkv->tv", q, blocks.residual).norm(dim=1)
    left = torch.zeros(int(segment.max()) + 1, *blocks.means.shape[1:], dtype=k.dtype)
    left.index_add_(0, segment, blocks.residual)  # sum_{t in segment} (u_t - mean): block means of w drop out
    whole = torch.einsum("tk,tkv->tv", q, left[segment]).norm(dim=1)
    age = torch.arange(T, 0, -1, dtype=k.dtype)
    recent = ((age + 1) / age).log() / log(T) if T > 1 else torch.ones(1, dtype=k.dtype)
    recent[0] *= T == 1  # ages 1 .. T - 1 make one
    B, size = blocks.bound, blocks.mass / T
    return {
        "bound": B / blocks.mass,
        "worst": float(worst.mean()) / blocks.mass,
        "segment_bias": float(whole.mean()) / blocks.mass,
        "segment_bias_recent": float(recent @ whole) / blocks.mass,
        "token_bias": float(single.mean()) / size,
        "token_bias_recent": float(recent @ single) / size,
        "needle_bias": float(single[needle].mean()) / size if bool(needle.any()) else nan,
        "ratio": float(torch.maximum(worst, whole).max()) / B if B / blocks.mass > ZERO else nan,
    }


def _worst(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> Tensor:
    """sum_t |q^T (u_t - mean u)| of queries [N, K]: [N]."""
    reads = (q @ k.T)[:, :, None] * v  # [N, T, V]
    reads -= torch.einsum("nk,mkv->nmv", q, blocks.means)[:, blocks.of]
    lengths: Tensor = torch.linalg.vector_norm(reads, dim=2)
    return lengths.sum(1)


def answers(tokens: Tokens, starts: Sequence[int]) -> dict[str, float]:
    """Shares of all writes, read from the slot that holds them: answered_any right, answered_open of those of the last
    segment, answered_stale with a value that the key has elsewhere."""
    assert tokens.questions is not None
    query, key, value, values = tokens.questions
    blocks = Blocks(tokens, starts)
    sums = blocks.means * blocks.n[:, None, None]
    answer = torch.einsum("tk,tkv->tv", query, sums[blocks.of])[:, -values:].argmax(1)
    right = answer == value
    written = (key[:, None] == key) & (answer[:, None] == value)  # [question, write]
    return {
        "answered_any": float(right.double().mean()),
        "answered_open": float(right[tokens.segment == tokens.segment[-1]].double().mean()),
        "answered_stale": float((~right & written.any(1)).double().mean()),
    }


def bound(tokens: Tokens, starts: Sequence[int]) -> float:
    """B alone, per token."""
    blocks = Blocks(tokens, starts)
    return blocks.bound / blocks.mass


def boundary_match(found: Sequence[int], true: Sequence[int], tolerance: int) -> dict[str, float]:
    """Precision, recall and F1 of block starts other than 0. Found ones take, in order, the nearest true one that is
    within the tolerance and not taken."""
    free = [t for t in true if t > 0]
    asked, total, hits = [t for t in found if t > 0], len(free), 0
    for start in asked:
        near = [t for t in free if abs(t - start) <= tolerance]
        if near:
            free.remove(min(near, key=lambda t: abs(t - start)))
            hits += 1
    return {
        "precision": hits / max(1, len(asked)),
        "recall": hits / max(1, total),
        "f1": 2 * hits / max(1, len(asked) + total),
    }
