"""Selective copying: what is not blank comes back in order, from uniform places."""

from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows
from mixassay.tasks.selective_copying import SelectiveCopying

CELLS = [
    SelectiveCopying(),
    SelectiveCopying(seq_len=4096),
    SelectiveCopying(vocab_size=4, seq_len=3, num_copy=1),
    SelectiveCopying(vocab_size=5, seq_len=41, num_copy=20),
]


def rows(cell: SelectiveCopying, n: int = 2000) -> Rows:
    return cell.rows(torch.arange(n), seed=0, split="train")


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.seq_len}-{c.num_copy}")
def test_rows_read_as_the_definition_says(cell: SelectiveCopying) -> None:
    drawn, blank = rows(cell, 60), cell.vocab_size - 2
    for n, (row, labels) in enumerate(zip(drawn.tokens.tolist(), drawn.targets().tolist(), strict=True)):
        where = row.index(blank + 1)
        places = [t for t in range(where) if row[t] != blank]
        assert len(places) == cell.num_copy
        assert row[where + 1 :] == [blank] * cell.num_copy
        assert labels == [IGNORE] * (where + 1) + [row[t] for t in places]
        assert drawn.slices["distance"][n].tolist() == [where + 1 + j - t for j, t in enumerate(places)]
        assert drawn.slices["order"][n].tolist() == list(range(cell.num_copy))


def test_tokens_and_places_are_uniform() -> None:
    """All ways to choose 2 of 6 places are as likely; the last place is none that a token always has."""
    cell = SelectiveCopying(vocab_size=5, seq_len=9, num_copy=2)
    drawn = rows(cell, 30_000)
    a, b = (9 - 3 + 1 + j - drawn.slices["distance"][:, j] for j in range(2))
    kinds = (a * 6 + b) * 9 + drawn.labels @ torch.tensor([3, 1])
    seen = torch.bincount(kinds, minlength=36 * 9).view(36, 9)
    assert (seen.sum(1) > 0).sum() == 15
    assert stats.chisquare(seen[seen.sum(1) > 0].flatten().numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 3}, "vocab_size must be from 4 to 2**31, got 3"),
        ({"num_copy": 0}, "num_copy must be at least 1, got 0"),
        ({"seq_len": 32}, "num_copy=16 needs seq_len >= 33, got 32"),
    ],
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        SelectiveCopying(**wrong)
    assert str(error.value) == f"selective_copying: {message}"
