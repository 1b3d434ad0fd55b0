"""Modular arithmetic: labels against Python's own arithmetic, digits and operators by their law."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows
from mixassay.tasks.modular_arithmetic import ModularArithmetic


def rows(cell: ModularArithmetic, n: int = 2000) -> Rows:
    return cell.rows(torch.arange(n), seed=0, split="train")


def written(row: list[int], m: int) -> str:
    """The expression as one writes it, and `=`."""
    return "".join(str(x) if x < m else "+-*=."[x - m] for x in row).rstrip(".")


@pytest.mark.parametrize("m", [2, 5, 10])
@pytest.mark.parametrize("lengths", [(2, 2), (2, 40), (40, 128)])
def test_labels_are_what_python_computes(m: int, lengths: tuple[int, int]) -> None:
    cell = ModularArithmetic(modulus=m, min_len=lengths[0], seq_len=lengths[1])
    end, every = rows(cell, 100), rows(replace(cell, ask="every"), 100)
    for row, (at,), (label,) in zip(end.tokens.tolist(), end.positions.tolist(), end.labels.tolist(), strict=True):
        text = written(row, m)
        assert lengths[0] <= len(text) <= lengths[1]
        assert text[-1] == "="
        assert text.count("=") == 1
        assert at == len(text) - 1
        assert label == eval(text[:-1]) % m
    for row, labels in zip(every.tokens.tolist(), every.targets().tolist(), strict=True):
        text = written(row, m)
        whole = text.replace("=", "")
        expected = [eval(text[: t + 1]) % m if c.isdigit() else IGNORE for t, c in enumerate(text)]
        expected[len(text) - 1] = eval(whole) % m
        assert labels == expected + [IGNORE] * (cell.seq_len - len(text))


def test_moduli_of_several_digits_do_not_overflow() -> None:
    m = 2**20
    drawn = rows(ModularArithmetic(modulus=m, min_len=60, seq_len=60), 20)
    for row, label in zip(drawn.tokens.tolist(), drawn.labels[:, 0].tolist(), strict=True):
        assert label == eval("".join(str(x) if x < m else "+-*"[x - m] for x in row[:-1])) % m


def test_digits_operators_and_lengths_are_uniform() -> None:
    drawn = rows(ModularArithmetic(min_len=6, seq_len=14), 20_000)
    digits, operators = drawn.tokens[:, [0, 2, 4]], drawn.tokens[:, [1, 3]] - 5
    both = digits @ torch.tensor([25, 5, 1]) * 9 + operators @ torch.tensor([3, 1])
    length = (drawn.slices["length"][:, 0] - 6) // 2
    for ids, n in ((both, 1125), (length, 5), (operators[:, 0] * 5 + length, 15)):
        assert stats.chisquare(torch.bincount(ids, minlength=n).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(("length", "zero"), [(2, 1 / 5), (4, 2 / 3 / 5 + 9 / 25 / 3), (40, 1 / 5)])
def test_zero_is_more_frequent_in_short_expressions(length: int, zero: float) -> None:
    """Of two digits, one third are multiplied, and 9 in 25 products are 0."""
    labels = rows(ModularArithmetic(min_len=length, seq_len=length), 20_000).labels[:, 0]
    law = 20_000 * torch.tensor([zero, *[(1 - zero) / 4] * 4], dtype=torch.float64)
    assert stats.chisquare(torch.bincount(labels, minlength=5).numpy(), law.numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"modulus": 1}, "modulus must be from 2 to 2**20, got 1"),
        (
            {"seq_len": 39},
            "lengths must be even (digits, operators between them, =) and 2 <= min_len <= seq_len <= 2**20,"
            " got 4 and 39",
        ),
        ({"ask": "last"}, 'ask must be "end" or "every", got "last"'),
    ],
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        ModularArithmetic(**wrong)
    assert str(error.value) == f"modular_arithmetic: {message}"
