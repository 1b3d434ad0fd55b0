"""Parity: labels against sums, lengths and bits by their law."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows
from mixassay.tasks.parity import PAD, Parity


def rows(cell: Parity, n: int = 2000) -> Rows:
    return cell.rows(torch.arange(n), seed=0, split="train")


@pytest.mark.parametrize("cell", [Parity(), Parity(min_len=40, seq_len=256), Parity(min_len=1, seq_len=1)])
def test_labels_are_sums_of_the_bits(cell: Parity) -> None:
    end, every = rows(cell, 300), rows(replace(cell, ask="every"), 300)
    for row, (at,), (label,) in zip(end.tokens.tolist(), end.positions.tolist(), end.labels.tolist(), strict=True):
        bits = [x for x in row if x != PAD]
        assert row == bits + [PAD] * (cell.seq_len - len(bits)), "padding is behind"
        assert at == len(bits) - 1
        assert label == sum(bits) % 2
        assert cell.min_len <= len(bits) <= cell.seq_len
    for row, labels in zip(every.tokens.tolist(), every.targets().tolist(), strict=True):
        assert labels == [IGNORE if x == PAD else sum(row[: t + 1]) % 2 for t, x in enumerate(row)]


def test_lengths_and_bits_are_uniform() -> None:
    drawn = rows(Parity(min_len=3, seq_len=12), 10_000)
    length = drawn.slices["length"][:, 0]
    assert stats.chisquare(torch.bincount(length - 3, minlength=10).numpy()).pvalue > 1e-4
    first = drawn.tokens[:, :3] @ torch.tensor([4, 2, 1])
    assert stats.chisquare(torch.bincount(first * 10 + length - 3, minlength=80).numpy()).pvalue > 1e-4
    assert abs(drawn.labels.double().mean() - 0.5) < 5 * 0.5 / 100


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_len": 41}, "lengths must be 1 <= min_len <= seq_len <= 2**20, got 41 and 40"),
        ({"ask": "last"}, 'ask must be "end" or "every", got "last"'),
    ],
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Parity(**wrong)
    assert str(error.value) == f"parity: {message}"
