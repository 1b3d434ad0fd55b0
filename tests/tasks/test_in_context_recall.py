"""In-context recall, plain and noisy: rows are read pair by pair, and have the law of MAD's generator.

Statistical tests have fixed seeds, so they pass always or never; bounds are 5 standard errors, or a p-value of 1e-4.
"""

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows, Split, Task
from mixassay.tasks.in_context_recall import InContextRecall
from mixassay.tasks.noisy_recall import NoisyRecall

CELLS: dict[str, Task] = {
    "default": InContextRecall(),
    "answers": InContextRecall(vocab_size=5, seq_len=30, train_on="answers"),
    "two pairs": InContextRecall(seq_len=4),
    "noisy": NoisyRecall(),
    "noisier": NoisyRecall(vocab_size=9, num_noise=2, noise=0.8, seq_len=40, train_on="answers"),
    "nothing but noise": NoisyRecall(noise=1, seq_len=20),
}
each_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)


def rows(cell: Task, n: int = 2000, split: Split = "test") -> Rows:
    return cell.rows(torch.arange(n), seed=0, split=split)


def uniform(ids: Tensor, n: int) -> bool:
    seen = torch.bincount(ids.flatten(), minlength=n).numpy()
    return len(seen) == n and stats.chisquare(seen).pvalue > 1e-4


def pairs(cell: Task, drawn: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and whether a pair is noise, [N, P]."""
    keys, values = drawn.tokens[:, ::2], drawn.tokens[:, 1::2]
    return keys, values, keys >= cell.vocab_size - getattr(cell, "num_noise", 0)


@each_cell
def test_rows_read_as_the_definition_says(cell: Task) -> None:
    quiet = cell.vocab_size - getattr(cell, "num_noise", 0)
    drawn = rows(cell, 200)
    for row, labels, distance in zip(
        drawn.tokens.tolist(), drawn.targets().tolist(), drawn.slices["distance"].tolist(), strict=True
    ):
        bound: dict[int, int] = {}
        last: dict[int, int] = {}
        for t in range(0, cell.seq_len, 2):
            key, value = row[t : t + 2]
            assert labels[t + 1] == IGNORE, "nothing is asked at a value"
            if key >= quiet:
                assert value >= quiet
                assert labels[t] == IGNORE
                continue
            assert key < quiet // 2 <= value < quiet
            assert bound.setdefault(key, value) == value, "one value in a row"
            assert labels[t] == (value if key in last else IGNORE)
            if t:
                assert distance[t // 2 - 1] == (t - last[key] if key in last else 0)
            last[key] = t
        assert labels[cell.seq_len - 2] != IGNORE, "the last pair repeats one"
        assert sum(key < quiet for key in row[:-2:2]) >= 1


@each_cell
def test_training_rows_are_of_the_same_kind_with_all_next_tokens_asked(cell: Task) -> None:
    drawn = rows(cell, 100, "train")
    every = getattr(cell, "train_on", "") == "all"
    assert drawn.labels.shape[1] == (cell.seq_len - 1 if every else cell.seq_len // 2 - 1)
    if every:
        assert torch.equal(drawn.targets()[:, :-1], drawn.tokens[:, 1:])
        asked = drawn.slices["distance"] > 0
        assert asked.any(1).all()
        key = drawn.tokens[:, :-1][asked]
        assert (key < cell.vocab_size // 2).all()


def test_about_56_of_127_next_tokens_are_answers() -> None:
    """64 pairs less the first of each of 8 keys."""
    drawn = rows(InContextRecall(), 1000)
    assert (drawn.labels != IGNORE).sum(1).double().mean() == pytest.approx(56, abs=0.1)


def test_keys_and_values_are_uniform_and_independent() -> None:
    cell = InContextRecall(vocab_size=8, seq_len=8)
    keys, values, _ = pairs(cell, rows(cell, 20_000))
    assert uniform(keys[:, :3] @ torch.tensor([16, 4, 1]), 64)
    assert uniform(values[:, 0] - 4, 4)
    apart = keys[:, 0] != keys[:, 1]
    assert uniform((values[:, 0] * 4 + values[:, 1] - 20)[apart], 16), "two keys may share a value"


def test_the_last_key_is_uniform_among_those_shown_once_or_often() -> None:
    cell = InContextRecall(vocab_size=8, seq_len=8)
    keys, _, _ = pairs(cell, rows(cell, 20_000))
    for pattern in ([0, 0, 1], [0, 1, 0], [2, 1, 1]):
        last = keys[(keys[:, :3] == torch.tensor(pattern)).all(1), 3]
        once = last == min(set(pattern), key=pattern.count)
        assert abs(once.double().mean() - 0.5) < 5 * 0.5 / len(last) ** 0.5


@pytest.mark.parametrize("noise", [0.2, 0.8])
def test_noise_takes_its_share_of_the_pairs_but_one(noise: float) -> None:
    cell = NoisyRecall(noise=noise)
    keys, values, noisy = pairs(cell, rows(cell))
    assert not noisy[:, -1].any()
    share = noisy[:, :-1].double().mean(1)
    expected = noise * 62 / 63
    assert abs(share.mean() - expected) < 5 * share.std() / 2000**0.5
    assert uniform(torch.stack((keys, values), dim=2)[noisy] - 16, 16)
    assert uniform(keys[:, :-1][~noisy[:, :-1]], 8)
    spared = rows(NoisyRecall(noise=1, seq_len=20)).tokens[:, :-2:2] < 16
    assert (spared.sum(1) == 1).all()
    assert uniform(spared.long().argmax(1), 9)


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    [
        (InContextRecall, {"vocab_size": 3}, "in_context_recall: two keys and two values need a vocabulary from 4 to"),
        (InContextRecall, {"seq_len": 7}, "in_context_recall: seq_len must be even and at least 4 (pairs are two tok"),
        (InContextRecall, {"train_on": "x"}, 'in_context_recall: train_on must be "all" or "answers", got "x"'),
        (NoisyRecall, {"noise": 1.5}, "noisy_recall: noise is a probability, 0 to 1, got 1.5"),
        (NoisyRecall, {"num_noise": 0}, "noisy_recall: num_noise must be at least 1, got 0"),
        (NoisyRecall, {"num_noise": 30}, "noisy_recall, without noise: two keys and two values need a vocabulary"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_cells_that_cannot_be_drawn_say_why(cls: type[Task], wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        cls(**wrong)
    assert str(error.value).startswith(message)
