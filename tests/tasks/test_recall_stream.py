"""Streams of writes: pure functions of their index, and bindings, keys and tags as the definition says."""

import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from mixassay.errors import UserError
from mixassay.tasks.streams.recall import RecallStream, Writes

SMALL = RecallStream(tokens=90, segments=4, keys=5, values=7, tag_key=0.3, tag_value=0.6, d_key=6, d_tag=4)


def same(a: Writes, b: Writes) -> bool:
    return all(map(torch.equal, a, b))


def test_a_stream_is_the_same_in_any_company() -> None:
    whole = SMALL.draw(torch.arange(20), seed=3)
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert same(SMALL.draw(shuffled, seed=3), Writes(*(x[shuffled] for x in whole)))
    assert same(SMALL.draw(torch.tensor([7]), seed=torch.tensor([3])), Writes(*(x[7:8] for x in whole)))
    for other in (SMALL.draw(torch.arange(20), seed=4), SMALL.draw(torch.arange(20), seed=3, split="valid")):
        assert not (other.k == whole.k).all(2).any()


def test_every_field_gives_other_streams() -> None:
    first = SMALL.draw(torch.arange(3), seed=0).value
    more: dict[str, Any] = {"lengths": "fixed", "tag_key": 0.4, "tag_value": 0.5}
    for field in fields(SMALL):
        value = more.get(field.name) or getattr(SMALL, field.name) + 1
        assert not torch.equal(replace(SMALL, **{field.name: value}).draw(torch.arange(3), seed=0).value, first)


def test_streams_of_version_1_are_pinned() -> None:
    """If this fails, the same arguments give other streams: raise `RecallStream.version`, and pin the new ones."""
    assert RecallStream.version == 1
    found = hashlib.sha256()
    for x in SMALL.draw(torch.tensor([0, 2**33]), seed=5, split="valid"):
        found.update(x.double().numpy().astype("<f8").tobytes())
    assert found.hexdigest()[:16] == "95680503dda20a0d"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_streams_are_the_same_bits_on_the_gpu() -> None:
    index = torch.arange(200) * 7919
    assert same(Writes(*(x.cpu() for x in SMALL.draw(index.cuda(), seed=5))), SMALL.draw(index, seed=5))


def test_writes_are_what_the_definition_says() -> None:
    drawn = SMALL.draw(torch.arange(100), seed=0)
    assert drawn.k.shape == drawn.question.shape == (100, 90, 10)
    assert drawn.v.shape == (100, 90, 11)
    for x in (drawn.k, drawn.v, drawn.question):
        assert (x.norm(dim=2) - 1).abs().max() < 1e-12
    assert (drawn.k[..., :4].square().sum(2) - 0.3).abs().max() < 1e-12
    assert (drawn.v[..., :4].square().sum(2) - 0.6).abs().max() < 1e-12
    assert torch.equal(drawn.v[..., 4:].argmax(2), drawn.value)
    assert ((drawn.question * drawn.k).sum(2) - 0.7**0.5).abs().max() < 1e-12, "asks for the key, without the tag"
    assert not drawn.question[..., :4].any()
    for n in range(20):
        bound: dict[tuple[int, int], int] = {}
        tags: dict[int, list[float]] = {}
        for j in range(4):
            here = drawn.segment[n] == j
            keys = drawn.key[n][here].tolist()
            assert len(keys) >= 4
            for start in range(0, len(keys), 5):
                assert len(set(keys[start : start + 5])) == len(keys[start : start + 5]), "permutations of the keys"
            for key, value in zip(keys, drawn.value[n][here].tolist(), strict=True):
                assert bound.setdefault((j, key), value) == value, "one value in a segment"
            tags[j] = drawn.k[n][here][0, :4].tolist()
            assert drawn.k[n][here][:, :4].unique(dim=0).shape[0] == 1, "one tag"
        assert len({tuple(tag) for tag in tags.values()}) == 4


def test_values_are_uniform_and_bound_anew() -> None:
    drawn = replace(SMALL, tokens=32, segments=2, lengths="fixed", keys=16).draw(torch.arange(2000), seed=0)
    counts = torch.bincount(drawn.value.flatten(), minlength=7).double()
    assert (counts / counts.sum() - 1 / 7).abs().max() < 5 * (6 / 49 / 64_000) ** 0.5
    first, second = (drawn.value[:, at].gather(1, drawn.key[:, at].argsort(1)) for at in (slice(16), slice(16, 32)))
    share = (first == second).double().mean()
    assert abs(share - 1 / 7) < 5 * (6 / 49 / 32_000) ** 0.5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keys": 0}, "keys must be at least 1, got 0"),
        ({"segments": 100}, "segments=100 needs tokens from 400 to 2**17, got 256"),
        ({"lengths": "even"}, 'lengths must be "fixed", "geometric" or "pareto", got "even"'),
        ({"tag_key": 1.5}, "tag_key is a share, 0 to 1, got 1.5"),
        ({"d_tag": 1}, "d_tag must be 2 to 512, got 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_streams_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        RecallStream(**wrong)
    assert str(error.value) == f"recall_stream: {message}"
