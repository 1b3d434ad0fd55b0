"""Compositional recall: all pairs of two sets of keys, each with a value of its own, each asked for once."""

from itertools import product
from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks import Rows
from mixassay.tasks.compositional_recall import CompositionalRecall

CELLS = [
    CompositionalRecall(),
    CompositionalRecall(vocab_size=12, seq_len=24, filler="zero"),  # every slot is taken
    CompositionalRecall(vocab_size=31, seq_len=71, grid=3, filler="random_no_keys"),
    CompositionalRecall(vocab_size=6, seq_len=20, grid=1),
]


def rows(cell: CompositionalRecall, n: int = 2000) -> Rows:
    return cell.rows(torch.arange(n), seed=0, split="train")


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"V{c.vocab_size}-{c.grid}-{c.filler}")
def test_rows_read_as_the_definition_says(cell: CompositionalRecall) -> None:
    drawn, n, W = rows(cell, 200), cell.grid**2, cell.vocab_size // 3
    for at, row in enumerate(drawn.tokens.tolist()):
        triples = [tuple(row[3 * i : 3 * i + 3]) for i in range(n)]
        assert all(1 <= a < W <= b < 2 * W <= v < cell.vocab_size for a, b, v in triples)
        firsts, seconds = {a for a, _, _ in triples}, {b for _, b, _ in triples}
        assert len(firsts) == len(seconds) == cell.grid
        assert {(a, b) for a, b, _ in triples} == set(product(firsts, seconds)), "half a key does not tell"
        assert len({v for _, _, v in triples}) == n
        positions = drawn.positions[at].tolist()
        assert [(row[p - 1], row[p]) for p in positions] == [(a, b) for a, b, _ in triples]
        assert drawn.labels[at].tolist() == [v for _, _, v in triples]
        assert drawn.slices["distance"][at].tolist() == [p - 3 * i - 1 for i, p in enumerate(positions)]
        assert all(p - 1 >= 3 * n and (p - 1) % 3 == 0 for p in positions)
        behind = row[3 * n :]
        if cell.filler == "zero":
            assert sum(x != 0 for x in behind) == 2 * n
        if cell.filler == "random_no_keys":
            assert sum(x in firsts | seconds for x in behind) == 2 * n


def test_the_order_of_triples_and_the_values_are_uniform() -> None:
    cell = CompositionalRecall(vocab_size=12, seq_len=24, filler="zero")
    tokens = rows(cell, 20_000).tokens
    a, b = tokens[:, 0:12:3], tokens[:, 1:12:3]
    which = (a == a[:, :1]).long() * 2 + (b == b[:, :1]).long()  # 3 is the first triple itself
    order = which[:, 1:] @ torch.tensor([9, 3, 1])
    seen = torch.bincount(order)
    assert stats.chisquare(seen[seen > 0].numpy()).pvalue > 1e-4
    assert (seen > 0).sum() == 6
    values = (tokens[:, 2:12:3] - 8) @ torch.tensor([64, 16, 4, 1])
    seen = torch.bincount(values)
    assert (seen > 0).sum() == 24
    assert stats.chisquare(seen[seen > 0].numpy()).pvalue > 1e-4
    assert stats.chisquare(torch.bincount(a.flatten() - 1, minlength=3).numpy()).pvalue > 1e-4
    assert stats.chisquare(torch.bincount(b.flatten() - 4, minlength=4).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grid": 0}, "grid must be at least 1, got 0"),
        ({"grid": 7}, "grid=7 needs seq_len >= 294, got 256"),
        ({"grid": 3, "vocab_size": 26}, "grid=3 needs vocab_size >= 27 and <= 2**31, got 26"),
        ({"filler": "x"}, 'filler must be "zero", "random" or "random_no_keys", got "x"'),
    ],
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        CompositionalRecall(**wrong)
    assert str(error.value) == f"compositional_recall: {message}"
