"""What all tasks share: rows as data, and drawing them in pieces."""

import pytest
import torch

from mixassay import draws
from mixassay.tasks import IGNORE, Rows, draw_rows


def numbers(words: torch.Tensor) -> Rows:
    return Rows(words, words[:, :1] % 4, words[:, :1], {"first": words[:, 0]})


def test_targets_are_the_labels_at_their_positions() -> None:
    """An empty place of a row (IGNORE, position 0) does not wipe out a label that stands at position 0."""
    rows = Rows(torch.zeros(2, 4).long(), torch.tensor([[0, 2], [0, 0]]), torch.tensor([[5, 6], [7, IGNORE]]))
    assert rows.targets().tolist() == [[5, IGNORE, 6, IGNORE], [7, IGNORE, IGNORE, IGNORE]]


def test_map_reaches_every_tensor() -> None:
    rows = numbers(torch.arange(12).view(3, 4)).map(lambda x: x[1:])
    assert [len(x) for x in rows.tensors()] == [2, 2, 2, 2]
    assert rows.slices["first"].tolist() == [4, 8]


def test_pieces_are_put_together_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.arange(103).flip(0)
    whole = draw_rows(numbers, 4, index, seed=1, split="test", stream=2)
    assert torch.equal(whole.tokens, draws.bits(1, index + (2 << 61), 2, 4))
    monkeypatch.setattr(draws, "piece", lambda device: 40)
    pieces = draw_rows(numbers, 4, index, seed=1, split="test", stream=2)
    assert all(map(torch.equal, pieces.tensors(), whole.tensors()))


def test_a_failing_piece_is_heard_and_leaves_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: torch.Tensor) -> Rows:
        if len(words) == 3:  # the last piece of 103 rows
            raise ArithmeticError("piece")
        return numbers(words)

    monkeypatch.setattr(draws, "piece", lambda device: 40)
    before = torch.get_num_threads()
    with pytest.raises(ArithmeticError, match="piece"):
        draw_rows(fails, 4, torch.arange(103), seed=1, split="test", stream=2)
    assert torch.get_num_threads() == before
