"""The bias audit: the theorem holds in every number, the optimum is one, and policies are what they are called."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from mixassay.kernels.common.fenwick import level, levels
from mixassay.kernels.dla.slots import Rule, slots
from mixassay.mixers.parts.segmentation import Segmentation, Segmented
from mixassay.runners.audit.config import PLAIN, Audit, Dla, Head, Plain, Policy, Tuning
from mixassay.runners.audit.cuts import Case, cut, dla, ends_of, fenwick, tune
from mixassay.runners.audit.measure import Blocks, Questions, Tokens, answers, bound, boundary_match, measure
from mixassay.runners.audit.mixer import audit_mixer
from mixassay.runners.audit.optimal import Optimal
from mixassay.runners.audit.run import Reference, numbers, run
from mixassay.tasks.streams.recall import RecallStream
from mixassay.tasks.streams.segmented import SegmentedStream

SHAPE: dict[str, Any] = {"tokens": 96, "segments": 6, "d_key": 5, "d_value": 4}
STREAMS = {
    "base": {},
    "no noise": {"sigma": 0.0},
    "noise": {"sigma": 0.6},
    "random": {"sigma": None},
    "many": {"segments": 16, "lengths": "fixed"},
    "ramp": {"ramp": 5},
    "pool": {"pool": 2},
    "needles": {"needles": 0.1},
    "drift": {"angle": 15.0},
}
POLICIES: list[Policy] = [Plain(name=name) for name in get_args(Plain.model_fields["name"].annotation)]
POLICIES += [Dla(name="dla", tau=tau, rule=rule) for rule in get_args(Rule) for tau in (0.4, 0.6, 1.2)]
POLICIES += [Dla(name="dla", reading="token"), Dla(name="dla", capacity="unlimited")]


def case(seeds: int = 2, capacity: int = 4, **stream: Any) -> Case:
    kind = SegmentedStream(**{**SHAPE, **stream})
    k, v, segment, needle = kind.draw(torch.zeros(seeds, dtype=torch.int64), seed=torch.arange(seeds))
    rows = tuple(Tokens(k[i], v[i], segment[i], needle[i]) for i in range(seeds))
    return Case(rows, ends_of(kind.tokens, 3), capacity)


def random_tokens(T: int, K: int = 3, V: int = 2, seed: int = 0) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(T, d, generator=g, dtype=torch.float64) for d in (K, V))
    segment = torch.sort(torch.randint(0, 3, (T,), generator=g)).values
    return Tokens(k, v, segment, torch.rand(T, generator=g) < 0.2)


# --- the theorem


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_bias_is_below_its_bound_and_nothing_beats_the_optimum(stream: dict[str, Any]) -> None:
    """Every policy on every kind of stream: bias / B <= 1 for each query, B >= the least B of as many blocks."""
    it = case(**stream)
    reference = Reference(it)
    for policy in POLICIES:
        cuts = cut(policy, it)
        for row in range(2):
            found = numbers(it, reference, cuts, row, tolerance=2)
            assert not found["ratio"] > 1 + 1e-9, policy
            assert found["worst"] <= found["bound"] + 1e-9, policy
            assert found["segment_bias"] <= found["worst"] + 1e-9, policy
            assert not found["gap"] < 1 - 1e-9, policy
            if policy.name == "oracle" and len(it.changes(row)) <= it.capacity:
                assert found["segment_bias"] < 1e-12
                assert found["f1"] == 1


def test_any_weights_up_to_one_stay_below_d1_and_d1_below_the_bound() -> None:
    """Straight from the definition, with random and with the worst weights, for one query at a time."""
    tokens = random_tokens(40)
    starts = [0, 3, 4, 20]
    u = tokens.k[:, :, None] * tokens.v[:, None]
    spans = list(zip(starts, [*starts[1:], 40], strict=True))
    residual = torch.cat([u[a:b] - u[a:b].mean(0) for a, b in spans])
    g = torch.Generator().manual_seed(1)
    B = bound(tokens, starts) * Blocks(tokens, starts).mass
    plain = sum(math.sqrt((b - a) * float(residual[a:b].square().sum())) for a, b in spans)
    assert pytest.approx(plain) == B
    for _ in range(100):
        q = torch.nn.functional.normalize(torch.randn(3, generator=g, dtype=torch.float64), dim=0)
        reads = torch.einsum("k,tkv->tv", q, u)
        d1 = float(torch.einsum("k,tkv->tv", q, residual).norm(dim=1).sum())
        for w in (
            torch.rand(40, generator=g, dtype=torch.float64) * 2 - 1,
            torch.randn(40, generator=g).sign().double(),
        ):
            mean = torch.cat([w[a:b].mean().expand(b - a) for a, b in spans])
            bias = float(((w - mean)[:, None] * reads).sum(0).norm())
            assert bias <= d1 + 1e-12
        assert d1 <= B + 1e-12
        even = sum((b - a) * reads[a:b].mean(0) for a, b in spans)
        assert (reads.sum(0) - even).norm() < 1e-12, "equal weights make no bias"


def test_the_bound_is_tight_where_residuals_are_parallel_and_alike() -> None:
    q = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(8)[:, None]
    tokens = Tokens(3 * torch.tensor([[0.8, -0.6]]).double() + sign * q, torch.ones(16, 1).double(),
                    torch.zeros(16).long(), torch.zeros(16).bool())  # fmt: skip
    blocks = Blocks(tokens, [0])
    worst = torch.einsum("nk,tkv->ntv", q, blocks.residual).norm(dim=2).sum(1)
    assert float(worst) == pytest.approx(blocks.bound, rel=1e-12)


def test_a_finer_cut_has_no_larger_bound() -> None:
    tokens = random_tokens(60)
    for a, b in itertools.combinations(range(5, 60, 7), 2):
        assert bound(tokens, [0, a, b]) <= bound(tokens, [0, a]) + 1e-12 <= bound(tokens, [0]) + 2e-12


def test_measures_are_what_they_are_called() -> None:
    """Against loops over queries and tokens."""
    tokens, starts, T = random_tokens(25, seed=3), [0, 9, 10, 18], 25
    found = measure(tokens, starts)
    u = [torch.outer(k, v) for k, v in zip(tokens.k, tokens.v, strict=True)]
    block = [sum(t >= s for s in starts) - 1 for t in range(T)]
    mean = [
        sum((u[t] for t in range(T) if block[t] == b), torch.zeros(3, 2).double()) / block.count(b) for b in range(4)
    ]
    mass = sum(float(x.norm()) for x in u)
    worst, whole, single = [], [], []
    for query in range(T):
        q = tokens.k[query] / tokens.k[query].norm()
        off = [q @ (u[t] - mean[block[t]]) for t in range(T)]
        worst.append(sum(float(x.norm()) for x in off))
        w = (tokens.segment == tokens.segment[query]).double()
        bar = [float(w[[t for t in range(T) if block[t] == b]].mean()) for b in range(4)]
        whole.append(float(sum((w[t] - bar[block[t]]) * (q @ u[t]) for t in range(T)).norm()))  # type: ignore[union-attr]
        single.append(float(off[query].norm()))
    age = [math.log((T - t + 1) / (T - t)) / math.log(T) if t else 0.0 for t in range(T)]
    assert sum(age) == pytest.approx(1)
    expected = {
        "worst": sum(worst) / T / mass,
        "segment_bias": sum(whole) / T / mass,
        "segment_bias_recent": sum(a * x for a, x in zip(age, whole, strict=True)) / mass,
        "token_bias": sum(single) / mass,
        "token_bias_recent": sum(a * x for a, x in zip(age, single, strict=True)) * T / mass,
        "needle_bias": sum(x for x, n in zip(single, tokens.needle.tolist(), strict=True) if n)
        / int(tokens.needle.sum()) * T / mass,
        "ratio": max(worst + whole) / found["bound"] / mass,
    }  # fmt: skip
    assert found == pytest.approx(expected | {"bound": found["bound"]}, rel=1e-9)


def test_one_token_and_no_needles_can_be_measured() -> None:
    found = measure(random_tokens(30).upto(1)._replace(needle=torch.zeros(1).bool()), [0])
    assert max(found[name] for name in ("bound", "worst", "segment_bias", "token_bias_recent")) < 1e-15
    assert math.isnan(found["ratio"])
    assert math.isnan(found["needle_bias"])


def test_answers_are_those_of_the_slot_that_holds_the_write() -> None:
    """Three keys, orthogonal; segment 1 binds key 0 anew."""
    key, value = torch.tensor([0, 1, 0, 0, 1, 0]), torch.tensor([1, 2, 1, 3, 2, 0])
    k, v = torch.eye(3).double()[key], torch.eye(4).double()[value]
    segment = torch.tensor([0, 0, 0, 1, 1, 2])
    tokens = Tokens(k, v, segment, torch.zeros(6).bool(), Questions(k, key, value, 4))
    assert answers(tokens, [0]) == {"answered_any": 4 / 6, "answered_open": 0, "answered_stale": 2 / 6}
    assert answers(tokens, [0, 3, 5]) == {"answered_any": 1, "answered_open": 1, "answered_stale": 0}
    assert answers(tokens.upto(4), [0]) == {"answered_any": 3 / 4, "answered_open": 0, "answered_stale": 1 / 4}
    unknown = tokens._replace(questions=Questions(-k, key, value, 4))
    assert answers(unknown, [0])["answered_stale"] == 0, "an answer that the key never had is another kind of error"


# --- the optimum


def test_the_optimum_is_the_best_of_all_cuts() -> None:
    tokens = random_tokens(9, seed=2)
    best = Optimal(tokens.k, tokens.v, 9)
    for end in (1, 4, 9):
        for m in range(1, end + 1):
            every = ([0, *inner] for inner in itertools.combinations(range(1, end), m - 1))
            least = min(bound(tokens.upto(end), starts) for starts in every)
            found = best.starts(end, m)
            assert len(found) == m
            assert found[0] == 0
            assert bound(tokens.upto(end), found) == pytest.approx(least, abs=1e-7)


def test_the_optimum_among_given_places() -> None:
    tokens = random_tokens(12, seed=5)
    places = [0, 2, 3, 7, 10]
    best = Optimal(tokens.k, tokens.v, 3, places)
    every = ([0, *inner] for inner in itertools.combinations(places[1:], 2))
    least = min(bound(tokens, starts) for starts in every)
    assert set(best.starts(12, 3)) <= set(places)
    assert bound(tokens, best.starts(12, 3)) == pytest.approx(least, abs=1e-7)


# --- the policies


@pytest.mark.parametrize("T", [1, 2, 7, 8, 64, 100])
def test_fenwick_blocks_are_the_levels_of_the_kernels(T: int) -> None:
    """And of the tree itself: the last token alone, then the blocks that its lowest bits take off."""
    for t in {0, T // 2, T - 1}:
        seen = level(torch.tensor(t), torch.arange(t + 1), levels(T)).tolist()
        starts, rest = [t], t
        while rest:
            rest -= rest & -rest
            starts.append(rest)
        assert fenwick(t, T) == sorted(starts)
        of = [sum(s >= start for start in fenwick(t, T)) for s in range(t + 1)]
        assert len(set(zip(of, seen, strict=True))) == len(set(seen)) == len(set(of)), "a block a level"


def test_policies_are_what_they_are_called() -> None:
    it = case(capacity=5)
    end = it.ends[-1]

    def last(name: str) -> list[int]:
        return cut(Plain.model_validate({"name": name}), it).starts[0][-1]

    assert last("single") == [0]
    assert last("fixed") == [0, 20, 40, 60, 80]
    assert last("window") == [0, 92, 93, 94, 95]
    assert last("fenwick") == fenwick(95, 96)
    assert last("optimal") == it.optimal[0].starts(end, 5)
    changes = it.changes(0)
    assert len(changes) == 6
    assert set(last("oracle")) < set(changes), "five of the six"
    assert cut(Plain(name="oracle"), case(capacity=6)).starts[0][-1] == changes
    slots_used = {name: cut(Plain.model_validate({"name": name}), it).slots for name in PLAIN}
    assert slots_used == {"single": 1, "fixed": 5, "fenwick": 7, "window": 5, "oracle": 5, "optimal": 5}


def test_dla_finds_clear_changes_and_merges_by_its_rule() -> None:
    it = case(sigma=0.1, d_key=16, d_value=16, capacity=6)
    for rule in get_args(Rule):
        found = cut(Dla(name="dla", rule=rule), it)
        assert [row[-1] for row in found.starts] == [it.changes(row) for row in range(2)]
        assert found.raised == [5, 5]
    loud = case(sigma=0.8, d_key=16, d_value=16, capacity=4)
    cuts = [cut(Dla(name="dla", rule=rule), loud) for rule in get_args(Rule)]
    assert len({str(one.starts) for one in cuts}) == 3, "the rules differ"
    assert cut(Dla(name="dla", capacity="unlimited"), loud).slots > 4


def test_tau_is_tuned_by_the_bound() -> None:
    it, taus = case(seeds=3, sigma=0.5, d_key=16, d_value=16, capacity=8), (0.2, 0.5, 1.0, 1.4)
    for rule in get_args(Rule):
        means = []
        for tau in taus:
            made = cut(Dla(name="dla", rule=rule, tau=tau), it)
            means.append(sum(bound(row, made.starts[i][-1]) for i, row in enumerate(it.rows)))
        assert tune(Dla(name="dla", rule=rule, tau="tuned"), it, taus) == taus[means.index(min(means))]


def test_boundaries_match_one_to_one() -> None:
    assert boundary_match([0, 10, 11, 30], [0, 10, 20, 31], 2) == {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3}
    assert boundary_match([0], [0, 5], 2) == {"precision": 0, "recall": 0, "f1": 0}
    assert boundary_match([0, 4, 6], [0, 5], 2)["precision"] == 0.5, "one true change is found once"


# --- as a whole


def audit(streams: dict[str, Any], policies: list[Policy], seeds: int = 5, capacity: int = 10) -> Any:
    made = Audit(None, Head(name="t", capacity=capacity), streams, tuple(policies), tuple(range(seeds)), Tuning())  # type: ignore[arg-type]
    return {(record.stream, record.policy): record for record in run(made)}


PROTOTYPE = {  # B and segment bias, mean and std of five seeds, of an independent float64 implementation in numpy
    "base": {
        "fixed": ((0.491, 0.047), (0.039, 0.013)),
        "fenwick": ((0.732, 0.049), (0.124, 0.019)),
        "dla tau 0.6 density": ((0.263, 0.002), (0.0, 0.0)),
        "oracle": ((0.263, 0.002), (0.0, 0.0)),
    },
    "32": {
        "fixed": ((0.747, 0.028), (0.036, 0.004)),
        "dla tau 0.6 density": ((0.750, 0.043), (0.051, 0.006)),
        "dla tau 0.6 ward": ((0.507, 0.02), (0.010, 0.004)),
        "oracle": ((0.488, 0.02), (0.008, 0.004)),
    },
}


def test_numbers_are_those_of_the_prototype() -> None:
    """Other streams of the same law, so means agree within the deviations of both, added."""
    streams = {"base": SegmentedStream(), "32": SegmentedStream(segments=32)}
    policies: list[Policy] = [Plain(name=name) for name in ("fixed", "fenwick", "oracle")]  # type: ignore[arg-type]
    policies += [Dla(name="dla"), Dla(name="dla", rule="ward")]
    found = audit(streams, policies)
    for stream, expected in PROTOTYPE.items():
        for policy, numbers_ in expected.items():
            for metric, (mean, std) in zip(("bound", "segment_bias"), numbers_, strict=True):
                ours = torch.tensor(found[stream, policy].values(metric), dtype=torch.float64)
                assert abs(float(ours.mean()) - mean) <= std + float(ours.std()) + 5e-4, (stream, policy, metric)
    base = {policy: sum(found["base", policy].values("bound")) for policy in PROTOTYPE["base"]}
    assert 1.5 < base["fixed"] / base["dla tau 0.6 density"] < 2.2, "1.9 times below fixed blocks"
    assert 2.3 < base["fenwick"] / base["dla tau 0.6 density"] < 3.2, "2.8 times below Fenwick"
    assert found["base", "oracle"].values("f1") == [1.0] * 5


def test_records_hold_every_seed_and_repeat() -> None:
    streams = {"a": SegmentedStream(**SHAPE), "b": SegmentedStream(**{**SHAPE, "sigma": 0.0, "segments": 3})}
    policies: list[Policy] = [Plain(name="single"), Dla(name="dla", tau="tuned")]
    once, again = (audit(streams, policies, seeds=3, capacity=4) for _ in range(2))
    assert list(once) == [(s, p) for s in "ab" for p in ("single", "dla tau tuned density")]
    for key, record in once.items():
        assert record.metrics == again[key].metrics
        assert {len(values) for values in record.metrics.values()} == {3}
        assert record.env["device"] == "cpu"
        assert record.data == "segmented_stream/1"
        assert len(record.code.source) == 16
    assert once["a", "single"].tau is None
    assert once["a", "single"].state_bytes == 4 * 5 * 4
    assert once["a", "dla tau tuned density"].tau in Tuning().taus
    assert once["b", "dla tau tuned density"].values("gap") == [], "no gap to a bound of zero"
    fewer = audit(streams, policies, seeds=2, capacity=4)
    for key, record in fewer.items():
        assert {n: v[:2] for n, v in once[key].metrics.items()} == record.metrics, "a seed's number is its own"


def test_recall_needs_its_segment_in_keys_and_values() -> None:
    """As in the prototype: without tags the score is blind, with half of both it finds what the oracle finds."""
    streams = {"bare": RecallStream(), "tagged": RecallStream(tag_key=0.5, tag_value=0.5)}
    policies: list[Policy] = [Plain(name="oracle"), Dla(name="dla", tau=1.2, rule="ward")]
    found = audit(streams, policies, capacity=9)
    means = {key: sum(record.values("answered_any")) / 5 for key, record in found.items()}
    assert means["bare", "oracle"] > 0.99 < means["tagged", "oracle"]
    assert means["bare", "dla tau 1.2 ward"] < 0.7
    assert means["tagged", "dla tau 1.2 ward"] > 0.9
    assert found["bare", "oracle"].state_bytes == 8 * (8 + 32) * (8 + 64) * 4
    assert found["bare", "oracle"].data == "recall_stream/1"


# --- a mixer


class Blocked(nn.Module):
    """Two heads: one cuts every `block` tokens, the other by score."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def segmentation(self, x: Tensor) -> Segmentation:
        k, v = x[..., :6, None].mT.expand(-1, -1, 2, -1), x[..., 6:, None].mT.expand(-1, -1, 2, -1)
        opens = (torch.arange(x.shape[1]) % self.block == 0)[None, :, None].expand(len(x), -1, 1)
        found = [slots(opens, 8).starts, dla(k[:, :, :1], v[:, :, :1], 0.6, 8, "ward", "memory").starts]
        return Segmentation(k, v, torch.cat(found, dim=2))


def test_a_mixer_is_audited_on_its_own_keys_values_and_cuts() -> None:
    stream = SegmentedStream(tokens=64, segments=4, lengths="fixed", sigma=0.1, d_key=6, d_value=6)
    drawn = stream.draw(torch.arange(3), seed=0)
    mixer = Blocked(16)
    assert isinstance(mixer, Segmented)
    assert not isinstance(nn.Linear(2, 2), Segmented)
    found = audit_mixer(mixer, torch.cat((drawn.k, drawn.v), dim=2), drawn.changes)
    assert len(found) == 6, "sequences outermost, then heads"
    for head in found:
        assert head["f1"] == 1
        assert head["raised"] == 3
        assert head["ratio"] <= 1
        assert head["gap"] >= 1 - 1e-9
        assert head["segment_bias"] < 1e-12
    off = audit_mixer(Blocked(24), torch.cat((drawn.k, drawn.v), dim=2), drawn.changes)
    assert [head["f1"] < 1 for head in off] == [True, False] * 3
    assert off[0]["bound"] > off[1]["bound"]
