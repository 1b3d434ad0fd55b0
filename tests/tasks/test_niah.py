"""Needles: rows are read back token by token, and places, filler and distractors have the law that the task states.

Statistical tests have fixed seeds, so they pass always or never; bounds are 5 standard errors, or a p-value of 1e-4.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from mixassay.errors import UserError
from mixassay.runners.training import Training
from mixassay.spec import MixerSpec, ModelSpec, RunSpec, TaskSpec, TrainSpec
from mixassay.tasks import Rows
from mixassay.tasks.niah import ASK, NIAH, SUCCESSORS, chain

SMALL = NIAH(seq_len=40, num_filler=6, num_keys=8, num_values=30)
CELLS = {
    "single": SMALL,
    "multi-key": replace(SMALL, keys=4),
    "multi-value": replace(SMALL, values=4, filler="text"),
    "multi-query": replace(SMALL, keys=4, queries=4, filler="repeated"),
    "all": replace(SMALL, seq_len=64, keys=5, values=3, queries=2, filler="text"),
    "nothing but needles": replace(SMALL, keys=2, filler="needles"),
    "needles of several values": replace(SMALL, seq_len=43, keys=2, values=2, filler="needles"),
    "no filler": replace(SMALL, seq_len=12, keys=4, queries=2),
    "deep": replace(SMALL, keys=3, depth=75),
    "long": replace(SMALL, seq_len=500, keys=3, depth=12.5),
}
each_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)


def rows(cell: NIAH, n: int = 2000) -> Rows:
    return cell.rows(torch.arange(n), seed=0, split="train")


def uniform(ids: Tensor, n: int) -> bool:
    seen = torch.bincount(ids.flatten(), minlength=n).numpy()
    return len(seen) == n and stats.chisquare(seen).pvalue > 1e-4


class Read:
    """A row as a person reads it: what is filler, where the pairs stand, what is asked."""

    def __init__(self, cell: NIAH, row: list[int]) -> None:
        first_key, first_value = 1 + cell.num_filler, 1 + cell.num_filler + cell.num_keys
        self.filler: list[int] = []
        self.pairs: list[tuple[int, int, int, int]] = []  # key, value, where it stands, filler before it
        self.answers: list[tuple[int, int, int, int]] = []  # position, value, needle's place, filler before it
        t = 0
        while row[t] != ASK:
            if row[t] < first_key:
                self.filler.append(row[t])
                t += 1
            else:
                assert first_key <= row[t] < first_value <= row[t + 1]
                self.pairs.append((row[t], row[t + 1], t, len(self.filler)))
                t += 2
        asked = []
        while t < len(row):
            assert row[t] == ASK
            key, t = row[t + 1], t + 1
            asked.append(key)
            right = [pair for pair in self.pairs if pair[0] == key]
            assert len(right) == cell.values
            for j, (_, value, at, before) in enumerate(right):
                assert j == 0 or row[t] == right[j - 1][1], "the value before it is written out"
                self.answers.append((t, value, at, before))
                t += 1
        assert len(set(asked)) == len(asked) == cell.queries
        self.asked = asked


@each_cell
def test_rows_read_as_the_definition_says(cell: NIAH) -> None:
    drawn = rows(cell, 150)
    for n, row in enumerate(drawn.tokens.tolist()):
        read = Read(cell, row)
        positions, values, places, before = map(list, zip(*read.answers, strict=True))
        assert positions == drawn.positions[n].tolist()
        assert values == drawn.labels[n].tolist()
        assert [p - at for p, at in zip(positions, places, strict=True)] == drawn.slices["distance"][n].tolist()
        if cell.filler == "needles":
            assert not read.filler
            before = [at - 2 * sum(pair[0] in read.asked and pair[2] < at for pair in read.pairs) for at in places]
        else:
            keys = Counter(pair[0] for pair in read.pairs)
            assert len(keys) == cell.keys
            assert set(keys.values()) == {cell.values}
            assert len({pair[1] for pair in read.pairs}) == cell.needles, "no value twice"
            hay = len(read.filler)
            assert [100 * b // max(1, hay) for b in before] == drawn.slices["depth"][n].tolist()
            if cell.depth is not None:
                assert before == [round(cell.depth / 100 * hay)]


def test_keys_values_and_places_are_uniform_and_independent() -> None:
    """A place is a gap between two tokens of filler, or an end: eleven of them."""
    cell = replace(SMALL, seq_len=16, keys=2, num_values=8)
    drawn = rows(cell, 20_000)
    hay = 16 - 4 - 2
    key, value = drawn.tokens[:, -1] - 7, drawn.labels[:, 0] - 15
    gap = (drawn.slices["depth"][:, 0] * hay + 99) // 100
    assert uniform(key * 88 + value * 11 + gap, 8 * 8 * 11)
    read = [Read(cell, row) for row in drawn.tokens.tolist()]
    other = torch.tensor([next(pair[3] for pair in r.pairs if pair[0] != r.asked[0]) for r in read])
    assert uniform(gap * 11 + other, 121), "the distractor's place does not tell the needle's"
    tied = [r.pairs[0][0] == r.asked[0] for r in read if r.pairs[0][3] == r.pairs[1][3]]
    assert abs(sum(tied) / len(tied) - 0.5) < 5 * 0.5 / len(tied) ** 0.5, "which of two at one place comes first"


def test_values_of_a_key_are_asked_from_left_to_right_wherever_they_stand() -> None:
    drawn = rows(replace(SMALL, seq_len=64, values=3), 3000)
    distance = drawn.slices["distance"]
    assert (distance.diff(dim=1) < 1).all(), "a later needle is nearer by two at least, asked one later"
    assert uniform(torch.stack([drawn.labels[:, j] - 15 for j in range(3)], dim=1), 30)


@pytest.mark.parametrize("keys", [1, 5])
@pytest.mark.parametrize("depth", [0, 25, 100])
def test_depth_places_the_needle_that_is_asked_for(keys: int, depth: float) -> None:
    cell = replace(SMALL, seq_len=64, keys=keys, depth=depth)
    hay = 64 - 2 * keys - 2
    drawn = rows(cell, 300)
    assert set(drawn.slices["depth"].flatten().tolist()) == {100 * round(depth / 100 * hay) // hay}
    others = [pair[3] for row in drawn.tokens.tolist() for pair in Read(cell, row).pairs if pair[0] != row[-1]]
    assert len(set(others)) > hay / 2 or keys == 1, "and no other"


def test_filler_goes_on_behind_a_needle() -> None:
    for filler in ("repeated", "random", "text"):
        cell = replace(SMALL, seq_len=64, keys=3, filler=filler)
        found = [Read(cell, row).filler for row in rows(cell, 400).tokens.tolist()]
        ids = torch.tensor(found) - 1
        assert ids.shape == (400, 64 - 6 - 2)
        if filler == "repeated":
            assert torch.equal(ids, (torch.arange(56) % 6).expand(400, -1))
        if filler == "random":
            assert uniform(ids, 6)
            assert uniform(ids[:, ::2] * 6 + ids[:, 1::2], 36)


def test_text_is_a_chain_of_few_bigrams_with_frequent_and_rare_ids() -> None:
    cell = NIAH(seq_len=402, num_filler=100, filler="text")
    ids = torch.tensor([Read(cell, row).filler for row in rows(cell, 300).tokens.tolist()]) - 1
    follows, edges = chain(100, torch.device("cpu"))
    assert torch.equal(edges, edges.sort().values)
    allowed = {(a, b) for a, some in enumerate(follows.view(100, SUCCESSORS).tolist()) for b in some}
    seen = Counter(zip(ids[:, :-1].flatten().tolist(), ids[:, 1:].flatten().tolist(), strict=True))
    assert set(seen) <= allowed
    assert len(allowed) < 0.15 * 100**2
    zipf = torch.tensor([1 / (rank + 1) for rank in range(100)])
    first = torch.bincount(ids[:, 0], minlength=100).double()
    expected = 300 * zipf / zipf.sum()
    assert ((first - expected).square() / expected).sum() < stats.chi2.isf(1e-4, 99)
    most = max(set(ids.flatten().tolist()), key=lambda i: int((ids == i).sum()))
    after = ids[:, 1:][ids[:, :-1] == most]
    law = torch.bincount(follows.view(100, SUCCESSORS)[most], minlength=100).double() / SUCCESSORS
    found = torch.bincount(after, minlength=100).double()
    assert stats.chisquare(found[law > 0].numpy(), (len(after) * law[law > 0]).numpy()).pvalue > 1e-4


def test_distractor_pairs_are_of_other_keys_and_uniform() -> None:
    drawn = rows(replace(SMALL, seq_len=42, filler="needles"), 1500).tokens
    keys, values, asked = drawn[:, 0:40:2], drawn[:, 1:40:2], drawn[:, -1:]
    assert ((keys == asked).sum(1) == 1).all()
    others = keys[keys != asked].view(1500, 19)
    assert uniform(others - 7 - (others > asked).long(), 7), "its place among the keys that are allowed"
    assert uniform(values - 15, 30)


def test_a_learned_position_table_reaches_the_longest_test_rows_and_is_not_trained_there() -> None:
    cells = {"train_cells": ({"seq_len": 16},), "eval_cells": ({"seq_len": 16}, {"seq_len": 40})}
    spec = RunSpec(
        suite="niah",
        seed=0,
        task=TaskSpec(name="niah", valid_examples=5, test_examples=5, **cells),
        mixer=MixerSpec(name="attention"),
        model=ModelSpec(d_model=8, positions="learned"),
        train=TrainSpec(steps=4, batch_size=4, lr=1e-2),
    )
    kept: dict[str, Tensor] = {}
    training = Training([spec], "cpu", keep=lambda _, weights: kept.update(weights))
    before = training.stack.weights(0)["position.weight"].clone()
    while training.members:
        training.advance()
        training.settle()
    alike = torch.nn.functional.cosine_similarity(before, kept["position.weight"], dim=1)
    assert alike.shape == (40,)
    assert (alike[16:] > 1 - 1e-6).all(), "weight decay alone"
    assert (alike[:16] < 1 - 1e-3).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keys": 0}, "keys must be at least 1, got 0"),
        ({"queries": 2}, "queries=2 is more than keys=1"),
        ({"filler": "prose"}, "filler must be one of ('repeated', 'random', 'text', 'needles'), got \"prose\""),
        ({"keys": 65}, "keys=65 needs num_keys >= 65, got 64"),
        ({"keys": 64, "filler": "needles"}, "keys=64 needs num_keys >= 65, got 64"),
        ({"keys": 10, "values": 10}, "100 needles need num_values >= 100, got 64"),
        ({"keys": 2, "seq_len": 5}, "2 needles and 1 questions need seq_len from 6 to 2**24, got 5"),
        (
            {"filler": "needles", "seq_len": 31},
            'filler "needles" comes in pairs, but seq_len=31 leaves 27 tokens for it',
        ),
        ({"depth": 101}, "depth is per cent of the filler, 0 to 100, got 101"),
        ({"depth": 50, "values": 2}, "depth places the one needle that is asked for, but queries x values is 2"),
        ({"num_filler": 2**31}, "vocab_size must be at most 2**31, got 2147483777"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        NIAH(**wrong)
    assert str(error.value) == f"niah: {message}"
