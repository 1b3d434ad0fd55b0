"""Fuzzy recall: rows are read motif by motif, and motifs have the law that the task states.

Statistical tests have fixed seeds, so they pass always or never; bounds are 5 standard errors, or a p-value of 1e-4.
"""

from collections import Counter
from math import perm
from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows, Split
from mixassay.tasks.fuzzy_recall import FuzzyRecall

CELLS = {
    "default": FuzzyRecall(),
    "short": FuzzyRecall(vocab_size=8, seq_len=16, key_len=2, value_len=2),
    "single ids": FuzzyRecall(vocab_size=8, seq_len=21, key_len=1, value_len=1),
    "two pairs": FuzzyRecall(seq_len=12),
    "long values": FuzzyRecall(vocab_size=33, seq_len=60, key_len=2, value_len=5),
}
each_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
Motif = tuple[int, ...]


def rows(cell: FuzzyRecall, n: int = 300, split: Split = "test") -> Rows:
    return cell.rows(torch.arange(n), seed=0, split=split)


def read(cell: FuzzyRecall, row: list[int]) -> list[tuple[int, Motif, Motif]]:
    """(where, key, value) of every pair. Keys and values have ids of their own: a motif ends where the kind changes."""
    pad, found, t = cell.vocab_size - 1, [], 0
    while row[t] == pad:
        t += 1
    while t < len(row):
        ends = []
        for of_key in (True, False):
            end = ends[-1] if ends else t
            while end < len(row) and (row[end] < cell.num_keys) == of_key:
                end += 1
            ends.append(end)
        found.append((t, tuple(row[t : ends[0]]), tuple(row[ends[0] : ends[1]])))
        t = ends[1]
    return found


@each_cell
@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_read_as_the_definition_says(cell: FuzzyRecall, split: Split) -> None:
    drawn = rows(cell, 150, split)
    for row, labels, since in zip(
        drawn.tokens.tolist(), drawn.targets().tolist(), drawn.slices["distance"].tolist(), strict=True
    ):
        bound: dict[Motif, Motif] = {}
        last: dict[Motif, int] = {}
        expected, distance = [IGNORE] * cell.seq_len, [0] * cell.seq_len
        found = read(cell, row)
        for t, key, value in found:
            assert 1 <= len(key) <= cell.key_len
            assert split == "train" or len(key) == cell.key_len
            assert 1 <= len(value) <= cell.value_len
            for motif in (key, value):
                assert len(set(motif)) == len(motif), "no id twice in a motif"
            assert bound.setdefault(key, value) == value, "one value in a row"
            if key in last:
                first = t + len(key) - 1
                expected[first : first + len(value)] = value
                distance[first : first + len(value)] = [t - last[key]] * len(value)
            last[key] = t
        assert found[-1][1] in [key for _, key, _ in found[:-1]], "the last key has been shown"
        assert cell.vocab_size - 1 not in row[found[0][0] :], "padding is in front"
        assert since == distance[:-1]
        if split == "test":
            assert labels == expected
        else:
            assert labels[:-1] == [IGNORE if x == cell.vocab_size - 1 else x for x in row[1:]]


@each_cell
def test_rows_are_full(cell: FuzzyRecall) -> None:
    for row in rows(cell).tokens.tolist():
        assert row.count(cell.vocab_size - 1) < cell.key_len + cell.value_len


def test_motifs_are_uniform_within_their_length() -> None:
    """Of the first pair of long rows, which always fits: lengths, then ids."""
    cell = FuzzyRecall(vocab_size=8, seq_len=60, key_len=2, value_len=3)  # 3 ids for keys, 4 for values
    found = [read(cell, row)[0] for row in rows(cell, 20_000, "train").tokens.tolist()]
    keys, values = Counter(key for _, key, _ in found), Counter(value for _, _, value in found)
    for seen, ids, longest in ((keys, 3, 2), (values, 4, 3)):
        law = {n: 20_000 / longest / perm(ids, n) for n in range(1, longest + 1)}
        assert len(seen) == sum(perm(ids, n) for n in law)
        expected = [law[len(motif)] for motif in seen]
        assert stats.chisquare(list(seen.values()), expected).pvalue > 1e-4


def test_the_pair_that_comes_back_may_stand_anywhere() -> None:
    """Where keys are so many that no other one is repeated."""
    cell = FuzzyRecall(vocab_size=801, seq_len=62, key_len=1, value_len=1)
    places = []
    for row in rows(cell, 6000).tokens.tolist():
        keys = [key for _, key, _ in read(cell, row)]
        assert len(keys) == 31
        if len(set(keys)) == 30:
            places.append(keys.index(keys[-1]))
    assert stats.chisquare(torch.bincount(torch.tensor(places), minlength=30).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key_len": 0}, "key_len must be at least 1, got 0"),
        ({"value_len": 0}, "value_len must be at least 1, got 0"),
        ({"vocab_size": 6}, "motifs of this length need vocab_size >= 7, got 6"),
        ({"vocab_size": 10_001}, "5000 ids make too many keys of 3: at most 2**32"),
        ({"seq_len": 11}, "two pairs need seq_len >= 12, got 11"),
        ({"train_on": "x"}, 'train_on must be "all" or "answers", got "x"'),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        FuzzyRecall(**wrong)
    assert str(error.value) == f"fuzzy_recall: {message}"
