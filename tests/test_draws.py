"""Counter-based draws: the published test vectors, purity, and the distributions.

Statistical tests have fixed seeds, so they pass always or never; a p-value below 1e-4 is called a failure.
"""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from mixassay import draws

MANY = torch.arange(100_000)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def counts(ids: Tensor, n: int) -> np.ndarray:
    return torch.bincount(ids.flatten(), minlength=n).numpy()


def uniform(ids: Tensor, n: int) -> bool:
    seen = counts(ids, n)
    return len(seen) == n and stats.chisquare(seen).pvalue > 1e-4


# --- Philox


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_vectors_published_with_random123(counter: str, key: str, answer: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([int(word, 16)]) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    out = draws.philox(c0, c1, c2, c3, k0, k1)
    assert " ".join(f"{int(word):08x}" for word in out) == answer


def test_words_are_the_philox_blocks_of_their_row() -> None:
    seed, index, stream = 0xA4093822_299F31D0 >> 1, (5 << 32) + 7, 0xFFFFFFFE
    words = draws.bits(seed, torch.tensor([3, index]), stream, 10)
    for block in range(2):
        c0, c1, c2, c3 = (torch.tensor([x]) for x in (7, 5, block, stream))
        expected = draws.philox(c0, c1, c2, c3, seed & draws.MASK, seed >> 32)
        assert torch.equal(words[1, 4 * block : 4 * block + 4], torch.cat(expected))


def test_words_depend_on_row_seed_and_stream_alone() -> None:
    index = torch.tensor([9, 0, 2**40 + 1, 9])
    words = draws.bits(3, index, 1, 22)
    assert words.shape == (4, 22)
    assert torch.equal(words[0], words[3]), "same row, same words"
    assert torch.equal(draws.bits(3, index, 1, 5), words[:, :5]), "whatever their number"
    assert torch.equal(draws.bits(3, index, 1, 10, start=12), words[:, 12:])
    seeds = torch.tensor([3, 4, 3, 2**62 + 3])
    mixed = draws.bits(seeds, index, 1, 22)
    for i, seed in enumerate(seeds.tolist()):
        assert torch.equal(mixed[i], draws.bits(seed, index, 1, 22)[i]), "one seed for all or one for each row"
    others = [draws.bits(3, index, 2, 22), draws.bits(4, index, 1, 22), draws.bits(3 + 2**33, index, 1, 22)]
    assert all((words != other).all() for other in others)
    assert len(set(words[:3].flatten().tolist())) == 66


def test_every_bit_is_fair_and_fair_with_its_neighbours() -> None:
    words = draws.bits(0, MANY, 0, 8)
    ones = torch.stack([(words >> bit & 1).sum() for bit in range(32)]).numpy()
    z = (ones - words.numel() / 2) / np.sqrt(words.numel() / 4)
    assert np.abs(z).max() < 4.5
    for lag in (words[:, 1:] ^ words[:, :-1], words[1:] ^ words[:-1]):  # next word of the row; same word, next row
        ones = torch.stack([(lag >> bit & 1).sum() for bit in range(32)]).numpy()
        assert np.abs((ones - lag.numel() / 2) / np.sqrt(lag.numel() / 4)).max() < 4.5


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    draws.permutation(0, 0, 10)
    draws.keep_mask(torch.tensor([1]), 0, 0, (4,), 0.5)
    assert torch.equal(before, torch.get_rng_state())


# --- names


def test_streams_and_derived_seeds_are_pinned() -> None:
    """Changing these changes every number ever drawn: raise all task versions if it must be."""
    assert draws.stream("order", 3) == 0x16C3767B
    assert draws.derive(5, "init") == 0x6884B5944B963E06


def test_names_do_not_run_into_each_other() -> None:
    names = [("a",), ("a", ""), ("a", "b"), ("ab",), ("a", 1), ("a", "1"), ("a", 1.0), ("a1",)]
    assert len({draws.stream(*name) for name in names}) == len(names)
    assert len({draws.derive(seed, *name) for name in names for seed in range(3)}) == 3 * len(names)
    assert all(0 <= draws.derive(seed, "x") < 2**63 for seed in range(100))


# --- uniform


@pytest.mark.parametrize("n", [2, 10, 1000])
def test_below_is_uniform(n: int) -> None:
    ids = draws.below(draws.bits(1, MANY, 5, 2), n)
    assert ids.min() >= 0
    assert uniform(ids, n)


def test_below_covers_its_range_exactly() -> None:
    ends = torch.tensor([0, 2**32 - 1])
    for n in (1, 3, 8192, 2**31):
        assert draws.below(ends, n).tolist() == [0, n - 1]


# --- without replacement


def first_new(ids: list[int], n: int) -> list[int]:
    """The definition: walk the draws, skip what was seen."""
    return list(dict.fromkeys(ids))[:n]


@pytest.mark.parametrize(("n", "limit"), [(1, 9), (2, 50), (16, 127), (64, 4095)])
def test_distinct_skips_repeats_of_independent_draws(n: int, limit: int) -> None:
    words = draws.bits(2, MANY[:500], 0, draws.words_for_distinct(n, limit))
    assert words.shape[1] < limit, "these cells do not shuffle"
    drawn = draws.below(words, limit).tolist()
    assert draws.distinct(words, n, limit).tolist() == [first_new(row, n) for row in drawn]


@pytest.mark.parametrize(("n", "limit", "words"), [(3, 4, 4), (3, 4, 60), (4, 4, 4), (1, 5, 5), (2, 30, 13)])
def test_every_sequence_without_repeats_is_equally_likely(n: int, limit: int, words: int) -> None:
    """A shuffle when there are as many words as ids, else skipped repeats: both are exact at the tightest limits."""
    ids = draws.distinct(draws.bits(3, MANY, n, words), n, limit)
    number = {sequence: i for i, sequence in enumerate(itertools.permutations(range(limit), n))}
    which = torch.tensor([number[tuple(row)] for row in ids.tolist()])  # KeyError: a repeat or out of range
    assert uniform(which, len(number))


@pytest.mark.parametrize("limit", [64, 65, 70, 100, 4095])
def test_distinct_is_distinct_at_every_tightness(limit: int) -> None:
    words = draws.bits(4, MANY[:2000], 0, draws.words_for_distinct(64, limit))
    ids = draws.distinct(words, 64, limit)
    assert ids.shape == (2000, 64)
    assert ids.min() >= 0
    assert ids.max() < limit
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    if limit == 4095:
        assert uniform(ids, limit)


@pytest.mark.parametrize(("n", "limit"), [(2, 50), (4, 127), (16, 127), (16, 4095), (64, 4095)])
def test_words_run_out_less_often_than_once_in_2_to_the_64(n: int, limit: int) -> None:
    words = draws.words_for_distinct(n, limit)
    assert n < words < limit
    held = [Fraction(1)] + [Fraction(0)] * n  # exact law of the number of different ids, n is absorbing
    for _ in range(words):
        stay = [p * Fraction(d, limit) if d < n else p for d, p in enumerate(held)]
        step = [p * Fraction(limit - d, limit) for d, p in enumerate(held[:n])]
        held = [a + b for a, b in zip(stay, [Fraction(0), *step], strict=True)]
    assert sum(held) == 1
    assert sum(held[:n]) < Fraction(1, 2**64)


def test_a_row_that_runs_out_of_words_cannot_pass_for_a_good_one() -> None:
    assert draws.distinct(torch.zeros(1, 5, dtype=torch.int64), 2, 100).tolist() == [[0, -1 << 40]]


def test_ranks_break_ties_by_position() -> None:
    values, at = draws.ranked(torch.tensor([[7, 2**32 - 1, 7, 0, 7]]))
    assert values.tolist() == [[0, 7, 7, 7, 2**32 - 1]]
    assert at.tolist() == [[3, 0, 2, 4, 1]]


def test_permutation_shuffles() -> None:
    order = draws.permutation(1, 2, 1000)
    assert order.sort().values.tolist() == list(range(1000))
    others = [draws.permutation(1, 2, 1000, epoch=1), draws.permutation(1, 3, 1000), draws.permutation(0, 2, 1000)]
    assert all((order != other).sum() > 900 for other in others)
    assert draws.permutation(1, 2, 1).tolist() == [0]


def test_permutation_of_many_seeds_is_that_of_each() -> None:
    seeds = torch.tensor([5, 0, 2**40])
    together = draws.permutation(seeds, 2, 300, epoch=4)
    assert torch.equal(together, torch.stack([draws.permutation(seed, 2, 300, epoch=4) for seed in seeds.tolist()]))


def test_every_permutation_is_equally_likely() -> None:
    orders = draws.permutation(MANY[:20_000], 0, 4, epoch=1)
    number = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    assert uniform(torch.tensor([number[tuple(order)] for order in orders.tolist()]), 24)


# --- dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_mask_keeps_its_share(p: float) -> None:
    mask = draws.keep_mask(torch.arange(4), 0, 7, (50, 40, 25), p)
    assert mask.shape == (4, 50, 40, 25)
    assert mask.dtype == torch.bool
    share = mask.flatten(1).double().mean(1)
    assert (share - (1 - p)).abs().max() < 4.5 * (p * (1 - p) / 50_000) ** 0.5
    pairs = {"members": (mask[0], mask[1]), "neighbours": (mask[..., :-1], mask[..., 1:])}
    for name, (a, b) in pairs.items():
        agree = (a == b).double().mean()
        assert abs(agree - (p**2 + (1 - p) ** 2)) < 4.5 * (0.25 / 50_000) ** 0.5, f"{name} are independent"


def test_keep_mask_of_a_member_does_not_depend_on_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = torch.tensor([3, 11, 2**35])
    whole = draws.keep_mask(seeds, 1, 2, (7, 9, 3), 0.3)
    assert torch.equal(draws.keep_mask(seeds[1:2], 1, 2, (7, 9, 3), 0.3)[0], whole[1])
    monkeypatch.setattr(draws, "piece", lambda device: 40)
    assert torch.equal(draws.keep_mask(seeds, 1, 2, (7, 9, 3), 0.3), whole), "nor on the pieces it is drawn in"
    for other in ((seeds + 1, 1, 2), (seeds, 2, 2), (seeds, 1, 3)):
        assert (draws.keep_mask(*other, (7, 9, 3), 0.3) != whole).any(2).any(1).any(1).all()


def test_keep_mask_at_the_ends() -> None:
    assert draws.keep_mask(torch.arange(3), 0, 0, (1000,), 0.0).all()
    assert not draws.keep_mask(torch.arange(3), 0, 0, (1000,), 1.0).any()
    assert draws.keep_mask(torch.arange(3), 0, 0, (1,), 0.0).shape == (3, 1)


# --- exponential


def test_exponential_is_the_quantile_function() -> None:
    """To 2 units in the lower half, to a quarter of a percent except in the last 2^-15 of the draws."""
    words = torch.cat((torch.arange(2**12), torch.arange(2**20) * 4093, torch.arange(2**32 - 2**17, 2**32, 97)))
    words = words[words < 2**32]
    ours = draws.exponential(words).double() / 2**32
    exact = torch.from_numpy(-np.log1p(-words.double().numpy() / 2**32))
    error = (ours - exact).abs()
    assert error[words < 2**16].max() <= 2.0**-32
    assert error[words < 2**31].max() <= 2.0**-31  # linear between knots 2^-16 apart: 2^-33, the rest is rounding
    inner = words < 2**32 - 2**17
    assert (error[inner] <= 0.0025 * exact[inner] + 2.0**-32).all()
    assert ours.max() < 16
    beyond = draws.exponential(torch.arange(65535 << 16, 2**32)).double() / 2**32
    assert abs(beyond.mean() - (np.log(65536) + 1)) < 1e-4, "who waits longest has the right mean"
    assert (draws.exponential(words.sort().values).diff() >= 0).all(), "later quantiles wait no less"


def test_exponential_table_is_the_logarithm() -> None:
    knots = draws.exponential(torch.arange(65536) << 16).numpy()
    exact = np.array([-np.log1p(-i / 65536) * 2**32 for i in range(65536)])
    assert np.abs(knots - exact).max() < 0.5 + 1e-4  # rounded to the nearest integer


def test_exponential_draws_are_exponential() -> None:
    waits = draws.exponential(draws.bits(1, MANY, 3, 4)).flatten().double().numpy() / 2**32
    assert stats.kstest(waits, "expon").pvalue > 1e-4
    assert abs(waits.mean() - 1) < 4.5 / np.sqrt(len(waits))
    assert abs(waits.var() - 1) < 4.5 * np.sqrt(8 / len(waits))


# --- devices


@pytest.mark.gpu
@needs_cuda
def test_all_draws_are_the_same_bits_on_the_gpu() -> None:
    index = torch.arange(3000) * 7919
    words = draws.bits(5, index, 1, 150)
    there = draws.bits(5, index.cuda(), 1, 150)
    assert there.is_cuda
    assert torch.equal(words, there.cpu())
    assert torch.equal(draws.bits(index, index, 1, 9), draws.bits(index.cuda(), index.cuda(), 1, 9).cpu())
    assert torch.equal(draws.exponential(words), draws.exponential(there).cpu())
    few, shuffled = draws.words_for_distinct(20, 4095), draws.words_for_distinct(20, 21)
    assert torch.equal(draws.distinct(words[:, :few], 20, 4095), draws.distinct(there[:, :few], 20, 4095).cpu())
    assert torch.equal(draws.distinct(words[:, :shuffled], 20, 21), draws.distinct(there[:, :shuffled], 20, 21).cpu())
    seeds = torch.tensor([1, 2**50, 3])
    assert torch.equal(draws.permutation(seeds, 2, 30_000), draws.permutation(seeds.cuda(), 2, 30_000).cpu())
    mask = draws.keep_mask(seeds, 2, 5, (64, 33, 65), 0.1)
    assert torch.equal(mask, draws.keep_mask(seeds.cuda(), 2, 5, (64, 33, 65), 0.1).cpu())
