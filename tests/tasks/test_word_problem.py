"""Word problems: labels against permutations multiplied one by one, and uniform products."""

from itertools import permutations
from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks import Rows
from mixassay.tasks.word_problem import WordProblem, letters


def rows(cell: WordProblem, n: int = 500) -> Rows:
    return cell.rows(torch.arange(n), seed=0, split="train")


@pytest.mark.parametrize(("n", "even"), [(3, False), (5, False), (5, True)])
@pytest.mark.parametrize("T", [1, 2, 13])
def test_labels_are_permutations_multiplied_one_by_one(n: int, even: bool, T: int) -> None:
    """A permutation is even if it takes an even number of swaps to undo it."""

    def swaps(p: tuple[int, ...]) -> int:
        row, count = list(p), 0
        for i in range(n):
            while row[i] != i:
                j = row[i]
                row[i], row[j] = row[j], row[i]
                count += 1
        return count

    elements = [p for p in permutations(range(n)) if not even or swaps(p) % 2 == 0]
    drawn = rows(WordProblem(group=f"{'A' if even else 'S'}{n}", seq_len=T), 50)
    for word, labels in zip(drawn.tokens.tolist(), drawn.labels.tolist(), strict=True):
        points = list(range(n))  # where each point is by now
        for x, label in zip(word, labels, strict=True):
            points = [elements[x][p] for p in points]
            assert elements[label] == tuple(points)


def test_residues_are_added_and_products_kept_apart() -> None:
    drawn = rows(WordProblem(group="Z60", seq_len=20))
    assert torch.equal(drawn.labels, drawn.tokens.cumsum(1) % 60)
    both = rows(WordProblem(group="Z4xZ5", seq_len=20))
    a, b = both.tokens // 5, both.tokens % 5
    assert torch.equal(both.labels, a.cumsum(1) % 4 * 5 + b.cumsum(1) % 5)


@pytest.mark.parametrize("group", ["S3", "A5"])
def test_letters_and_products_are_uniform(group: str) -> None:
    cell = WordProblem(group=group, seq_len=9)
    drawn, G = rows(cell, 3000), cell.vocab_size
    assert stats.chisquare(torch.bincount(drawn.tokens.flatten(), minlength=G).numpy()).pvalue > 1e-4
    both = drawn.labels[:, 7] * G + drawn.labels[:, 8]
    assert stats.chisquare(torch.bincount(both, minlength=G * G).numpy()).pvalue > 1e-4, "independent of the last one"


def test_letters_that_move_few_points() -> None:
    assert len(letters("S5", 2)) == 1 + 10
    assert len(letters("S5", 3)) == 1 + 10 + 20
    assert len(letters("A5", 3)) == 1 + 20
    assert letters("S3", None) == list(range(6))
    drawn = rows(WordProblem(group="S5", moved=2, seq_len=40))
    assert set(drawn.tokens.flatten().tolist()) == set(letters("S5", 2))
    assert len(set(drawn.labels[:, 20:].flatten().tolist())) == 120, "swaps make every permutation"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"group": "D4"}, 'group should be like S3, A5, Z60 or A4xZ5, got "D4"'),
        ({"group": "Z1"}, "group Z1 has but one element"),
        ({"seq_len": 0}, "seq_len must be from 1 to 2**20, got 0"),
        ({"group": "Z6", "moved": 2}, "moved=2 is for groups of permutations, S or A, not Z6"),
        ({"group": "A5", "moved": 2}, "moved=2 leaves no letter of A5 but the identity"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        WordProblem(**wrong)
    assert str(error.value) == f"word_problem: {message}"
