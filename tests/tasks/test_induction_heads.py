"""Induction heads: the token behind the first trigger, wherever it stands."""

from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks.induction_heads import InductionHeads


@pytest.mark.parametrize(("V", "T"), [(16, 256), (3, 3), (4, 10)])
def test_rows_read_as_the_definition_says(V: int, T: int) -> None:
    drawn = InductionHeads(vocab_size=V, seq_len=T).rows(torch.arange(300), seed=0, split="train")
    for n, row in enumerate(drawn.tokens.tolist()):
        assert row.count(V - 1) == 2
        first = row.index(V - 1)
        assert row[-1] == V - 1
        assert first < T - 2, "something stands behind it"
        assert drawn.positions[n].tolist() == [T - 1]
        assert drawn.labels[n].tolist() == [row[first + 1]]
        assert drawn.slices["distance"][n].tolist() == [T - 1 - first]


def test_tokens_and_places_are_uniform() -> None:
    drawn = InductionHeads(vocab_size=5, seq_len=8).rows(torch.arange(20_000), seed=0, split="train")
    first = 7 - drawn.slices["distance"][:, 0]
    other = drawn.tokens.gather(1, (first[:, None] + 3) % 7)[:, 0]
    kinds = first * 16 + drawn.labels[:, 0] * 4 + other
    assert stats.chisquare(torch.bincount(kinds, minlength=96).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 2}, "vocab_size must be from 3 to 2**31, got 2"),
        ({"seq_len": 2}, "seq_len must be at least 3, got 2"),
    ],
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        InductionHeads(**wrong)
    assert str(error.value) == f"induction_heads: {message}"
