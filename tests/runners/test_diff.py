"""Verdicts from records made by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from mixassay.record import RunRecord
from mixassay.runners import diff
from mixassay.runners.diff import Change, Diff, Rule

Runs = Callable[..., list[RunRecord]]
CODE = {"commit": "b" * 40, "dirty": False, "patch": None, "source": "s2", "version": "0.1.0"}
STEADY = (0.700, 0.703, 0.698, 0.701, 0.699)


@pytest.fixture
def runs(make_record: Callable[..., RunRecord]) -> Runs:
    """Runs of a cell on seeds 0, 1, ...; None is a seed that diverged. Weights follow from the accuracy."""

    def runs(values: Sequence[float | None], cell: str = "c0", mixer: str = "gla", **fields: Any) -> list[RunRecord]:
        made = []
        for seed, value in enumerate(values):
            scored = {"rows": 100, "scored": 24_000, "loss": 0.5}
            whole: dict[str, Any] = {
                "key": f"{cell} {seed} {value} {fields}",
                "cell": cell,
                "seed": seed,
                "status": "ok" if value is not None else "diverged",
                "axes": {"mixer": mixer},
                "config": {"mixer": {"name": mixer}, "task": {"name": "mqar"}},
                "eval": [{"split": "test", "cell": {}, "accuracy": value, **scored}] if value is not None else [],
                "weights": f"sha256:{value}",
            }
            made.append(make_record(value, **(whole | fields)))
        return made

    return runs


def one(found: Diff) -> Change:
    (change,) = found.changes
    return change


def less(values: Sequence[float], by: float) -> list[float]:
    return [value - by for value in values]


def test_a_clear_fall_is_regressed_and_a_clear_rise_improved(runs: Runs) -> None:
    found = diff.compare(runs(STEADY), runs(less(STEADY, 0.05)), Rule())
    assert one(found).verdict == "regressed"
    assert one(found).delta == pytest.approx(-0.05)
    assert [mixer.verdict for mixer in found.mixers] == ["regressed"]
    assert one(diff.compare(runs(less(STEADY, 0.05)), runs(STEADY), Rule())).verdict == "improved"


def test_the_same_numbers_and_weights_are_identical(runs: Runs) -> None:
    assert one(diff.compare(runs(STEADY), runs(STEADY, code=CODE), Rule())).verdict == "identical"
    other = [r.model_copy(update={"weights": "sha256:other"}) for r in runs(STEADY)]
    assert one(diff.compare(runs(STEADY), other, Rule())).verdict == "equivalent"
    part = one(diff.compare(runs(STEADY), runs(STEADY[:2]), Rule()))
    assert (part.verdict, part.notes) == ("identical", ("after: 3 not run",))
    lost = diff.compare(runs([None] * 5), runs([None] * 5), Rule())
    assert one(lost).verdict == "identical", "diverging is an outcome like others"
    crashed = diff.compare(runs([None] * 5, status="error"), runs([None] * 5, status="error"), Rule())
    assert one(crashed).verdict == "single seed", "an accident is not"


def test_all_seeds_at_100_are_equivalent_and_not_an_error(runs: Runs) -> None:
    other = [r.model_copy(update={"weights": "sha256:other"}) for r in runs([1.0] * 5)]
    change = one(diff.compare(runs([1.0] * 5), other, Rule()))
    assert (change.verdict, change.p) == ("equivalent", 1.0)


def test_a_change_below_the_margin_is_no_change(runs: Runs) -> None:
    small = runs(less(STEADY, 0.012))
    change = one(diff.compare(runs(STEADY), small, Rule(margin=0.02)))
    assert change.verdict == "equivalent"
    assert change.p is not None
    assert change.p < 0.05
    assert one(diff.compare(runs(STEADY), small, Rule())).verdict == "regressed"


def test_noise_is_no_evidence_with_the_smallest_change_it_could_have_seen(runs: Runs) -> None:
    base, head = [0.99, 0.4, 0.98, 0.45, 0.99], [0.42, 0.99, 0.99, 0.41, 0.97]
    change = one(diff.compare(runs(base), runs(head), Rule()))
    assert change.verdict == "no evidence"
    assert change.evidence is not None
    se = np.sqrt(np.var(base, ddof=1) / 5 + np.var(head, ddof=1) / 5)
    df = change.evidence.welch.df
    unpaired = (scipy.stats.t.ppf(0.9875, df) + scipy.stats.t.ppf(0.8, df)) * se
    assert change.evidence.smallest == pytest.approx(unpaired)
    assert unpaired > 0.5


def test_a_change_that_the_size_of_the_table_explains_is_suspect(runs: Runs) -> None:
    base, head = [0.71, 0.69, 0.70, 0.72, 0.68], [0.68, 0.67, 0.66, 0.70, 0.655]  # p = 0.008
    assert one(diff.compare(runs(base), runs(head), Rule())).verdict == "regressed"
    many = [(f"n{i}", STEADY) for i in range(20)]
    before = runs(base) + [r for cell, values in many for r in runs(values, cell, "mamba2")]
    after = runs(head) + [r for cell, values in many for r in runs(values, cell, "mamba2", code=CODE)]
    found = diff.compare(before, after, Rule())
    (suspect,) = found.suspects
    assert suspect.cell == "c0"
    assert suspect.p is not None
    assert suspect.p < 0.05
    assert suspect.p_adjusted == pytest.approx(min(1, 21 * suspect.p)), "identical cells count in Holm's rule"
    assert found.counts == {"suspect": 1, "identical": 20}


def test_confirmation_looks_at_fresh_seeds_alone_and_in_the_same_direction(runs: Runs) -> None:
    base, head = [0.71, 0.69, 0.70, 0.72, 0.68], [0.68, 0.67, 0.66, 0.70, 0.655]
    many = [r for i in range(20) for r in runs(STEADY, f"n{i}", "mamba2")]
    found = diff.compare(runs(base) + many, runs(head) + many, Rule())

    def decided(before: Sequence[float | None], after: Sequence[float | None]) -> Change:
        again = diff.confirmed(found, {"c0": (runs(before), runs(after))})
        (change,) = [change for change in again.changes if change.cell == "c0"]
        return change

    fallen = decided(STEADY, less(STEADY, 0.03))
    assert fallen.verdict == "regressed"
    assert fallen.fresh is not None
    assert fallen.fresh.p_adjusted == fallen.fresh.p, "one suspect is a family of one"
    assert fallen.delta == pytest.approx(-0.027), "the reported numbers are still those of the table"
    assert decided(STEADY, less(STEADY, -0.03)).verdict == "no evidence", "the other way"
    assert decided(STEADY, less(STEADY, 0.001)).verdict == "equivalent"
    assert decided(STEADY, STEADY).verdict == "equivalent", "identical, but not on the table's own seeds"
    assert decided(base, [0.70, 0.715, 0.69, 0.70, 0.70]).verdict == "no evidence"
    assert decided(STEADY, [None] * 5).verdict == "failed"
    assert diff.confirmed(found, {}).suspects, "without fresh runs it remains what it was"


def test_what_is_on_one_side_only(runs: Runs) -> None:
    found = diff.compare(runs(STEADY, "a") + runs(STEADY, "b"), runs(STEADY, "b") + runs(STEADY, "c"), Rule())
    assert {change.cell: change.verdict for change in found.changes} == {"a": "missing", "b": "identical", "c": "new"}
    tuning = runs(STEADY, "d", role="tune")
    assert len(diff.compare(tuning + runs(STEADY), runs(STEADY), Rule()).changes) == 1


def test_seeds_that_fail_now(runs: Runs) -> None:
    change = one(diff.compare(runs(STEADY), runs([*STEADY[:3], None, None]), Rule()))
    assert (change.verdict, change.notes) == ("failed", ("after: 2 diverged",))
    better = one(diff.compare(runs(STEADY), runs([*less(STEADY[:4], -0.1), None]), Rule()))
    assert better.verdict == "failed", "the seeds that are left are no improvement"
    worse = one(diff.compare(runs(STEADY), runs([*less(STEADY[:4], 0.1), None]), Rule()))
    assert worse.verdict == "regressed"
    cured = one(diff.compare(runs([*STEADY[:4], None]), runs(less(STEADY, 0.002)), Rule()))
    assert (cured.verdict, cured.notes) == ("equivalent", ("before: 1 diverged",))


def test_fewer_than_three_seeds_get_numbers_and_no_verdict(runs: Runs) -> None:
    change = one(diff.compare(runs(STEADY[:2]), runs(less(STEADY[:2], 0.5)), Rule()))
    assert (change.verdict, change.p, change.delta) == ("single seed", None, pytest.approx(-0.5))


def test_seeds_that_are_not_shared_are_compared_by_welch_alone(runs: Runs) -> None:
    head = [r.model_copy(update={"seed": r.seed + 5}) for r in runs(less(STEADY, 0.05))]
    change = one(diff.compare(runs(STEADY), head, Rule()))
    assert change.verdict == "regressed"
    assert change.evidence is not None
    assert change.evidence.paired is None
    assert change.p == change.evidence.welch.p


def test_other_data_metrics_and_machines_are_not_comparable(runs: Runs) -> None:
    base, gpu = runs(STEADY), {"env": {"id": "9", "class": "NVIDIA H200, torch 2.13"}}
    change = one(diff.compare(base, runs(STEADY, data="mqar/2"), Rule()))
    assert (change.verdict, change.notes) == ("not comparable", ("data mqar/1 → mqar/2",))
    assert one(diff.compare(base, base, Rule(metric="valid/accuracy"))).verdict == "not comparable"
    moved = diff.compare(base, runs(less(STEADY, 0.05), **gpu), Rule())
    assert one(moved).verdict == "not comparable"
    assert "different kinds of machine: cpu, torch 2.13 → NVIDIA H200" in moved.warnings[0]
    assert one(diff.compare(base, runs(less(STEADY, 0.05), **gpu), Rule(across_env=True))).verdict == "regressed"
    both = base + runs(less(STEADY, 0.2), **gpu)
    assert one(diff.compare(both, runs(STEADY, code=CODE), Rule())).verdict == "identical", (
        "alike is compared with alike"
    )


def test_the_same_tuned_values_are_compared_where_there_are_such(runs: Runs) -> None:
    def tuned(lr: float) -> dict[str, Any]:
        return {"tuned": {"train.lr": lr}}

    base = runs(STEADY, **tuned(0.01))
    assert one(
        diff.compare(base, runs(less(STEADY, 0.1), **tuned(0.02)) + runs(STEADY, **tuned(0.01)), Rule())
    ).verdict == ("identical")
    change = one(diff.compare(base, runs(less(STEADY, 0.1), **tuned(0.02)), Rule()))
    assert (change.verdict, change.notes) == ("regressed", ("lr 0.01 → 0.02",))


def test_the_floor_of_a_mean_over_cells(runs: Runs) -> None:
    cell = {"split": "test", "rows": 10, "loss": 0.1, "accuracy": 0.5, "scored": 100}
    parts = [{**cell, "cell": {"num_kv": k}} for k in (4, 8)]
    base = runs([0.5] * 5, eval=parts)
    change = one(diff.compare(base, [r.model_copy(update={"weights": "x"}) for r in base], Rule()))
    assert change.evidence is not None
    assert change.evidence.welch.se == pytest.approx(np.sqrt(2 * (2 * 0.25 / 100 / 4) / 5)), "(v + v) / 2^2 a run"


def test_a_shift_that_no_cell_shows_is_plain_in_the_mixer(runs: Runs) -> None:
    rng = np.random.default_rng(3)
    before, after = [], []
    for i in range(12):
        place = {"axes": {"mixer": "gla", "task.num_kv": 2**i}}
        before += runs((0.7 + 0.02 * rng.standard_normal(5)).tolist(), f"c{i}", **place)
        after += runs((0.68 + 0.02 * rng.standard_normal(5)).tolist(), f"c{i}", **place)
    still = [r for i in range(12) for r in runs(STEADY, f"n{i}", "mamba2")]
    found = diff.compare(before + still, after + still, Rule())
    assert {mixer.name: mixer.verdict for mixer in found.mixers} == {"gla": "regressed", "mamba2": "identical"}
    assert "regressed" not in found.counts
    gla = found.mixers[0]
    assert gla.delta == pytest.approx(-0.02, abs=0.01)
    assert [change.place for change in gla.cells[:3]] == [{"task.num_kv": str(n)} for n in (1, 2, 4)], "in their order"


def test_mixers_are_named_by_what_they_differ_in(runs: Runs) -> None:
    def mixer(**args: Any) -> dict[str, Any]:
        return {"config": {"mixer": {"name": "gla", **args}, "task": {"name": "mqar"}}}

    both = runs(STEADY, "a", **mixer(heads=1)) + runs(STEADY, "b", **mixer(heads=2))
    assert [m.name for m in diff.compare(both, both, Rule()).mixers] == ["gla heads=1", "gla heads=2"]
