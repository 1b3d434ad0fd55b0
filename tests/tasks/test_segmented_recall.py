"""Segmented recall: rows are pure functions and hold what the definition says, read back token by token.

Statistical tests have fixed seeds, so they pass always or never; bounds are 5 standard errors, or a p-value of 1e-4.
"""

import doctest
import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.registry import arguments
from mixassay.tasks import IGNORE, SPLITS, Rows, Split, Task, segmented_recall, task
from mixassay.tasks.segmented_recall import CUR, NOISE, PAD, PREV, SPECIAL, SegmentedRecall

SMALL = SegmentedRecall(seq_len=96, segments=4, pool=6, cur=2, prev=2, tag=4, num_tags=5, num_keys=9, num_values=7)
CELLS = {
    "small": SMALL,
    "default": SegmentedRecall(),
    "ordered": replace(SMALL, tags="ordered", num_tags=4),
    "unmarked": replace(SMALL, marker=False, tag=0),
    "inline": replace(SMALL, inline=2),
    "inline only": replace(SMALL, seq_len=97, inline=3, cur=0, prev=0, tag=0),
    "inline, to the end": replace(SMALL, seq_len=96, inline=3, cur=0, prev=0, tag=0),
    "noise": replace(SMALL, noise=15, lengths="fixed"),
    "ramp": replace(SMALL, ramp=6, seq_len=128),
    "ramp, many values": replace(SMALL, ramp=9, seq_len=128, num_values=10**6),
    "recurring": replace(SMALL, recurring=2, lengths="pareto"),
    "all": replace(SMALL, seq_len=161, inline=1, noise=9, ramp=4, recurring=3),
    "one segment": replace(SMALL, segments=1, prev=0),
    "beyond": SegmentedRecall(seq_len=512, segments=32),
    "crowded": replace(SMALL, pool=9, cur=9, prev=9, tag=36, seq_len=150),
}
each_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)


def rows(cell: SegmentedRecall, n: int | Tensor = 300, seed: int | Tensor = 0, split: Split = "train") -> Rows:
    return cell.rows(torch.arange(n) if isinstance(n, int) else n, seed=seed, split=split)


def same(a: Rows, b: Rows) -> bool:
    return a.slices.keys() == b.slices.keys() and all(map(torch.equal, a.tensors(), b.tensors()))


def uniform(ids: Tensor, n: int) -> bool:
    seen = torch.bincount(ids.flatten(), minlength=n).numpy()
    return len(seen) == n and stats.chisquare(seen).pvalue > 1e-4


# --- pure functions


@each_cell
def test_openings_find_the_changes_in_the_tokens(cell: SegmentedRecall) -> None:
    found, index = cell.openings, torch.arange(200)
    assert (found is None) == (not cell.marker or cell.inline > 0)
    if found is not None:
        drawn, changes = rows(cell, 200), cell.changes(index, seed=0, split="train")
        empty = drawn.tokens[changes] == PAD  # rows whose first question could not be filled
        assert empty.double().mean() < 0.1
        whole = ~(changes & (drawn.tokens == PAD)).any(1)
        assert torch.equal(found(drawn.tokens)[whole], changes[whole])


@each_cell
def test_a_row_is_the_same_in_any_company(cell: SegmentedRecall, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(cell, 30, seed=3)
    shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    assert same(rows(cell, shuffled, seed=3), whole.map(lambda x: x[shuffled]))
    assert same(rows(cell, torch.arange(7, 30), seed=3), whole.map(lambda x: x[7:]))
    changes = cell.changes(torch.arange(30), seed=3, split="train")
    assert torch.equal(cell.changes(shuffled, seed=3, split="train"), changes[shuffled])
    monkeypatch.setattr(draws, "piece", lambda device: 5000)  # rows are drawn a few at a time
    assert same(rows(cell, 30, seed=3), whole)


def test_seeds_can_be_given_row_by_row() -> None:
    seeds = torch.tensor([0, 1, 2**40]).repeat_interleave(20)
    mixed = rows(SMALL, torch.arange(20).repeat(3), seed=seeds)
    for at, seed in enumerate((0, 1, 2**40)):
        assert same(mixed.map(lambda x, at=at: x[20 * at : 20 * at + 20]), rows(SMALL, 20, seed=seed))


def test_splits_and_seeds_share_no_row() -> None:
    ends = torch.cat((torch.arange(200), torch.tensor([2**60, 2**61 - 1])))
    drawn = [rows(SMALL, ends, seed, split).tokens for split in SPLITS for seed in (0, 1)]
    assert len({tuple(row) for tokens in drawn for row in tokens.tolist()}) == 6 * 202


def test_every_field_gives_other_rows() -> None:
    changes: dict[str, Any] = {"lengths": "fixed", "tags": "ordered", "recurring": 2, "marker": False, "tag": 3}
    for field in fields(SegmentedRecall):
        value = changes.get(field.name, getattr(SMALL, field.name) + 1 if field.name not in changes else None)
        other = replace(SMALL, **{field.name: value}, **({"tag": 0} if field.name == "marker" else {}))
        ours, theirs = rows(SMALL, 200), rows(other, 200)
        n = min(ours.tokens.shape[1], theirs.tokens.shape[1])
        assert (ours.tokens[:, 10:n] == theirs.tokens[:, 10:n]).double().mean() < 0.3, field.name


def test_rows_of_version_1_are_pinned() -> None:
    """If this fails, the same arguments give other rows: raise `SegmentedRecall.version`, and pin the new ones."""
    assert SegmentedRecall.version == 1
    found = hashlib.sha256()
    for cell in CELLS.values():
        for tensor in rows(cell, torch.tensor([0, 1, 2**33]), seed=5, split="valid").tensors():
            found.update(tensor.numpy().astype("<i8").tobytes())
    assert found.hexdigest()[:16] == "fec8f46f82ab5891"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_cell
def test_rows_are_the_same_bits_on_the_gpu(cell: SegmentedRecall) -> None:
    index = torch.arange(500) * 7919
    there = rows(cell, index.cuda(), seed=5)
    assert all(x.is_cuda for x in there.tensors())
    assert same(there.map(Tensor.cpu), rows(cell, index, seed=5))
    changes = cell.changes(index.cuda(), seed=5, split="test")
    assert torch.equal(changes.cpu(), cell.changes(index, seed=5, split="test"))


# --- what a row holds


class Reader:
    """A row read token by token, as a person would: what is bound where, and what each question must answer."""

    def __init__(self, cell: SegmentedRecall, row: list[int], changes: list[bool], asked: dict[int, int]) -> None:
        self.cell, self.keys, self.values = cell, SPECIAL + cell.num_tags, SPECIAL + cell.num_tags + cell.num_keys
        self.written: list[list[tuple[int, int]]] = []  # by segment, (key, value) in the order written
        self.tags: list[int] = []
        self.questions: list[tuple[int, int, int, int]] = []  # (word, key, position of the key, segments written)
        openings = [t for t, change in enumerate(changes) if change]
        assert len(openings) == cell.segments + (cell.cur + cell.prev + cell.tag > 0)
        end = openings[cell.segments] if len(openings) > cell.segments else len(row)
        at = noises = 0
        while at < len(row):
            token = row[at]
            if changes[at] and at != end:
                self.written.append([])
                if cell.marker:
                    assert SPECIAL <= token < self.keys
                    self.tags.append(token)
                    at += 1
                    continue
            if at + 1 in asked:
                self.questions.append((token, row[at + 1], at + 1, len(self.written)))
                at += 2
            elif token == NOISE:
                noises += 1
                at += 1
            elif token == PAD:
                assert at >= end or cell.inline
                at += 1
            else:
                assert self.keys <= token < self.values <= row[at + 1] < cell.vocab_size
                assert at < end, "no pair behind the segments"
                self.written[-1].append((token, row[at + 1]))
                at += 2
        assert noises == cell.noise
        assert len(self.written) == cell.segments
        assert sum(map(len, self.written)) == cell.pairs

    def bindings(self, key: int, upto: int) -> list[tuple[int, int]]:
        """(segment, value) of the key's bindings, a value that follows itself counted once unless re-bound."""
        found: list[tuple[int, int]] = []
        for j, pairs in enumerate(self.written[:upto]):
            for k, value in pairs:
                if k == key and (not found or found[-1][1] != value or (not self.cell.ramp and found[-1][0] != j)):
                    found.append((j, value))
        return found


@each_cell
def test_rows_read_back_give_their_labels(cell: SegmentedRecall) -> None:
    """CUR and PREV by the last writes, TAG by its segment; without `ramp` a segment binds a key to one value."""
    index = torch.arange(60)
    drawn, changes = rows(cell, 60), cell.changes(index, seed=0, split="train")
    exact = 0
    for n in range(60):
        asked = dict(zip(drawn.positions[n].tolist(), drawn.labels[n].tolist(), strict=True))
        asked = {at: label for at, label in asked.items() if label != IGNORE}
        read = Reader(cell, drawn.tokens[n].tolist(), changes[n].tolist(), asked)
        assert {at for _, _, at, _ in read.questions} == asked.keys()
        assert len({(word, key, upto) for word, key, _, upto in read.questions}) == len(asked), "asked once"
        if cell.marker:
            assert len(set(read.tags)) == cell.segments
            assert cell.tags == "random" or read.tags == list(range(SPECIAL, SPECIAL + cell.segments))
        for pairs in read.written:
            assert len(pairs) >= 4
            places = [key for key, _ in pairs]
            for start in range(0, len(places), cell.pool):
                part = places[start : start + cell.pool]
                assert len(set(part)) == len(part), "permutations of the pool"
            if not cell.ramp:
                assert len(set(pairs)) == len(set(places)), "one value a key"
        for (old, new), ramp in zip(zip(read.written, read.written[1:], strict=False), [cell.ramp] * 99, strict=False):
            if not ramp:
                before = dict(old)
                assert all(before.get(key) != value for key, value in new), "every key is bound anew"
        for word, key, at, upto in read.questions:
            bound = read.bindings(key, upto)
            if word == CUR:
                assert asked[at] == bound[-1][1]
            elif word == PREV and (not cell.ramp or cell.num_values > 1000):  # few values may come twice in a row
                assert asked[at] == bound[-2][1]
            elif word not in (CUR, PREV):
                segment = read.tags.index(word)
                own = [value for k, value in read.written[segment] if k == key]
                assert asked[at] == own[-1]
            exact += 1
    assert exact == (drawn.labels != IGNORE).sum()


@each_cell
def test_shapes_and_slices(cell: SegmentedRecall) -> None:
    drawn = rows(cell)
    Q = cell.questions
    assert drawn.tokens.shape == (300, cell.seq_len)
    assert all(x.dtype == torch.int64 for x in drawn.tensors())
    assert [tuple(x.shape) for x in drawn.tensors()[1:]] == [(300, Q)] * 5
    assert 0 <= cell.seq_len - (drawn.tokens != PAD).sum(1).max() <= 1 + 2 * Q
    scored = drawn.labels != IGNORE
    assert (drawn.positions[scored] > 0).all()
    for x in (drawn.positions, *drawn.slices.values()):
        assert not x[~scored].any()
    word = drawn.tokens.gather(1, (drawn.positions - 1).clamp(min=0))
    kind, lag = drawn.slices["kind"], drawn.slices["lag"]
    assert (word[scored & (kind == 0)] == CUR).all()
    assert (word[scored & (kind == 1)] == PREV).all()
    assert (word[scored & (kind == 2)] >= SPECIAL).all()
    assert 0 <= lag.min() <= lag.max() < cell.segments
    assert torch.equal(drawn.slices["order"][scored], torch.arange(Q).expand(300, Q)[scored])
    if cell is not CELLS["crowded"]:
        counts = [int((kind[scored] == i).sum()) for i in range(3)]
        whole = [300 * (cell.cur + cell.inline * (cell.segments - 1)), 300 * cell.prev, 300 * cell.tag]
        assert counts[0] == whole[0], "every segment binds four keys, so CUR always finds its own here"
        assert all(0.8 * n <= count <= n for count, n in zip(counts, whole, strict=True))


def test_places_that_cannot_be_filled_stay_empty() -> None:
    cell = CELLS["crowded"]
    drawn = rows(cell)
    assert (drawn.labels == IGNORE).any(1).all(), "no row binds every key in every segment"
    kind, scored = drawn.slices["kind"], drawn.labels != IGNORE
    changes = cell.changes(torch.arange(300), seed=0, split="train")
    for n in range(40):
        asked = {at: 0 for at, ok in zip(drawn.positions[n].tolist(), scored[n].tolist(), strict=True) if ok}
        read = Reader(cell, drawn.tokens[n].tolist(), changes[n].tolist(), asked)
        keys = [{key for key, _ in pairs} for pairs in read.written]
        assert (kind[n][scored[n]] == 2).sum() == sum(map(len, keys)), "all that can be asked is asked"
        assert (kind[n][scored[n]] == 0).sum() == len(set.union(*keys))
        assert (kind[n][scored[n]] == 1).sum() == sum(sum(k in one for one in keys) > 1 for k in set.union(*keys))


def test_a_ramp_changes_keys_one_by_one() -> None:
    """A key that has its new value keeps it; behind the ramp none is old; old ones are those of the segment before."""
    cell = replace(SMALL, seq_len=400, pool=9, ramp=12, lengths="fixed", segments=3, tag=0)
    drawn, changes = rows(cell, 80), cell.changes(torch.arange(80), seed=0, split="train")
    shares = torch.zeros(12)
    for n in range(80):
        asked = dict.fromkeys(drawn.positions[n].tolist(), 0)
        read = Reader(cell, drawn.tokens[n].tolist(), changes[n].tolist(), asked)
        final = [dict(pairs) for pairs in read.written]
        for j in (1, 2):
            for key in {key for key, _ in read.written[j]}:
                values = [value for k, value in read.written[j] if k == key]
                assert values == sorted(values, key=lambda x, j=j, key=key: x == final[j][key]), "old, then new"
                assert set(values) <= {final[j - 1][key], final[j][key]}
            late = [value != final[j][key] for key, value in read.written[j]]
            assert not any(late[12:])
            shares += torch.tensor(late[:12]).float() / 160
    assert (shares - (12 - torch.arange(12)) / 13).abs().max() < 5 * 0.5 / 160**0.5


def test_recurring_maps_come_back() -> None:
    cell = replace(SMALL, recurring=2, segments=5, tag=0, seq_len=140)
    drawn, changes = rows(cell, 40), cell.changes(torch.arange(40), seed=0, split="train")
    for n in range(40):
        asked = dict.fromkeys(drawn.positions[n].tolist(), 0)
        maps = [dict(pairs) for pairs in Reader(cell, drawn.tokens[n].tolist(), changes[n].tolist(), asked).written]
        for here, later in zip(maps, maps[2:], strict=False):
            assert all(later[key] == value for key, value in here.items() if key in later)


# --- distribution


def test_ids_are_uniform() -> None:
    cell = replace(SMALL, segments=1, seq_len=46, prev=0, tag=1)
    drawn = rows(cell, 20_000)
    assert uniform(drawn.tokens[:, 0] - SPECIAL, 5)
    assert uniform(drawn.tokens[:, 1] - SPECIAL - 5, 9)
    assert uniform(drawn.tokens[:, 2] - SPECIAL - 14, 7)
    two = replace(SMALL, segments=2, lengths="fixed", noise=0)
    drawn = rows(two, 20_000)
    both = drawn.tokens[:, 1:13:2], drawn.tokens[:, 2:14:2]
    start = int(two.changes(torch.arange(1), seed=0, split="train")[0].nonzero()[1])
    same_key = both[0][:, :1] == drawn.tokens[:, start + 1 : start + 13 : 2]
    step = (drawn.tokens[:, start + 2 : start + 14 : 2] - both[1][:, :1])[same_key] % 7
    assert uniform(step - 1, 6), "to any other value"


def test_questions_by_tag_ask_all_segments_alike_and_come_in_any_order() -> None:
    drawn = rows(SegmentedRecall(tag=5), 4000)
    kind, lag = drawn.slices["kind"], drawn.slices["lag"]
    assert uniform(lag[kind == 2], 8)
    assert (kind.sort(dim=1).values == torch.tensor([0] * 4 + [1] * 4 + [2] * 5)).all()
    for place in range(13):
        share = (kind[:, place] == 2).double().mean()
        assert abs(share - 5 / 13) < 5 * (0.25 / 4000) ** 0.5


def test_keys_asked_are_uniform_among_those_bound() -> None:
    """The j-th key in the order of the segment's first pairs is asked as often as any other."""
    cell = replace(SMALL, segments=1, cur=1, prev=0, tag=0, seq_len=40)
    drawn = rows(cell, 12_000)
    first = drawn.tokens[:, 1:13:2]
    asked = drawn.tokens.gather(1, drawn.positions)
    assert uniform((first == asked).long().argmax(1), 6)


def test_an_overwriting_memory_gets_cur_right_and_goes_stale_elsewhere() -> None:
    """The levels of the docstring, by answering every question with the key's last value."""
    cell = SegmentedRecall()
    drawn = rows(cell, 500)
    key = drawn.tokens.gather(1, drawn.positions)
    at = (drawn.tokens[:, None] == key[..., None]) & (torch.arange(256) < 224)  # [N, Q, T], the segments' part
    last = (at * torch.arange(256)).amax(2)
    answers = drawn.tokens.gather(1, last + 1)
    right, kind = answers == drawn.labels, drawn.slices["kind"]
    assert right[kind == 0].all()
    assert right[kind == 1].double().mean() < 0.05
    stale = cell.stale(drawn, answers)
    assert torch.equal(stale, ~right), "every wrong answer was the key's in another segment"
    assert not cell.stale(drawn, drawn.labels).any()
    assert not cell.stale(drawn, torch.full_like(answers, CUR)).any(), "a word is no value"


# --- arguments


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"segments": 0}, "segments must be at least 1, got 0"),
        ({"noise": -1}, "noise must be at least 0, got -1"),
        ({"cur": 0, "prev": 0, "tag": 0}, "cur, prev, tag and inline are all 0: nothing is asked"),
        ({"segments": 1, "cur": 0, "tag": 0}, "prev=4 asks for a binding before the last one, and segments=1 has none"),
        ({"pool": 33}, "pool=33 needs num_keys >= 33, got 32"),
        ({"prev": 17}, "cur, prev and inline ask for one key each of pool=16"),
        ({"tag": 129}, "tag=129 is more than segments x pool = 128"),
        ({"marker": False}, "tag=8 questions need marker: true"),
        ({"segments": 33, "seq_len": 1024}, "segments=33 needs num_tags >= 33, got 32"),
        ({"recurring": 1}, "recurring must be 0, or at least 2 maps, got 1"),
        ({"num_values": 2, "recurring": 3}, "num_values must be at least 3, got 2"),
        ({"num_values": 2**31}, "vocab_size must be at most 2**31, got 2147483716"),
        ({"lengths": "even"}, 'lengths must be "fixed", "geometric" or "pareto", got "even"'),
        ({"tags": "sorted"}, 'tags must be "ordered" or "random", got "sorted"'),
        ({"seq_len": 103}, "segments=8 and these questions need seq_len >= 104, got 103"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        SegmentedRecall(**wrong)
    assert str(error.value) == f"segmented_recall: {message}"


def test_the_least_length_is_enough() -> None:
    cell = SegmentedRecall(seq_len=104)
    assert cell.pairs == 32
    rows(cell, 10)


def test_it_is_a_registered_task_with_a_strict_schema() -> None:
    cell: Task = SegmentedRecall()
    assert isinstance(cell, Task)
    assert cell.vocab_size == 4 + 32 + 32 + 64
    assert task["segmented_recall"] is SegmentedRecall
    with pytest.raises(ValidationError):
        arguments(SegmentedRecall)(segment=4)


def test_the_example_in_the_docstring() -> None:
    result = doctest.testmod(segmented_recall)
    assert result.attempted == 5
    assert result.failed == 0
