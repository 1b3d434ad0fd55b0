"""Key update: the last binding counts; updated and untouched keys are uniform subsets asked for apart."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats

from mixassay.errors import UserError
from mixassay.tasks import Rows
from mixassay.tasks.key_update import KeyUpdate

SMALL = KeyUpdate(vocab_size=64, seq_len=40, num_kv=5, num_updates=2)
CELLS = [
    SMALL,
    replace(SMALL, filler="zero"),
    replace(SMALL, filler="random_no_keys", num_updates=5),
    KeyUpdate(vocab_size=16, seq_len=20, num_kv=4, num_updates=2),  # every slot is taken
    KeyUpdate(num_kv=8, seq_len=128),  # Zoology's
]
each_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"V{c.vocab_size}-{c.filler}-{c.num_updates}")


def rows(cell: KeyUpdate, n: int = 2000) -> Rows:
    return cell.rows(torch.arange(n), seed=0, split="train")


@each_cell
def test_rows_read_as_the_definition_says(cell: KeyUpdate) -> None:
    drawn, n, u = rows(cell, 200), cell.num_kv, cell.num_updates
    end = 2 * (n + u)
    for at, row in enumerate(drawn.tokens.tolist()):
        pairs = list(zip(row[0:end:2], row[1:end:2], strict=True))
        half = cell.vocab_size // 2
        assert all(1 <= key < half <= value < cell.vocab_size for key, value in pairs)
        assert len({key for key, _ in pairs[:n]}) == n
        assert len({key for key, _ in pairs[n:]}) == u, "no key is updated twice"
        assert {key for key, _ in pairs[n:]} <= {key for key, _ in pairs[:n]}
        assert len({value for _, value in pairs}) == n + u, "no stale value is right by chance"
        bound = dict(pairs)  # a later pair overwrites
        where = {key: 2 * i for i, (key, _) in enumerate(pairs)}
        asked = [row[p] for p in drawn.positions[at].tolist()]
        assert asked == [key for key, _ in pairs[:n]]
        assert drawn.labels[at].tolist() == [bound[key] for key in asked]
        assert drawn.slices["updated"][at].tolist() == [int(where[key] >= 2 * n) for key in asked]
        distance = [p - where[key] for p, key in zip(drawn.positions[at].tolist(), asked, strict=True)]
        assert drawn.slices["distance"][at].tolist() == distance
        assert all(p >= end and p % 2 == 0 for p in drawn.positions[at].tolist())
        if cell.filler == "zero":
            assert sum(x != 0 for x in row[end:]) == n
        if cell.filler == "random_no_keys":
            assert sum(x in where for x in row[end:]) == n


@each_cell
def test_what_is_asked_moves_no_token(cell: KeyUpdate) -> None:
    whole = rows(cell, 200)
    updated = whole.slices["updated"] == 1
    for ask, kind in (("updated", updated), ("untouched", ~updated)):
        if not kind.any():
            continue
        some = rows(replace(cell, ask=ask), 200)  # type: ignore[arg-type]  # a literal by its value
        assert torch.equal(some.tokens, whole.tokens)
        order = some.positions.argsort(dim=1)
        theirs = whole.positions[kind].view(200, -1)
        assert torch.equal(some.positions.gather(1, order), theirs.sort(dim=1).values)
        expected = whole.labels[kind].view(200, -1).gather(1, theirs.argsort(dim=1))
        assert torch.equal(some.labels.gather(1, order), expected)
        assert (some.slices["updated"] == (ask == "updated")).all()


def test_updates_are_a_uniform_subset_in_random_order() -> None:
    cell = replace(SMALL, filler="zero")
    tokens = rows(cell, 20_000).tokens
    keys, again = tokens[:, 0:10:2], tokens[:, 10:14:2]
    number = (again[:, :, None] == keys[:, None]).long().argmax(2)
    seen = torch.bincount(number[:, 0] * 5 + number[:, 1], minlength=25).view(5, 5)
    off = ~torch.eye(5, dtype=torch.bool)
    assert stats.chisquare(seen[off].numpy()).pvalue > 1e-4
    values = tokens[:, 1:14:2] - 32
    assert stats.chisquare(torch.bincount(values.flatten(), minlength=32).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_updates": 0}, "num_updates must be from 1 to num_kv=16, got 0"),
        ({"num_updates": 17}, "num_updates must be from 1 to num_kv=16, got 17"),
        ({"seq_len": 101}, "seq_len must be even (pairs and slots are two tokens), got 101"),
        ({"seq_len": 70}, "num_kv=16 and num_updates=4 need seq_len >= 72, got 70"),
        ({"vocab_size": 38}, "num_kv=16 and num_updates=4 need vocab_size >= 40, got 38"),
        ({"ask": "old"}, 'ask must be "all", "updated" or "untouched", got "old"'),
        ({"ask": "untouched", "num_updates": 16}, "num_updates=16 leaves none of num_kv=16 keys untouched"),
        ({"filler": "x"}, 'filler must be "zero", "random" or "random_no_keys", got "x"'),
        ({"power_a": -9.0}, "power_a=-9.0 is too far from 1 for the 108 slots of this row"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        KeyUpdate(**wrong)
    assert str(error.value) == f"key_update: {message}"
