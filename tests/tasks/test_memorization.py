"""Memorization: one map for all rows, splits and seeds, of different values."""

from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks import SPLITS, Rows, Split
from mixassay.tasks.memorization import Memorization, facts

CPU = torch.device("cpu")


def rows(cell: Memorization, seed: int = 0, split: Split = "train") -> Rows:
    return cell.rows(torch.arange(500), seed=seed, split=split)


@pytest.mark.parametrize("cell", [Memorization(), Memorization(vocab_size=8, seq_len=10)])
def test_all_rows_share_one_map_that_none_shows(cell: Memorization) -> None:
    K, known = (cell.vocab_size - 1) // 2, dict[int, int]()
    for split in SPLITS:
        for seed in (0, 7):
            drawn = rows(cell, seed, split)
            assert (drawn.tokens[:, 1::2] == cell.vocab_size - 1).all()
            assert torch.equal(drawn.positions, torch.arange(1, cell.seq_len, 2).expand_as(drawn.positions))
            for key, value in zip(
                drawn.tokens[:, ::2].flatten().tolist(), drawn.labels.flatten().tolist(), strict=True
            ):
                assert known.setdefault(key, value) == value
                assert key < K <= value < cell.vocab_size - 1
    assert len(known) == K == len(set(known.values())), "every key, with a value of its own"


def test_mad_has_127_keys() -> None:
    assert len(facts(256, CPU)) == 127


def test_keys_are_uniform_and_the_map_is_random() -> None:
    keys = rows(Memorization(vocab_size=21)).tokens[:, ::2]
    assert stats.chisquare(torch.bincount(keys.flatten(), minlength=10).numpy()).pvalue > 1e-4
    big = facts(8192, CPU).double()
    assert abs(torch.corrcoef(torch.stack((torch.arange(len(big)).double(), big)))[0, 1]) < 5 / len(big) ** 0.5
    assert not torch.equal(facts(256, CPU) - 127, facts(258, CPU)[:127] - 128)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 4}, "vocab_size must be from 5 to 2**24, got 4"),
        ({"seq_len": 5}, "seq_len must be even and at least 2, got 5"),
    ],
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        Memorization(**wrong)
    assert str(error.value) == f"memorization: {message}"
