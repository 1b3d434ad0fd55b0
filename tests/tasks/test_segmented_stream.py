"""Streams: pure functions of their index, and regimes, noise, ramps and needles as asked for.

Statistical tests have fixed seeds, so they pass always or never; bounds are 5 standard errors, or a p-value of 1e-4.
"""

import doctest
import hashlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks.streams import segmented
from mixassay.tasks.streams.lengths import Law, segment_lengths
from mixassay.tasks.streams.normal import ONE, direction, normal
from mixassay.tasks.streams.segmented import SegmentedStream, Stream

SMALL = SegmentedStream(tokens=80, segments=5, d_key=6, d_value=4)
KINDS = {
    "small": SMALL,
    "ramp": replace(SMALL, ramp=6, angle=60.0, lengths="fixed"),
    "pool": replace(SMALL, pool=3, lengths="pareto"),
    "needles": replace(SMALL, needles=0.2, sigma=1.5),
    "no regime": replace(SMALL, sigma=None),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def same(a: Stream, b: Stream) -> bool:
    return all(map(torch.equal, a, b))


def some(stream: Stream, at: Any) -> Stream:
    return Stream(*(x[at] for x in stream))


@each_kind
def test_a_stream_is_the_same_in_any_company(kind: SegmentedStream) -> None:
    whole = kind.draw(torch.arange(30), seed=3)
    shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert same(kind.draw(shuffled, seed=3), some(whole, shuffled))
    assert same(kind.draw(torch.tensor([7]), seed=3), some(whole, slice(7, 8)))
    assert same(kind.draw(torch.zeros(2, dtype=torch.int64), seed=torch.tensor([3, 4])),
                Stream(*(torch.cat(x) for x in zip(some(whole, slice(1)), kind.draw(torch.tensor([0]), seed=4),
                                                   strict=True))))  # fmt: skip


def test_splits_seeds_and_fields_give_other_streams() -> None:
    other: dict[str, Any] = {"lengths": "fixed", "angle": 80.0, "sigma": 0.3, "pool": 3, "needles": 0.1}
    other |= {f.name: getattr(SMALL, f.name) + 1 for f in fields(SegmentedStream) if f.name not in other}
    kinds = [SMALL, *(replace(SMALL, **{name: value}) for name, value in other.items())]
    firsts = [kind.draw(torch.tensor([0]), seed=0).k[0, :3, 0].tolist() for kind in kinds]
    firsts += [SMALL.draw(torch.tensor([0]), seed=0, split=split).k[0, :3, 0].tolist() for split in ("train", "valid")]
    firsts += [SMALL.draw(torch.tensor([i]), seed=s).k[0, :3, 0].tolist() for i, s in ((1, 0), (0, 1), (2**61 - 1, 0))]
    assert len({tuple(x) for x in firsts}) == len(firsts)
    assert same(SMALL.draw(torch.arange(2), seed=0), replace(SMALL, angle=90).draw(torch.arange(2), seed=0)), "1 is 1.0"


def test_streams_of_version_1_are_pinned() -> None:
    """If this fails, the same arguments give other streams: raise `SegmentedStream.version`, and pin the new ones."""
    assert SegmentedStream.version == 1
    found = hashlib.sha256()
    for kind in KINDS.values():
        stream = kind.draw(torch.tensor([0, 2**33]), seed=5, split="valid")
        for x in (stream.k, stream.v, stream.segment.double(), stream.needle.double()):
            found.update(x.numpy().astype("<f8").tobytes())
    assert found.hexdigest()[:16] == "d81e10c6340143c2"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_kind
def test_streams_are_the_same_bits_on_the_gpu(kind: SegmentedStream) -> None:
    index = torch.arange(200) * 7919
    there = kind.draw(index.cuda(), seed=5)
    assert same(Stream(*(x.cpu() for x in there)), kind.draw(index, seed=5))


@each_kind
def test_shapes_and_unit_tokens(kind: SegmentedStream) -> None:
    stream = kind.draw(torch.arange(50), seed=0)
    assert stream.k.shape == (50, 80, 6)
    assert stream.v.shape == (50, 80, 4)
    for x in (stream.k, stream.v):
        assert x.dtype == torch.float64
        assert (x.norm(dim=2) - 1).abs().max() < 1e-12
    assert (stream.segment[:, 0] == 0).all()
    assert (stream.segment[:, -1] == 4).all()
    assert (stream.changes.sum(1) == 5).all()
    lengths = torch.stack([(stream.segment == j).sum(1) for j in range(5)], dim=1)
    assert lengths.min() >= 4
    assert kind.lengths != "fixed" or (lengths == 16).all()


@pytest.mark.parametrize("angle", [0.0, 20.0, 90.0, 180.0])
def test_means_turn_by_the_angle_about_a_random_axis(angle: float) -> None:
    stream = replace(SMALL, sigma=0.0, angle=angle).draw(torch.arange(1000), seed=0)
    for x in (stream.k, stream.v):
        means = x[stream.changes].view(1000, 5, -1)
        cosine = (means[:, 1:] * means[:, :-1]).sum(2)
        assert (cosine - np.cos(np.radians(angle))).abs().max() < 1e-5
        assert (x.diff(dim=1)[stream.segment.diff(dim=1) == 0]).abs().max() == 0, "no noise, no change"
        assert means[:, 3].mean(0).abs().max() < 5 / 1000**0.5, "isotropic"
        if 0 < angle < 180:
            aside = means[:, 1] - np.cos(np.radians(angle)) * means[:, 0]
            assert aside.mean(0).abs().max() < 5 / 1000**0.5


@pytest.mark.parametrize("sigma", [0.2, 1.0])
def test_noise_has_its_norm(sigma: float) -> None:
    """Against numpy's normal noise: the cosine of two tokens of one regime, two samples."""
    stream = replace(SMALL, sigma=sigma, segments=1, d_key=16).draw(torch.arange(50), seed=0)
    k = stream.k.numpy()
    rng = np.random.default_rng(0)
    mean = np.eye(16)[0]
    x = mean + sigma * rng.normal(size=(4000, 2, 16)) / 4
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    assert stats.kstest((k[:, ::2] * k[:, 1::2]).sum(2).ravel(), (x[:, 0] * x[:, 1]).sum(1)).pvalue > 1e-4


def test_a_ramp_leads_over() -> None:
    kind = KINDS["ramp"]
    bare = replace(kind, sigma=0.0).draw(torch.arange(20), seed=0)
    assert kind.angle == 60
    for x in (bare.k, bare.v):
        segments = x.view(20, 5, 16, -1)
        new, old = segments[:, 1:, -1:], segments[:, :-1, -1:]
        f = torch.arange(1, 7) / 7
        expected = (1 - f)[:, None] * old + f[:, None] * new
        torch.testing.assert_close(
            segments[:, 1:, :6], expected / expected.norm(dim=3, keepdim=True), rtol=0, atol=1e-6
        )
        assert (segments[:, 1:, 6:] - new).abs().max() == 0
        assert (segments[:, 0] - segments[:, 0, :1]).abs().max() == 0, "nothing leads over to the first"


def test_a_pool_recurs() -> None:
    stream = replace(KINDS["pool"], sigma=0.0).draw(torch.arange(2000), seed=0)
    means = stream.k[stream.changes].view(2000, 5, 6)
    again = (means[:, :, None] - means[:, None]).abs().amax(3) == 0  # [N, 5, 5]
    assert not again.diagonal(1, 1, 2).any(), "none twice in a row"
    assert max(len({tuple(mean) for mean in row}) for row in means[:100].tolist()) <= 3
    assert abs(again[:, 0, 2].double().mean() - 0.5) < 5 * 0.5 / 2000**0.5


def test_needles_are_unrelated_and_as_many_as_asked() -> None:
    kind = replace(SMALL, needles=0.2, sigma=0.1, segments=1)
    stream = kind.draw(torch.arange(500), seed=0)
    share = stream.needle.double().mean()
    assert abs(share - 0.2) < 5 * (0.16 / 40_000) ** 0.5
    mean = torch.nn.functional.normalize((stream.k * ~stream.needle[..., None]).sum(1), dim=1)
    cosine = (stream.k * mean[:, None]).sum(2)
    assert cosine[~stream.needle].min() > 0.9
    assert abs(cosine[stream.needle].mean()) < 5 / (6 * 8000) ** 0.5 + 1e-2
    assert not SMALL.draw(torch.arange(20), seed=0).needle.any()


def test_without_regimes_tokens_are_random_directions() -> None:
    stream = KINDS["no regime"].draw(torch.arange(500), seed=0)
    k = stream.k.flatten(0, 1)
    assert k.mean(0).abs().max() < 5 / (6 * 40_000) ** 0.5
    assert ((k.T @ k) / 40_000 - torch.eye(6) / 6).abs().max() < 5 / (6 * 40_000**0.5)
    neighbours = (stream.k[:, 1:] * stream.k[:, :-1]).sum(2)
    assert abs(neighbours.mean()) < 5 / (6 * 39_500) ** 0.5


# --- parts


def test_normal_draws_are_normal() -> None:
    x = normal(draws.bits(0, torch.arange(50_000), 1, 4)).double().flatten().numpy() / ONE
    assert stats.kstest(x, "norm").pvalue > 1e-4
    assert abs(stats.kurtosis(x)) < 5 * (24 / len(x)) ** 0.5
    assert np.abs(x).max() < 6.5


def test_normal_is_the_quantile_function() -> None:
    """Exact at the knots, 2^-7 apart; in between the distribution function is linear, off by less than 1e-5."""
    words = torch.cat((torch.arange(2**12), torch.arange(0, 2**32, 4_000_037), 2**31 + torch.arange(2**12)))
    x = normal(words).double().numpy() / ONE
    sign, u = np.where(words.numpy() >> 31, -1, 1), (words.numpy() & 0x7FFFFFFF) / 2**31
    assert (np.sign(x) * sign >= 0).all()
    assert np.abs(2 * stats.norm.cdf(np.abs(x)) - 1 - u).max() < 1e-5
    assert (np.diff(normal(torch.arange(0, 2**31, 1_000_003)).numpy()) > 0).all()


def test_directions_have_length_one() -> None:
    x = normal(draws.bits(1, torch.arange(1000), 2, 12))
    unit = direction(x).double() / ONE
    assert (unit.norm(dim=1) - 1).abs().max() < 1e-6
    cosine = (unit * x.double()).sum(1) / x.double().norm(dim=1)
    assert (cosine - 1).abs().max() < 1e-6


def plain_lengths(rng: np.random.Generator, J: int, total: int, law: Law) -> np.ndarray:
    """One row at a time, in floating point."""
    w = {"fixed": np.ones(J), "geometric": rng.exponential(size=J), "pareto": rng.pareto(1.2, size=J) + 0.05}[law]
    lengths = np.maximum(4, np.floor(w / w.sum() * total).astype(int))
    while lengths.sum() != total:
        at = int(np.argmax(lengths)) if lengths.sum() > total else int(rng.integers(J))
        lengths[at] += 1 if lengths.sum() < total else -1
    return lengths


@pytest.mark.parametrize("law", ["fixed", "geometric", "pareto"])
@pytest.mark.parametrize(("J", "total"), [(1, 9), (8, 512), (32, 512), (8, 32), (5, 23)])
def test_lengths_add_up_and_follow_their_law(J: int, total: int, law: Law) -> None:
    found = segment_lengths(draws.bits(1, torch.arange(1000), 0, 2 * J), J, total, law).numpy()
    assert (found.sum(1) == total).all()
    assert found.min() >= 4
    rng = np.random.default_rng(0)
    plain = np.stack([plain_lengths(rng, J, total, law) for _ in range(1000)])
    for of in (found.max, found.min, lambda axis: np.sort(found, axis=1)[:, J // 2]):
        ours = of(axis=1)
        theirs = {found.max: plain.max, found.min: plain.min}.get(of, lambda axis: np.sort(plain, axis=1)[:, J // 2])(
            axis=1
        )
        error = 5 * ((ours.var() + theirs.var()) / 1000) ** 0.5
        assert abs(ours.mean() - theirs.mean()) <= error
    assert abs(found[:, 0].mean() - total / J) <= 5 * found[:, 0].std() / 1000**0.5, "no place is longer than another"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"segments": 0}, "segments must be at least 1, got 0"),
        ({"segments": 200}, "segments=200 needs tokens from 800 to 2**17, got 512"),
        ({"lengths": "even"}, 'lengths must be "fixed", "geometric" or "pareto", got "even"'),
        ({"angle": 181.0}, "angle must be 0 to 180 degrees, got 181.0"),
        ({"sigma": -0.1}, "sigma must be 0 to 64, or null, got -0.1"),
        ({"ramp": -1}, "ramp must be at least 0, got -1"),
        ({"pool": 1}, "pool must be 0, or at least 2 regimes, got 1"),
        ({"needles": 5.0}, "needles is a share, 0 to 1, got 5.0"),
        ({"d_key": 1}, "d_key must be 2 to 512, got 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_streams_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        SegmentedStream(**wrong)
    assert str(error.value) == f"segmented_stream: {message}"


def test_the_example_in_the_docstring() -> None:
    result = doctest.testmod(segmented)
    assert result.attempted == 3
    assert result.failed == 0


def test_global_generators_neither_matter_nor_move() -> None:
    before: Tensor = torch.get_rng_state()
    first = SMALL.draw(torch.arange(3), seed=0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert same(first, SMALL.draw(torch.arange(3), seed=0))
