"""What is planned from what is stored: composition of stacks, modes, shards, and choosing among candidates."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.record import RunRecord, run_key
from mixassay.runners.any_code import AnyCode
from mixassay.runners.choices import Choices, Question, rank
from mixassay.runners.plan import Plan, evenly, part, steps_of
from mixassay.spec import RunSpec, Sections, digest
from mixassay.sweep import Sweep

MakeRecord = Callable[..., RunRecord]

SWEEP = """\
version: 1
name: demo
task: {name: mqar, train_examples: 256}
train: {epochs: 2, batch_size: 32}
mixer: attention
sweep:
  grid: {mixer: [attention, mamba2], model.d_model: [16, 32]}
seeds: [0, 1, 2, 3, 4]
"""

SELECT = """\
version: 1
name: demo
task: {name: mqar}
train: {steps: 10}
mixer: attention
sweep:
  grid: {mixer: [attention, mamba2]}
  select: {axes: {train.lr: [1e-3, 1e-2]}, seeds: [100, 101]}
seeds: [0, 1, 2]
"""


class Keys:
    """Keys without a source tree."""

    def __init__(self, code: str = "s1") -> None:
        self.code = code

    def key(self, spec: RunSpec) -> str:
        return digest([spec.cell, spec.seed, spec.role, spec.tuned, self.code])

    def source(self, spec: Sections) -> str:
        return self.code


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Sweep]:
    def load(text: str) -> Sweep:
        path = tmp_path / "demo.yaml"
        path.write_text(text)
        return Sweep.load(path)

    return load


@pytest.fixture
def choices(tmp_path: Path) -> Choices:
    return Choices(tmp_path / "results" / "demo" / "selected.yaml")


def jobs(plan: Plan) -> list[tuple[str, list[int]]]:
    """(mixer and width, seeds) of all jobs, each taken and closed."""
    found = []
    while (job := plan.take()) is not None:
        first = job.specs[0]
        found.append((f"{first.mixer.name} {first.model.d_model}", [spec.seed for spec in job.specs]))
    return found


def test_seeds_of_a_cell_form_one_stack_in_the_sweeps_order(load: Any, choices: Choices) -> None:
    plan = Plan(load(SWEEP), Keys(), [], choices)
    seeds = [0, 1, 2, 3, 4]
    assert jobs(plan) == [(name, seeds) for name in ("attention 16", "attention 32", "mamba2 16", "mamba2 32")]


def test_stacks_are_cut_to_the_largest_size_and_so_that_every_slot_has_work(load: Any, choices: Choices) -> None:
    small = Plan(load(SWEEP), Keys(), [], choices, size=2)
    assert [seeds for _, seeds in jobs(small)][:3] == [[0], [1, 2], [3, 4]]
    many = Plan(load(SWEEP), Keys(), [], choices, pieces=8)
    assert [seeds for _, seeds in jobs(many)][:2] == [[0, 1], [2, 3, 4]]
    assert len(jobs(Plan(load(SWEEP), Keys(), [], choices, pieces=1000))) == 20


def test_composition_does_not_depend_on_what_is_stored(load: Any, choices: Choices, make_record: MakeRecord) -> None:
    sweep, keys = load(SWEEP), Keys()
    whole = Plan(sweep, keys, [], choices)
    first = whole.take()
    assert first is not None
    stored = [make_record(key=first.keys[1])]
    again = Plan(sweep, keys, stored, choices).take()
    assert again is not None
    assert again.id == first.id
    assert [spec.seed for spec in again.specs] == [0, 1, 2, 3, 4]
    rest = Plan(sweep, keys, stored, choices).left(again)
    assert [spec.seed for spec in rest.specs] == [0, 2, 3, 4]


def test_a_stack_whose_runs_are_all_stored_is_no_job(load: Any, choices: Choices, make_record: MakeRecord) -> None:
    sweep, keys = load(SWEEP), Keys()
    first = Plan(sweep, keys, [], choices).take()
    assert first is not None
    plan = Plan(sweep, keys, [make_record(key=key) for key in first.keys], choices)
    assert len(jobs(plan)) == 3
    assert plan.missing() == 15
    assert plan.finished(plan.cells[first.specs[0].cell])


@pytest.mark.parametrize(
    ("mode", "trained"),
    [
        ("cached", {"killed", "oom", "timeout"}),
        ("retry", {"killed", "oom", "timeout", "error"}),
        ("force", {"ok", "diverged", "killed", "oom", "timeout", "error"}),
        ("read-only", set()),
    ],
)
def test_modes(load: Any, choices: Choices, make_record: MakeRecord, mode: Any, trained: set[str]) -> None:
    for status in ("ok", "diverged", "killed", "oom", "timeout", "error"):
        plan = Plan(load(SWEEP), Keys(), [make_record(key="k", status=status)], choices, mode=mode)
        assert plan.wants("k") == (status in trained), status
    assert plan.wants("never stored") == (mode != "read-only")


def test_what_has_been_trained_now_is_not_wanted_again_even_by_force(
    load: Any, choices: Choices, make_record: MakeRecord
) -> None:
    plan = Plan(load(SWEEP), Keys(), [], choices, mode="force")
    plan.learn(make_record(key="k", status="error"))
    assert not plan.wants("k")


def test_other_code_makes_other_jobs(load: Any, choices: Choices) -> None:
    a, b = (Plan(load(SWEEP), Keys(code), [], choices).take() for code in ("s1", "s2"))
    assert a is not None
    assert b is not None
    assert a.id != b.id, "a checkpoint of old code must not be continued"


class Coded:
    """As a recorder whose code is `source`."""

    def __init__(self, source: str) -> None:
        self.code = source

    def key(self, spec: RunSpec | RunRecord, source: str | None = None) -> str:
        return run_key(spec, self.code if source is None else source, "mqar/1", "cpu, torch 2.13")

    def source(self, spec: Sections) -> str:
        return self.code


def by_code(make_record: MakeRecord, specs: Sequence[RunSpec], code: str, **fields: Any) -> list[RunRecord]:
    keys, made = Coded(code), {"commit": "a" * 40, "dirty": False, "patch": None, "source": code, "version": "0"}
    return [
        make_record(
            key=keys.key(s), cell=s.cell, seed=s.seed, role=s.role, tuned=s.tuned, code=made,
            metrics={"valid/accuracy": s.train.lr}, **fields,
        )
        for s in specs
    ]  # fmt: skip


def test_any_code_takes_whole_cells_of_another_version(load: Any, choices: Choices, make_record: MakeRecord) -> None:
    sweep = load(SWEEP)
    whole, part, *_ = (sweep.reported(cell) for cell in sweep.cells())
    records = by_code(make_record, whole, "old") + by_code(make_record, part[:4], "old")
    records += by_code(make_record, part[4:], "older")
    plan = Plan(sweep, AnyCode(Coded("new"), records, sweep.seeds), records, choices, mode="any-code")
    assert [seeds for _, seeds in jobs(plan)] == [[0, 1, 2, 3, 4]] * 3, "seeds of two versions are no cell"
    assert plan.finished(plan.cells[whole[0].cell])
    assert len(jobs(Plan(sweep, Coded("new"), records, choices))) == 4


def test_any_code_prefers_the_present_one(load: Any, choices: Choices, make_record: MakeRecord) -> None:
    sweep = load(SWEEP)
    specs = sweep.reported(sweep.cells()[0])
    new = by_code(make_record, specs[:2], "new", time={"start": "2026-01-01T00:00:00Z", "seconds": 1.0})
    records = [*by_code(make_record, specs, "old"), *new]
    keys = AnyCode(Coded("new"), records, sweep.seeds)
    assert [keys.key(spec) == Coded("new").key(spec) for spec in specs] == [True, True, False, False, False]
    other_task = [record.model_copy(update={"data": "mqar/2"}) for record in records]
    keys = AnyCode(Coded("new"), other_task, sweep.seeds)
    assert keys.key(specs[4]) == Coded("new").key(specs[4])


def test_any_code_tunes_with_what_other_versions_tried(load: Any, choices: Choices, make_record: MakeRecord) -> None:
    sweep = load(SELECT)
    tried = [spec for cell in sweep.cells() for spec in sweep.tuning(cell) if spec.seed == 100]
    records = by_code(make_record, tried, "old")
    plan = Plan(sweep, AnyCode(Coded("new"), records, sweep.seeds), records, choices, mode="any-code")
    left = [spec for job in plan.queue for spec in plan.left(job).specs]
    assert [(spec.role, spec.seed) for spec in left] == [("tune", 101)] * 4


def test_shards_part_the_cells(load: Any) -> None:
    cells = load(SWEEP).cells()
    parts = [part(cells, (i, 3)) for i in (1, 2, 3)]
    assert sorted(c.cell for cut in parts for c in cut) == sorted(c.cell for c in cells)
    assert sorted(len(cut) for cut in parts) == [1, 1, 2]


def test_evenly() -> None:
    specs: Any = list(range(7))
    assert [list(cut) for cut in evenly(specs, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert len(evenly(specs, 100)) == 7


def test_steps_of(load: Any) -> None:
    sweep = load(SWEEP)
    assert steps_of(sweep.reported(sweep.cells()[0])[0]) == 2 * (256 // 32)


class TestSelect:
    def tune(self, plan: Plan, make: MakeRecord, best: float, keys: Keys) -> None:
        """Do all jobs there are now; the candidate `best` is better on validation."""
        while (job := plan.take()) is not None:
            for spec in job.specs:
                value = 0.9 if spec.train.lr == best else 0.5
                metrics = {"valid/accuracy": value, "valid/loss": 1 - value, "test/accuracy": 1 - value}
                plan.learn(make(key=keys.key(spec), cell=spec.cell, role=spec.role, tuned=spec.tuned, metrics=metrics))
            plan.close(job)
            if job.specs[0].role == "report":
                return

    def test_tuning_then_choice_then_reported_runs(self, load: Any, choices: Choices, make_record: MakeRecord) -> None:
        keys, sweep = Keys(), load(SELECT)
        plan = Plan(sweep, keys, [], choices)
        assert len(plan.queue) == 2, "one stack of all candidates and tuning seeds for each cell"
        job = plan.queue[0]
        assert [(spec.train.lr, spec.seed) for spec in job.specs] == [
            (1e-3, 100),
            (1e-3, 101),
            (1e-2, 100),
            (1e-2, 101),
        ]
        assert plan.missing() == 6
        self.tune(plan, make_record, 1e-2, keys)
        reported = [spec for state in plan.cells.values() for spec in state.reported]
        assert {spec.train.lr for spec in reported} == {1e-2}
        assert {spec.seed for spec in reported} == {0, 1, 2}
        assert {spec.role for spec in reported} == {"report"}

    def test_a_cell_goes_on_as_soon_as_it_is_tuned(self, load: Any, choices: Choices, make_record: MakeRecord) -> None:
        keys = Keys()
        plan = Plan(load(SELECT), keys, [], choices)
        first, second = plan.take(), plan.take()
        assert first is not None
        assert second is not None
        assert plan.take() is None
        for spec in first.specs:
            plan.learn(make_record(key=keys.key(spec), tuned=spec.tuned, metrics={"valid/accuracy": 0.5}))
        plan.close(first)
        job = plan.take()
        assert job is not None
        assert [spec.role for spec in job.specs] == ["report"] * 3
        assert job.specs[0].mixer == first.specs[0].mixer

    def test_a_cell_with_a_failed_tuning_run_is_not_chosen_for(
        self, load: Any, choices: Choices, make_record: MakeRecord
    ) -> None:
        keys = Keys()
        plan = Plan(load(SELECT), keys, [], choices)
        job = plan.take()
        assert job is not None
        for n, spec in enumerate(job.specs):
            plan.learn(make_record(key=keys.key(spec), status="ok" if n else "error", tuned=spec.tuned))
        plan.close(job)
        assert not plan.cells[job.specs[0].cell].reported
        assert job.specs[0].cell not in Choices(choices.path).entries
        assert [record.status for record in plan.failures()] == ["error"]

    def test_the_choice_is_frozen(self, load: Any, choices: Choices, make_record: MakeRecord) -> None:
        keys, sweep = Keys(), load(SELECT)
        self.tune(Plan(sweep, keys, [], choices), make_record, 1e-2, keys)
        again = Plan(sweep, keys, [], Choices(choices.path))
        assert all(spec.role == "report" for job in again.queue for spec in job.specs if "attention" in spec.mixer.name)

    def test_new_code_tunes_again_unless_the_file_is_committed(
        self, load: Any, choices: Choices, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys, sweep = Keys(), load(SELECT)
        self.tune(Plan(sweep, keys, [], choices), make_record, 1e-2, keys)
        cell = next(iter(Choices(choices.path).entries))
        plan = Plan(sweep, Keys("s2"), [], Choices(choices.path))
        assert not plan.cells[cell].reported
        monkeypatch.setattr(Choices, "_is_committed", lambda self, cell: True)
        plan = Plan(sweep, Keys("s2"), [], Choices(choices.path))
        assert plan.cells[cell].reported[0].train.lr == 1e-2

    def test_new_code_tunes_again_where_all_runs_had_diverged(
        self, load: Any, choices: Choices, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys, sweep = Keys(), load(SELECT)
        plan = Plan(sweep, keys, [], choices)
        job = plan.take()
        assert job is not None
        for spec in job.specs:
            plan.learn(make_record(key=keys.key(spec), status="diverged", tuned=spec.tuned, metrics={}))
        plan.close(job)
        monkeypatch.setattr(Choices, "_is_committed", lambda self, cell: True)
        cell = job.specs[0].cell
        assert Plan(sweep, keys, [], Choices(choices.path)).cells[cell].reported, "the same code would diverge again"
        assert not Plan(sweep, Keys("s2"), [], Choices(choices.path)).cells[cell].reported

    def test_other_candidates_or_seeds_tune_again(self, load: Any, choices: Choices, make_record: MakeRecord) -> None:
        keys = Keys()
        self.tune(Plan(load(SELECT), keys, [], choices), make_record, 1e-2, keys)
        for old, new in (("1e-2]", "2e-2]"), ("[100, 101]", "[100, 102]")):
            plan = Plan(load(SELECT.replace(old, new)), keys, [], Choices(choices.path))
            assert not any(state.reported for state in plan.cells.values()), new

    def test_a_choice_that_is_no_candidate_is_an_error(
        self, load: Any, choices: Choices, make_record: MakeRecord
    ) -> None:
        keys = Keys()
        self.tune(Plan(load(SELECT), keys, [], choices), make_record, 1e-2, keys)
        text = choices.path.read_text()
        choices.path.write_text(text.replace("choice: {train.lr: 0.01}", "choice: {train.lr: 0.5}"))
        assert choices.path.read_text() != text
        with pytest.raises(UserError, match=r"none of its candidates"):
            Plan(load(SELECT), keys, [], Choices(choices.path))

    def test_a_broken_file_is_an_error_with_a_way_out(self, choices: Choices) -> None:
        choices.path.parent.mkdir(parents=True)
        choices.path.write_text("a: [1,")
        with pytest.raises(UserError, match=r"selected.yaml: not YAML .* delete it"):
            Choices(choices.path)


class TestRank:
    asked = Question("c", {}, ({"lr": 1}, {"lr": 2}, {"lr": 3}), (100, 101), "valid/accuracy", "s1")

    def best(
        self, make: MakeRecord, runs: Sequence[tuple[int, float | None, float]], by: str = "valid/accuracy"
    ) -> int:
        """`runs`: (lr, accuracy or None for diverged, loss)."""
        records = [
            make(
                tuned={"lr": lr},
                status="ok" if accuracy is not None else "diverged",
                metrics={} if accuracy is None else {"valid/accuracy": accuracy, "valid/loss": loss},
            )
            for lr, accuracy, loss in runs
        ]
        asked = Question("c", {}, self.asked.candidates, (100, 101), by, "s1")
        return min((rank(asked, c, records)[0], i) for i, c in enumerate(asked.candidates))[1] + 1

    def test_best_mean(self, make_record: MakeRecord) -> None:
        runs = [(1, 0.2, 1.0), (1, 0.9, 1.0), (2, 0.6, 1.0), (2, 0.6, 1.0), (3, 0.1, 1.0), (3, 0.1, 1.0)]
        assert self.best(make_record, runs) == 2

    def test_a_loss_is_best_low(self, make_record: MakeRecord) -> None:
        runs = [(1, 0.9, 3.0), (1, 0.9, 3.0), (2, 0.1, 1.0), (2, 0.1, 1.0), (3, 0.5, 2.0), (3, 0.5, 2.0)]
        assert self.best(make_record, runs, by="valid/loss") == 2

    def test_diverged_is_worst(self, make_record: MakeRecord) -> None:
        runs = [(1, 0.1, 1.0), (1, 0.1, 1.0), (2, 1.0, 0.1), (2, None, 0.0), (3, None, 0.0), (3, None, 0.0)]
        assert self.best(make_record, runs) == 1

    def test_ties_go_to_the_lower_loss_then_to_the_first(self, make_record: MakeRecord) -> None:
        runs = [(1, 1.0, 0.3), (1, 1.0, 0.3), (2, 1.0, 0.1), (2, 1.0, 0.1), (3, 1.0, 0.1), (3, 1.0, 0.1)]
        assert self.best(make_record, runs) == 2

    def test_all_diverged_is_the_first(self, make_record: MakeRecord) -> None:
        assert self.best(make_record, [(lr, None, 0.0) for lr in (1, 1, 2, 2, 3, 3)]) == 1
