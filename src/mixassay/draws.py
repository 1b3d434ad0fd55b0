"""Stateless random numbers: Philox4x32-10 (Salmon et al., SC'11), written in torch integer operations.

A draw is a pure function of (key, counter), so a row of data, a permutation or a dropout mask is the same bits on
every device, in any batch order and in any stack. No global generator is read or moved.

    bits        the words of a row: uniform in [0, 2^32), held in int64. Everything below is a function of such words
    below       uniform in [0, n)
    distinct    without replacement, in the order drawn
    exponential waiting times in fixed point, for weighted draws by "who comes first"
    race        who does

Only integer operations touch the draws: the last bit of a floating-point log differs from device to device.
"""

import hashlib
import math
from functools import cache
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def stream(*names: str | int | float) -> int:
    """A stable 32-bit id of a use of random numbers, e.g. stream("order", 3): other names, other numbers."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:4], "little")


def derive(seed: int, *names: str | int | float) -> int:
    """A stable 63-bit seed of one use of `seed`, for generators that are not ours (`torch.manual_seed`)."""
    return int.from_bytes(hashlib.sha256(repr((seed, *names)).encode()).digest()[:8], "little") >> 1


def piece(device: torch.device) -> int:
    """Words worth drawing at a time: what stays in a core's cache, or what fills a GPU but not its memory."""
    return 1 << (18 if device.type == "cpu" else 25)


def philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor | int, k1: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on the counter (c0..c3) under the key (k0, k1): 32-bit words in int64, shapes broadcast.

    A 64-bit product wraps, but its bits are right; `>>` copies the sign, which the mask takes off again. Only c0 and
    c2 are multiplied, so c1 and c3 may carry rubbish above bit 31 until the end.
    """
    for r in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = (p1 >> 32) ^ c1
        c0 ^= (k0 + r * 0x9E3779B9) & MASK
        c0 &= MASK
        c2 = (p0 >> 32) ^ c3
        c2 ^= (k1 + r * 0xBB67AE85) & MASK
        c2 &= MASK
        c1, c3 = p1, p0
    return c0, c1 & MASK, c2, c3 & MASK


def in_one_launch(x: Tensor) -> bool:
    """Whether words are drawn by a kernel, the same bits in one launch: where x is on a GPU, if Triton is there."""
    return x.is_cuda and find_spec("triton") is not None


def signed(seed: int) -> int:
    """64 bits as an int64 holds them."""
    return (seed + 2**63) % 2**64 - 2**63


def bits(seed: int | Tensor, index: Tensor, stream: int, n: int, start: int = 0) -> Tensor:
    """n words for each row: int64 [N, n], uniform in [0, 2^32). Word j of a row is the same whatever n is.

    index: int64 [N], the numbers of the rows. seed: 64 bits, one int or int64 [N], one per row. stream: 32 bits.
    start: the first word, a multiple of 4. Key = seed; counter = (index low, index high, word // 4, stream).
    """
    if in_one_launch(index):
        from mixassay.kernels.philox import triton

        keys = torch.full_like(index, signed(seed)) if isinstance(seed, int) else seed
        return triton.words(keys, index, stream, n, start)
    key = seed if isinstance(seed, int) else seed[:, None]
    blocks = torch.arange(start // 4, (start + n + 3) // 4, device=index.device)  # [n / 4]
    row = index[:, None]  # [N, 1]
    counter = row & MASK, (row >> 32) & MASK, blocks, torch.full_like(row, stream)
    words = philox(*counter, key & MASK, (key >> 32) & MASK)
    return torch.stack(words, dim=-1).flatten(1)[:, :n]


def below(words: Tensor, n: int) -> Tensor:
    """Uniform in [0, n), n <= 2^31, by multiply and shift: no probability is off by more than 2^-32."""
    return (words * n) >> 32


@cache
def words_for_distinct(n: int, limit: int) -> int:
    """How many words `distinct` takes for n of `limit` ids; `limit` itself where a full shuffle is cheaper.

    A draw repeats an earlier one with probability q <= (n - 1) / limit. m draws hold fewer than n ids only if
    k = m - n + 1 of them repeat, with probability <= C(m, k) q^k: the least m that brings this under 2^-64.
    """
    m, bad, all = n, n * (n - 1) << 64, limit  # exact integers, k = 1
    while m < limit and bad >= all:
        m += 1
        bad, all = bad * m * (n - 1), all * (m - n + 1) * limit
    return m


def sort(x: Tensor) -> Tensor:
    """Each row of int64 [N, n] in ascending order. On the CPU numpy's vectorised sort beats torch's tenfold."""
    return torch.from_numpy(np.sort(x.numpy(), axis=1)) if x.device.type == "cpu" else x.sort(dim=1).values


def ranked(words: Tensor) -> tuple[Tensor, Tensor]:
    """(words in ascending order, where each stood): [N, n] twice. Words that tie keep their order."""
    packed = sort(words << 31 | torch.arange(words.shape[1], device=words.device))
    return packed >> 31, packed & 0x7FFFFFFF


def distinct(words: Tensor, n: int, limit: int) -> Tensor:
    """n different ids of [0, limit) a row, every sequence equally likely, in the order drawn: int64 [N, n].

    words: [N, words_for_distinct(n, limit)]. Independent draws, repeats skipped. A row that runs out of words
    (probability < 2^-64) holds an id far below zero, which nothing downstream accepts.
    """
    if words.shape[1] == limit:
        return ranked(words)[1][:, :n]
    if in_one_launch(words):
        from mixassay.kernels.philox import choose_triton as choose

        if words.shape[1] <= choose.WIDEST:
            return choose.distinct(words, n, limit)
    drawn = below(words, limit)
    ids, at = ranked(drawn)  # of equal ids the first drawn comes first
    new = torch.ones_like(ids, dtype=torch.bool).scatter_(1, at[:, 1:], ids[:, 1:] != ids[:, :-1])
    place = (new.cumsum(1) - 1).masked_fill_(~new, n).clamp_(max=n)  # repeats and surplus go to a spare column
    return drawn.new_full((len(drawn), n + 1), -1 << 40).scatter_(1, place, drawn)[:, :n]


def race(words: Tensor, handicaps: Tensor, n: int) -> Tensor:
    """Who of S arrive first, in this order: int64 [N, n] of words [N, S], one a runner.

    Runner s takes an exponential time, times handicaps[s] (int64 [S], at most 2^27). The lowest bits of a time make way
    for the runner's number: no ties.
    """
    S = words.shape[1]
    low = (1 << (S - 1).bit_length()) - 1
    if in_one_launch(words):
        from mixassay.kernels.philox import choose_triton as choose

        if S <= choose.WIDEST:
            return choose.race(words, _quantiles(words.device), handicaps, n, low)
    arrival = exponential(words) * handicaps  # < 2^63
    return sort((arrival & ~low) | torch.arange(S, device=words.device))[:, :n] & low


def permutation(seed: int | Tensor, stream: int, n: int, epoch: int = 0) -> Tensor:
    """A shuffle of range(n): int64 [n] for one seed, [M, n] for seeds int64 [M], on their device.

    Ranks of 32-bit words; the few that tie (n^2 / 2^33 pairs on average) keep their order.
    """
    seeds = torch.tensor([seed]) if isinstance(seed, int) else seed
    order = ranked(bits(seeds, torch.full_like(seeds, epoch), stream, n))[1]
    return order[0] if isinstance(seed, int) else order


def keep_mask(seed: Tensor, stream: int, step: int | Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """What dropout with probability p keeps at `step` (int64 [] if a tensor): bool [M, *shape] for seeds int64 [M].

    Two decisions a word, so p is rounded to a multiple of 2^-16. Member m's mask depends on its own seed alone.
    """
    keep, size = round((1 - p) * 65536), math.prod(shape)
    at = torch.zeros_like(seed) + step
    if in_one_launch(seed):
        from mixassay.kernels.philox import triton

        return triton.keep(seed, at, stream, size, keep).view(len(seed), *shape)
    total, part = (size + 1) // 2, max(4, piece(seed.device) // max(1, len(seed)) // 4 * 4)  # words a member
    masks = []
    for start in range(0, total, part):
        words = bits(seed, at, stream, min(part, total - start), start)
        masks.append(torch.stack((words & 0xFFFF < keep, words >> 16 < keep), dim=-1).flatten(1))
    return torch.cat(masks, dim=1)[:, :size].reshape(len(seed), *shape)


@cache
def _quantiles(device: torch.device) -> Tensor:
    """-ln(1 - i / 65536) and its step to i + 1, in units of 2^-32: int64 [2, 65536].

    Summed in integers, so that no machine's libm has a say: ln(m / (m-1)) = 2 artanh(x), x = 1 / (2m - 1).
    """
    knots = [0]
    for m in range(65536, 1, -1):
        term, odd, total = (2 << 80) // (2 * m - 1), 1, knots[-1]
        while term:
            total, term, odd = total + term // odd, term // (2 * m - 1) ** 2, odd + 2
        knots.append(total)
    rounded = [(k + (1 << 47)) >> 48 for k in knots]
    steps = [b - a for a, b in pairwise(rounded)] + [2 << 32]
    return torch.tensor([rounded, steps], device=device)


def exponential(words: Tensor) -> Tensor:
    """Exponential waiting times of mean 1 in units of 2^-32: int64, less than 2^36.

    The quantile function at 2^16 knots, linear between: near 0 exact to the word's own 2^-32. Beyond the last knot
    (2^-16 of the draws, waiting longer than 11.1) it is uniform over two means, which keeps the mean.
    """
    table, high = _quantiles(words.device), (words >> 16).flatten()
    step = table[1].index_select(0, high).view_as(words)
    return table[0].index_select(0, high).view_as(words) + (step * (words & 0xFFFF) >> 16)
