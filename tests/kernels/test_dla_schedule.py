"""The schedule of dynamic linear attention: the fast form is the token-by-token one, bit for bit, and it is a schedule.

Scores agree to 1e-9 in float64 (a square root of a difference near 0 keeps half the digits); integers exactly.
"""

import itertools
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.dla.boundaries import Reading, boundaries
from mixassay.kernels.dla.schedule_reference import schedule
from mixassay.kernels.dla.slots import Rule, Schedule, move, ranks, slots

RULES: tuple[Rule, ...] = get_args(Rule)
READINGS: tuple[Reading, ...] = get_args(Reading)


def tokens(seed: int, T: int, K: int = 6, V: int = 5, length: int = 9, noise: float = 0.4, empty: float = 0.05) -> Any:
    """k [T, K] and v [T, V] of segments of some `length` tokens, a few of the keys zero (padding)."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    segment = torch.arange(T) // length
    k, v = draw(T, K)[segment] + noise * draw(T, K), draw(T, V)[segment] + noise * draw(T, V)
    return k * (torch.rand(T, 1, generator=g) >= empty), v


def fast(
    k: Tensor, v: Tensor, tau: float, S: int, rule: Rule = "density", chunk: int = 64, **more: Any
) -> tuple[Tensor, Schedule]:
    """score [T] and the schedule of one head."""
    k, v = k[None, :, None], v[None, :, None]
    more = {name: x[None, :, None] if isinstance(x, Tensor) else x for name, x in more.items()}
    score, boundary = boundaries(k, v, tau, chunk_size=chunk, **more)
    return score[0, :, 0], slots(boundary, S, rule=rule, score=score, k=k, v=v)


def agree_until(found: Schedule) -> None:
    """Where a slot starts after each token, by the rows of starts."""
    T, (until, starts) = found.starts.shape[1], (found.until[0, :, 0], found.starts[0, :, 0])
    token = torch.arange(T)
    opens = (token <= token[:, None]) & (until > token[:, None])
    assert torch.equal(opens, (starts.unsqueeze(-1) == token).any(1) & (token <= token[:, None]))


def agree(found: Schedule, traced: Any) -> None:
    assert found.boundary[0, :, 0].tolist() == traced.boundary
    assert found.shift[0, :, 0].tolist() == traced.shift
    assert found.starts[0, :, 0].tolist() == traced.starts
    agree_until(found)
    dense = ranks(found)[0, 0]
    assert [row[: t + 1].tolist() for t, row in enumerate(dense)] == traced.ranks
    assert (dense[torch.ones_like(dense).triu(1).bool()] == -1).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("S", range(1, 31))
def test_the_fast_form_is_the_reference(S: int, rule: Rule) -> None:
    """Every capacity to 30, with merges at all but the largest, chunks of other sizes than T."""
    k, v = tokens(S, T=120, length=3 + S % 7)
    traced = schedule(k, v, 0.7, S, rule=rule)
    score, found = fast(k, v, 0.7, S, rule, chunk=[64, 16, 7, 1, 200][S % 5])
    if S > 1:
        torch.testing.assert_close(score, torch.tensor(traced.score, dtype=torch.float64), rtol=0, atol=1e-9)
    agree(found, traced)
    full = sum(shift >= 0 for shift in traced.shift)
    assert S == 1 or full > S, "the cache overflows, so that the rule is asked"


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("decayed", [False, True], ids=["", "decayed"])
@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 100])
def test_readings_and_decay(T: int, decayed: bool, reading: Reading) -> None:
    k, v = tokens(T, T)
    g = -torch.rand(T, generator=torch.Generator().manual_seed(T), dtype=torch.float64) if decayed else None
    traced = schedule(k, v, 0.8, 4, reading=reading, log_decay=g)
    score, found = fast(k, v, 0.8, 4, chunk=32, reading=reading, log_decay=g)
    torch.testing.assert_close(score, torch.tensor(traced.score, dtype=torch.float64), rtol=1e-9, atol=1e-7)
    agree(found, traced)


@pytest.mark.parametrize("rule", RULES)
def test_equals_go_to_the_oldest_pair(rule: Rule) -> None:
    """Noise-free segments of one length: densities, openers and growths are equal but for rounding."""
    k = torch.eye(8, dtype=torch.float64).repeat_interleave(5, 0)
    traced = schedule(k, k, 0.6, 4, rule=rule)
    _, found = fast(k, k, 0.6, 4, rule)
    agree(found, traced)
    merges = [shift for shift in traced.shift if 0 <= shift < 3]
    assert merges[0] == 2


def test_densities_are_compared_as_integers() -> None:
    """One unit of 2^-20 among the scores of 80 tokens decides: less than float32 holds of a density."""
    score = torch.full((1, 121, 1), 1.5, dtype=torch.float64)
    boundary = torch.arange(121)[None, :, None] % 40 == 0
    for more, shift in ((1, 0), (50, 1), (119, 1)):  # in the oldest slot, in that of both pairs, in the newest
        x = score.clone()
        x[:, more] += 2.0**-20
        assert slots(boundary, 3, score=x).shift[0, -1, 0] == shift


def test_many_heads_at_once_and_a_threshold_for_each() -> None:
    heads = [tokens(seed, 70) for seed in range(6)]
    k, v = (torch.stack([head[i] for head in heads]).view(2, 3, 70, -1).transpose(1, 2) for i in (0, 1))
    tau = torch.tensor([0.5, 0.9, 1.3], dtype=torch.float64)
    score, boundary = boundaries(k, v, tau)
    for rule in RULES:
        found = slots(boundary, 5, rule=rule, score=score, k=k, v=v)
        for (b, h), head in zip(itertools.product(range(2), range(3)), heads, strict=True):
            one = Schedule(*(x[b : b + 1, :, h : h + 1] for x in found))
            agree(one, schedule(head[0], head[1], tau[h].item(), 5, rule=rule))


def test_heads_may_share_keys() -> None:
    k, _ = tokens(0, 40)
    v = torch.stack([tokens(seed, 40)[1] for seed in (0, 1)], dim=1)[None]
    score, boundary = boundaries(k[None, :, None], v, 0.7)
    found = slots(boundary, 3, rule="ward", score=score, k=k[None, :, None], v=v)
    for h in range(2):
        agree(Schedule(*(x[:, :, h : h + 1] for x in found)), schedule(k, v[0, :, h], 0.7, 3, rule="ward"))


@pytest.mark.parametrize("S", [1, 2, 5, 64])
def test_forced_boundaries_take_the_same_way(S: int) -> None:
    """Fixed blocks, change points, a coin, and every token: the window of S - 1 tokens and the rest."""
    k, v = tokens(3, 60)
    coin = torch.rand(60, generator=torch.Generator().manual_seed(0)) < 0.3
    at = torch.zeros(60, dtype=torch.bool)
    at[torch.tensor([0, 9, 10, 31, 52])] = True
    for forced in (torch.arange(60) % 12 == 0, at, coin, torch.ones(60, dtype=torch.bool)):
        for rule in RULES:
            found = slots(forced[None, :, None], S, rule=rule, k=k[None, :, None], v=v[None, :, None])
            agree(found, schedule(k, v, 0.0, S, rule=rule, forced=forced.tolist()))
    found = slots(forced[None, :, None], S)
    last = found.starts[0, -1, 0].tolist()
    assert sorted({*last}) == ([0] if S == 1 else [0, *range(60 - S + 1, 60)] if S < 60 else list(range(60)))


def test_the_table_of_starts_is_a_partition_and_counts_survive_merges() -> None:
    k, v = tokens(1, 150, noise=0.6)
    _, found = fast(k, v, 0.6, 7, "weak")
    dense, count = ranks(found)[0, 0], found.used[0, :, 0]
    for t in range(150):
        row = dense[t, : t + 1]
        assert row[-1] == 0
        assert (row.diff() <= 0).all(), "falling in s"
        assert (row.diff() >= -1).all(), "no rank is left out"
        assert row[0] == row.max() == count[t] - 1 <= 6
        assert torch.bincount(row).sum() == t + 1
        assert found.starts[0, t, 0, : count[t]].unique().numel() == count[t]
        assert not found.starts[0, t, 0, count[t] :].any()


def test_states_follow_the_shifts_as_the_dense_form_says() -> None:
    """A decoder that only moves and adds, against sums over the tokens of each rank."""
    k, v = tokens(2, 80)
    _, found = fast(k, v, 0.8, 4)
    s = k[:, :, None] * v[:, None]
    S = torch.zeros(1, 4, 6, 5, dtype=torch.float64)
    for t in range(80):
        S = move(S, found.shift[:, t, 0])
        S = torch.cat((S[:, :1] + s[t], S[:, 1:]), dim=1)
        held = ranks(found)[0, 0, t, : t + 1]
        for r in range(4):
            torch.testing.assert_close(S[0, r], s[: t + 1][held == r].sum(0), rtol=0, atol=1e-12)


def test_score_against_the_open_segment() -> None:
    k, v = tokens(5, 50, empty=0.0)
    score, found = fast(k, v, 0.7, 8)
    s = (k[:, :, None] * v[:, None]).flatten(1)
    for t in range(1, 50):
        begin = int(found.boundary[0, :t, 0].nonzero().max())
        C = s[begin:t].sum(0)
        apart = (s[t] / s[t].norm() - C / C.norm()).norm()
        assert abs(score[t] - apart) < 1e-9, "the distance of the two at unit norm"


def test_invariance_to_scale_and_rotation() -> None:
    k, v = tokens(6, 90)
    U, W = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))).Q
            for n in (6, 5))  # fmt: skip
    for rule in RULES:
        here, there = fast(k, v, 0.7, 4, rule)[1], fast(3 * k @ U, v @ W, 0.7, 4, rule)[1]
        assert torch.equal(here.shift, there.shift)
        assert torch.equal(here.starts, there.starts)
    scale = torch.rand(90, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    one, other = (fast(x, v, 0.7, 4, reading="token")[1] for x in (k, scale * k))
    assert torch.equal(one.shift, other.shift), "the token reading sees directions only"


def test_later_tokens_do_not_matter() -> None:
    (k, v), (k2, v2) = tokens(7, 90), tokens(8, 90)
    k2, v2 = torch.cat((k[:40], k2[40:])), torch.cat((v[:40], v2[40:]))
    here, there = fast(k, v, 0.7, 4, "ward")[1], fast(k2, v2, 0.7, 4, "ward")[1]
    assert all(torch.equal(a[:, :40], b[:, :40]) for a, b in zip(here, there, strict=True))


def test_extremes() -> None:
    k, v = tokens(9, 40, empty=0.2)
    for S in (3, 40):
        assert fast(k, v, 2.1, S)[1].boundary[0, 1:].sum() == 0, "nothing is further than 2"
    every = fast(k, v, 0.0, 40)[1]
    assert torch.equal(every.starts[0, -1, 0], torch.arange(39, -1, -1)), "each token a slot"
    copies = torch.ones(60, 4, dtype=torch.float64)
    found = [int(fast(copies, copies, 0.6, 30, reading=reading)[1].boundary.sum()) for reading in READINGS]
    assert found == [1, 1, 20], "without norms, sixty copies of one token are twenty segments"
    zeros = fast(k * 0, v, 0.6, 5)[1]
    assert zeros.boundary.sum() == 1


def test_low_precision_inputs_are_scored_in_float32_as_they_are() -> None:
    k, v = tokens(4, 64)
    k, v = k.bfloat16(), v.bfloat16()
    score, found = fast(k, v, 0.7, 6)
    assert score.dtype == torch.float32
    traced = schedule(k, v, 0.7, 6)
    torch.testing.assert_close(score.double(), torch.tensor(traced.score, dtype=torch.float64), rtol=0, atol=1e-3)
    assert min(abs(x - 0.7) for x in traced.score[1:]) > 1e-3, "no close call, so the integers must agree"
    agree(found, traced)


def test_what_does_not_fit_is_said() -> None:
    k, v = torch.zeros(1, 4, 2, 3), torch.zeros(1, 4, 4, 5)
    boundary = torch.ones(1, 4, 4, dtype=torch.bool)
    wrong: list[tuple[Any, str]] = [
        (lambda: boundaries(k[:, :3], v, 0.6), r"v has shape \[1, 4, 4, 5\], expected \[B, T, H, V\] = \[1, 3, H, V\]"),
        (lambda: boundaries(k, v[:, :, :3], 0.6), "k has G = 2 heads, which must divide the H = 3 heads of v"),
        (lambda: boundaries(k, v, torch.ones(3)), r"threshold has shape \[3\]"),
        (lambda: boundaries(k, v, 0.6, reading="tokens"), 'unknown reading "tokens"'),  # type: ignore[arg-type]
        (lambda: slots(boundary, 0), "capacity = 0, expected at least 1"),
        (lambda: slots(boundary.long(), 2), "dtype torch.int64, expected bool"),
        (lambda: slots(boundary, 2, rule="best"), 'unknown rule "best"'),  # type: ignore[arg-type]
        (lambda: slots(boundary, 2, rule="ward"), "rule ward needs k and v"),
        (lambda: slots(boundary, 2, score=torch.zeros(1, 4, 3)), r"score has shape \[1, 4, 3\]"),
    ]
    for call, message in wrong:
        with pytest.raises(UserError, match=message):
            call()
