"""MQAR: rows are pure functions, hold what the definition says, and have Zoology's distribution.

Statistical tests have fixed seeds, so they pass always or never; bounds are 5 standard errors, or a p-value of 1e-4.
"""

import doctest
import hashlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.registry import arguments
from mixassay.runners.bench_data import loop
from mixassay.tasks import IGNORE, SPLITS, Rows, Split, Task, mqar, task
from mixassay.tasks.mqar import MQAR

SMALL = MQAR(vocab_size=64, seq_len=32, num_kv=4)
CELLS = [
    SMALL,
    replace(SMALL, filler="zero"),
    replace(SMALL, filler="random_no_keys"),
    MQAR(vocab_size=10, seq_len=16, num_kv=4),  # every key and value is used, every slot is taken
    MQAR(vocab_size=11, seq_len=40, num_kv=4, power_a=0.7, filler="random_no_keys"),
    MQAR(vocab_size=4, seq_len=4, num_kv=1),
    MQAR(vocab_size=8192, seq_len=256, num_kv=64),
    MQAR(vocab_size=8192, seq_len=512, num_kv=64, filler="random_no_keys"),
]
each_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"V{c.vocab_size}-L{c.seq_len}-n{c.num_kv}-{c.filler}")


def rows(cell: MQAR, n: int | Tensor = 2000, seed: int | Tensor = 0, split: Split = "train") -> Rows:
    return cell.rows(torch.arange(n) if isinstance(n, int) else n, seed=seed, split=split)


def same(a: Rows, b: Rows) -> bool:
    return a.slices.keys() == b.slices.keys() and all(map(torch.equal, a.tensors(), b.tensors()))


def context(cell: MQAR, drawn: Rows) -> tuple[Tensor, Tensor]:
    """Keys and values [N, n] in the order of the context."""
    return drawn.tokens[:, 0 : 2 * cell.num_kv : 2], drawn.tokens[:, 1 : 2 * cell.num_kv : 2]


def slots(cell: MQAR, drawn: Rows) -> Tensor:
    return (drawn.positions - 2 * cell.num_kv) // 2


def uniform(ids: Tensor, n: int) -> bool:
    seen = torch.bincount(ids.flatten(), minlength=n).numpy()
    return len(seen) == n and stats.chisquare(seen).pvalue > 1e-4


# --- pure functions


@each_cell
def test_a_row_is_the_same_in_any_company(cell: MQAR, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rows(cell, 50, seed=3)
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert same(rows(cell, shuffled, seed=3), whole.map(lambda x: x[shuffled]))
    for part in (slice(0, 7), slice(7, 50), slice(49, 50)):
        assert same(rows(cell, torch.arange(50)[part], seed=3), whole.map(lambda x, part=part: x[part]))
    assert same(rows(cell, torch.arange(50).repeat(2), seed=3), whole.map(lambda x: torch.cat((x, x))))
    monkeypatch.setattr(draws, "piece", lambda device: 2500)  # rows are drawn a few at a time
    assert same(rows(cell, 50, seed=3), whole)


def test_seeds_can_be_given_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = torch.tensor([0, 1, 2**40]).repeat_interleave(20)
    index = torch.arange(20).repeat(3)
    mixed = rows(SMALL, index, seed=seeds)
    parts = [rows(SMALL, 20, seed=seed) for seed in (0, 1, 2**40)]
    assert same(mixed, rows(SMALL, index, seed=seeds))
    for at, part in enumerate(parts):
        assert same(mixed.map(lambda x, at=at: x[20 * at : 20 * at + 20]), part)
    monkeypatch.setattr(draws, "piece", lambda device: 1000)
    assert same(rows(SMALL, index, seed=seeds), mixed)


def test_no_rows_are_rows_too() -> None:
    none = rows(SMALL, 0)
    assert [tuple(x.shape) for x in none.tensors()] == [(0, 32), (0, 4), (0, 4), (0, 4)]


def test_splits_and_seeds_share_no_row() -> None:
    cell = MQAR(seq_len=64, num_kv=4)
    drawn = [rows(cell, 1000, seed, split).tokens for split in SPLITS for seed in (0, 1, 2)]
    assert len({tuple(row) for tokens in drawn for row in tokens.tolist()}) == 9000


def test_splits_stay_apart_at_any_row_number() -> None:
    """The last row numbers of one split do not run into the first of the next."""
    ends = torch.tensor([0, 1, 2**60, 2**61 - 1])
    drawn = [rows(MQAR(seq_len=64, num_kv=4), ends, 0, split).tokens for split in SPLITS]
    assert len({tuple(row) for tokens in drawn for row in tokens.tolist()}) == 12


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 66}, {"seq_len": 34}, {"num_kv": 3}, {"power_a": 0.02}, {"filler": "zero"}],
    ids=lambda change: next(iter(change)),
)
def test_every_field_gives_other_rows(change: dict[str, Any]) -> None:
    """Also in the part that the field says nothing about: cells of a mixture share no contexts."""
    ours, other = context(SMALL, rows(SMALL, 500)), context(SMALL, rows(replace(SMALL, **change), 500))
    equal = (ours[0][:, 0] == other[0][:, 0]).double().mean()
    assert abs(equal - 1 / 31) < 5 * (1 / 31 / 500) ** 0.5


def test_rows_of_version_1_are_pinned() -> None:
    """If this fails, the same arguments give other rows: raise `MQAR.version`, and pin the new ones."""
    assert MQAR.version == 1
    found = hashlib.sha256()
    for cell in CELLS:
        for tensor in rows(cell, torch.tensor([0, 1, 2**33]), seed=5, split="valid").tensors():
            found.update(tensor.numpy().astype("<i8").tobytes())
    assert found.hexdigest()[:16] == "2d81b35a392c9166"


def test_global_generators_neither_matter_nor_move() -> None:
    before = torch.get_rng_state()
    first = rows(SMALL, 10)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    np.random.seed(1)
    assert same(first, rows(SMALL, 10))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_cell
def test_rows_are_the_same_bits_on_the_gpu(cell: MQAR) -> None:
    index = torch.arange(3000) * 7919
    there = rows(cell, index.cuda(), seed=5)
    assert all(x.is_cuda for x in there.tensors())
    assert same(there.map(Tensor.cpu), rows(cell, index, seed=5))
    seeds = torch.arange(3000) // 1000
    assert same(rows(cell, index.cuda(), seed=seeds.cuda()).map(Tensor.cpu), rows(cell, index, seed=seeds))


# --- what a row holds


@each_cell
def test_rows_are_what_the_definition_says(cell: MQAR) -> None:
    n, L, V = cell.num_kv, cell.seq_len, cell.vocab_size
    drawn = rows(cell, 500)
    keys, values = context(cell, drawn)
    assert drawn.tokens.shape == (500, L)
    assert all(x.dtype == torch.int64 for x in drawn.tensors())
    assert drawn.tokens.min() >= 0
    assert drawn.tokens.max() < V
    assert keys.min() >= 1
    assert keys.max() < V // 2
    assert values.min() >= V // 2
    for ids in (keys, values, drawn.positions):
        assert (ids.sort(dim=1).values.diff(dim=1) > 0).all(), "none twice in a row"
    assert drawn.positions.shape == (500, n)
    assert drawn.positions.min() >= 2 * n, "nothing is asked in the context"
    assert drawn.positions.max() < L
    assert (drawn.positions % 2 == 0).all()
    assert torch.equal(drawn.tokens.gather(1, drawn.positions), keys), "the i-th question asks for the i-th key"
    assert torch.equal(drawn.labels, values), "and its label is the i-th value"
    assert torch.equal(drawn.slices["distance"], drawn.positions - torch.arange(0, 2 * n, 2))
    targets = drawn.targets()
    assert ((targets != IGNORE).sum(1) == n).all()
    assert torch.equal(targets.gather(1, drawn.positions), drawn.labels)


@pytest.mark.parametrize("cell", CELLS[:3], ids=lambda cell: cell.filler)
def test_filler(cell: MQAR) -> None:
    drawn = rows(cell, 3000)
    keys, _ = context(cell, drawn)
    asked = torch.zeros_like(drawn.tokens, dtype=torch.bool).scatter_(1, drawn.positions, True)
    asked[:, : 2 * cell.num_kv] = True
    filler = drawn.tokens[~asked].view(3000, -1)
    assert filler.shape[1] == cell.seq_len - 3 * cell.num_kv
    if cell.filler == "zero":
        assert (filler == 0).all()
    elif cell.filler == "random":
        assert uniform(filler, cell.vocab_size)
    else:
        assert not (filler[:, :, None] == keys[:, None]).any()
        rank = filler - (filler[:, :, None] > keys[:, None]).sum(2)  # its place among the ids that are allowed
        assert uniform(rank, cell.vocab_size - cell.num_kv)
        assert uniform(rank[:, :2] @ torch.tensor([60, 1]), 3600), "neighbours are independent"


# --- distribution


def test_keys_and_values_are_uniform_and_independent() -> None:
    cell = MQAR()
    keys, values = context(cell, rows(cell, 10_000))
    assert uniform(keys - 1, 4095)
    assert uniform(values - 4096, 4096)
    tight = MQAR(vocab_size=8, seq_len=16, num_kv=2)  # keys 1-3, values 4-7
    keys, values = context(tight, rows(tight, 60_000))
    joint = itertools.product(itertools.permutations(range(1, 4), 2), itertools.permutations(range(4, 8), 2))
    number = {(*k, *v): i for i, (k, v) in enumerate(joint)}
    which = torch.tensor([number[tuple(row)] for row in torch.cat((keys, values), dim=1).tolist()])
    assert uniform(which, 6 * 12), "all joint outcomes of keys and values are equally likely"


def test_parts_of_a_row_and_neighbouring_rows_are_independent() -> None:
    cell = MQAR(vocab_size=16, seq_len=12, num_kv=1)
    drawn = rows(cell, 40_000)
    keys, values = context(cell, drawn)
    filler = drawn.tokens[:, 3] // 4
    parts = {"key": keys[:, 0], "value": values[:, 0], "slot": slots(cell, drawn)[:, 0], "filler": filler}
    parts["key of the next row"] = keys[:, 0].roll(1)
    parts["slot of the next row"] = parts["slot"].roll(1)
    for a, b in itertools.combinations(parts, 2):
        table = np.zeros((16, 16))
        np.add.at(table, (parts[a].numpy(), parts[b].numpy()), 1)
        table = table[table.any(1)][:, table.any(0)]
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        known = sum(table.shape) - 2  # what the margins take of the degrees of freedom
        assert stats.chisquare(table.ravel(), expected.ravel(), ddof=known).pvalue > 1e-4, f"{a} and {b}"


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0, 3.0])
def test_slots_are_drawn_one_by_one_by_weight(power_a: float) -> None:
    """All ordered pairs of slots, against the law of drawing without replacement with weight (s + 1)^(a - 1)."""
    cell = MQAR(vocab_size=64, seq_len=16, num_kv=2, power_a=power_a)
    drawn = slots(cell, rows(cell, 60_000)).numpy()
    p = np.arange(1, 7) ** (power_a - 1.0)
    p /= p.sum()
    law = p[:, None] * p / (1 - p)[:, None]
    off = ~np.eye(6, dtype=bool)
    seen = np.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36).reshape(6, 6)
    assert stats.chisquare(seen[off], 60_000 * law[off]).pvalue > 1e-4


@pytest.mark.parametrize(("L", "n"), [(64, 4), (256, 16), (64, 16)])
def test_slots_agree_with_numpy_weighted_choice(L: int, n: int) -> None:
    """How often each slot is used, where each key is asked, and in which order: against the row-by-row generator."""
    cell, N = MQAR(seq_len=L, num_kv=n), 4000
    tokens, labels = loop(cell, N, seed=1)
    asked = np.where(labels >= 0, tokens, 0)[:, None, 2 * n :]  # [N, 1, L - 2n], 0 where nothing is asked
    theirs = np.argmax(asked == tokens[:, 0 : 2 * n : 2, None], axis=2) // 2  # slot of the i-th key
    ours = slots(cell, rows(cell, N)).numpy()
    used = [np.bincount(x.flatten(), minlength=cell.slots) / N for x in (ours, theirs)]
    pooled = (used[0] + used[1]) / 2
    error = np.sqrt(2 * pooled * (1 - pooled) / N)
    assert (np.abs(used[0] - used[1]) <= 4.5 * error + 1e-12).all()
    gap = ours.mean(0) - theirs.mean(0)  # mean slot of the i-th key
    assert (np.abs(gap) < 4.5 * np.sqrt((ours.var(0) + theirs.var(0)) / N)).all()
    for i, j in ((0, 1), (0, n - 1)):
        first = [(x[:, i] < x[:, j]).mean() for x in (ours, theirs)]
        assert abs(first[0] - first[1]) < 4.5 * np.sqrt(0.5 / N)


ZOOLOGY = {  # 2,000 rows of Zoology's generator (d88d6f5), vocabulary 8192, power_a .01, random filler
    (64, 4): {"slot 0": 0.73, "mean slot": 7.1, "distance": (6, 14, 42), "filler = key": 0.02, "order": 0.13},
    (256, 16): {"slot 0": 0.98, "mean slot": 28, "distance": (20, 48, 168), "filler = key": 0.45, "order": 0.23},
    (512, 64): {"slot 0": 1.0, "mean slot": 61, "distance": (80, 156, 348), "filler = key": 2.5, "order": 0.32},
    (256, 64): {"slot 0": 1.0, "mean slot": 31.5, "distance": None, "filler = key": 0.50, "order": 0.54},
}


@pytest.mark.parametrize(("L", "n"), ZOOLOGY, ids=str)
def test_statistics_are_those_of_zoology(L: int, n: int) -> None:
    """Means agree within 5 standard errors of a difference of two samples of 2,000 rows, and the table's rounding."""
    cell, published = MQAR(seq_len=L, num_kv=n), ZOOLOGY[L, n]
    drawn = rows(cell, 2000)
    used, (keys, _) = slots(cell, drawn), context(cell, drawn)

    def agrees(per_row: Tensor, name: str, digit: float) -> None:
        per_row = per_row.double()
        error = 5 * (2 * per_row.var().item() / 2000) ** 0.5
        assert abs(per_row.mean().item() - published[name]) <= error + digit / 2, name

    agrees((used == 0).any(1), "slot 0", 0.01)
    agrees(used.double().mean(1), "mean slot", 0.1 if L == 64 else 1)
    agrees((drawn.tokens[:, 2 * n :, None] == keys[:, None]).sum((1, 2)) - n, "filler = key", 0.1 if n == 64 else 0.01)
    by_place = used.argsort(dim=1).argsort(dim=1).double()
    agrees(torch.corrcoef(torch.cat((torch.arange(n)[None], by_place)))[0, 1:], "order", 0.01)
    for share, distance in zip((0.1, 0.5, 0.9), published["distance"] or (), strict=False):
        below, upto = ((drawn.slices["distance"] < distance), (drawn.slices["distance"] <= distance))
        errors = [5 * (2 * x.double().mean(1).var().item() / 2000) ** 0.5 for x in (below, upto)]
        assert below.double().mean() <= share + errors[0], f"quantile {share}"
        assert upto.double().mean() >= share - errors[1], f"quantile {share}"


# --- arguments


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_kv": 64, "seq_len": 128}, "mqar: num_kv=64 needs seq_len >= 256, got 128"),
        ({"seq_len": 65}, "mqar: seq_len must be even (pairs and slots are two tokens), got 65"),
        ({"num_kv": 0}, "mqar: num_kv must be at least 1, got 0"),
        ({"num_kv": 16, "vocab_size": 33}, "mqar: num_kv=16 needs vocab_size >= 34 and <= 2**31, got 33"),
        ({"vocab_size": 2**31 + 2}, "mqar: num_kv=16 needs vocab_size >= 34 and <= 2**31, got 2147483650"),
        ({"power_a": -5.0}, "mqar: power_a=-5.0 is too far from 1 for the 112 slots of this row"),
        ({"power_a": float("nan")}, "mqar: power_a=nan is too far from 1 for the 112 slots of this row"),
        ({"filler": "none"}, 'mqar: filler must be "zero", "random" or "random_no_keys", got "none"'),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_cells_that_cannot_be_drawn_say_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        MQAR(**wrong)
    assert str(error.value) == message


@pytest.mark.parametrize("V", [10, 11, 34, 2**31])
def test_tight_and_huge_vocabularies_work(V: int) -> None:
    cell = MQAR(vocab_size=V, seq_len=16, num_kv=4)
    drawn = rows(cell, 200)
    keys, values = context(cell, drawn)
    assert keys.max() < V // 2 <= values.min()
    assert values.max() < V
    if V == 10:
        assert torch.equal(keys.sort(dim=1).values, torch.arange(1, 5).expand(200, 4))


def test_mqar_is_a_registered_task_with_a_strict_schema() -> None:
    cell: Task = MQAR()
    assert isinstance(cell, Task)
    assert task["mqar"] is MQAR
    schema = arguments(MQAR)
    assert vars(schema(num_kv=4)) == vars(MQAR(num_kv=4))
    for wrong in ({"num_kvs": 4}, {"num_kv": "4"}, {"filler": "none"}):
        with pytest.raises(ValidationError):
            schema(**wrong)


def test_the_example_in_the_docstring() -> None:
    result = doctest.testmod(mqar)
    assert result.attempted == 3
    assert result.failed == 0
