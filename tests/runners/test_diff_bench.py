"""Benchmarks are compared by ratios within one run, and by nothing else."""

from typing import Any

import pytest

from mixassay.runners import diff_bench
from mixassay.runners.diff_bench import BenchChange

ENV = {"id": "1", "class": "GPU X, torch 2.11", "device": "GPU X", "cpu": "CPU Y"}


def run(
    ours: float,
    peers: dict[str, float] | None = None,
    *,
    floor: float | None = None,
    spread: float = 0.005,
    **more: Any,
) -> list[dict[str, Any]]:
    """The records of one run of `bench kernels` at one shape, for one pass; times in ms."""

    def record(name: str, ms: float, version: str | None) -> dict[str, Any]:
        times = {"ms": ms, "ms_p20": ms * (1 - spread), "ms_p80": ms * (1 + spread), "floor_ms": floor}
        about = {"bench": "kernels", "op": "gla", "dtype": "bfloat16", "B": 4, "T": 2048, "H": 16, "D": 64}
        who = {"implementation": name, "ours": name.startswith("mixassay"), "version": version}
        return {**about, **who, "time": "2026-01-01", "env": ENV, "forward": {"status": "ok", **times}, **more}

    others = [record("fla", ms, version) for version, ms in (peers if peers is not None else {"0.5": 2.0}).items()]
    return [record("mixassay triton", ours, None), *others]


def one(base: list[dict[str, Any]], head: list[dict[str, Any]], **more: Any) -> BenchChange:
    (change,) = diff_bench.compare(base, head, **more)
    return change


def test_a_machine_that_is_slower_at_everything_changes_nothing() -> None:
    change = one(run(1.0), run(1.5, {"0.5": 3.0}))
    assert (change.verdict, change.reference) == ("equivalent", "fla 0.5")
    assert change.about == ("bench=kernels", "op=gla", "dtype=bfloat16", "D=64", "H=16", "B=4", "T=2048", "forward")


def test_ours_that_is_slower_beside_its_peer_is_regressed() -> None:
    change = one(run(1.0), run(1.2))
    assert change.verdict == "regressed"
    assert change.ratios is not None
    assert [ratio.middle for ratio in change.ratios] == pytest.approx([0.5, 0.6])
    assert one(run(1.2), run(1.0)).verdict == "improved"


def test_a_change_within_the_spread_of_the_repeats_is_no_evidence() -> None:
    assert one(run(1.0, spread=0.2), run(1.2, spread=0.2)).verdict == "no evidence"
    assert one(run(1.0), run(1.045)).verdict == "no evidence", "below 5 %, but not bounded by it"


def test_everything_timed_beside_it_must_agree() -> None:
    base = run(1.0, floor=0.2)
    assert one(base, run(1.0, {"0.5": 1.5}, floor=0.2)).verdict == "no evidence", "it was the peer that changed"
    assert one(base, run(1.3, floor=0.2)).verdict == "regressed"


def test_a_peer_of_another_version_or_none_is_no_yardstick() -> None:
    change = one(run(1.0), run(1.0, {"0.6": 2.0}))
    assert (change.verdict, change.note) == ("not comparable", "nothing that both runs timed beside it")
    assert one(run(1.0, {}), run(9.0, {})).verdict == "not comparable", "absolute times are never compared"
    assert one(run(1.0, {}, floor=0.5), run(2.0, {}, floor=0.5)).verdict == "regressed"


def test_devices_must_be_alike() -> None:
    elsewhere = run(1.2, env={**ENV, "device": "GPU Z", "class": "GPU Z, torch 2.11"})
    assert one(run(1.0), elsewhere).verdict == "not comparable"
    assert one(run(1.0), elsewhere, across_env=True).verdict == "regressed"


def test_ours_that_gives_no_time_any_more_has_failed() -> None:
    wrong = run(1.0, forward={"status": "wrong", "reason": "dq 3e-1"})
    change = one(run(1.0), wrong)
    assert (change.verdict, change.note) == ("failed", "wrong: dq 3e-1")
    assert one(wrong, run(1.0)).verdict == "new"
    assert one(wrong, wrong).verdict == "not comparable"


def test_the_newest_run_counts_and_runs_are_not_mixed() -> None:
    newer = run(1.3, {"0.5": 2.6}, time="2026-02-01")
    assert one(newer + run(1.0), newer).verdict == "equivalent"
    ours, _ = run(1.0, time="2026-03-01")
    assert one(run(1.0), [*run(1.0), ours]).verdict == "not comparable", "a run of ours alone has no peer from another"


def test_sides_and_records_without_peers() -> None:
    assert one(run(1.0), []).verdict == "missing"
    assert one([], run(1.0)).verdict == "new"
    assert diff_bench.compare([{"bench": "decode", "mixer": "gla", "env": ENV}], []) == []


def test_a_training_step_is_compared_by_its_plain_loop() -> None:
    def step(ms: float, loop: float) -> list[dict[str, Any]]:
        def times(ms: float) -> dict[str, Any]:
            return {"status": "ok", "ms": ms, "ms_p20": 0.99 * ms, "ms_p80": 1.01 * ms}

        about = {"bench": "train", "mixer": "mamba2", "d_model": 64, "pairs": 4, "T": 256, "B": 256}
        rest = {"time": "2026-01-01", "env": ENV}
        ours = {**about, "implementation": "mixassay", "ours": True, "stack 5": times(2 * ms), "stack 20": times(ms)}
        return [ours | rest, {**about, "implementation": "plain loop", "ours": False, "step": times(loop)} | rest]

    slower = diff_bench.compare(step(1.0, 12.0), step(1.5, 12.0))
    assert [(change.about[-1], change.verdict) for change in slower] == [
        ("stack 5", "regressed"),
        ("stack 20", "regressed"),
    ]
    assert {change.verdict for change in diff_bench.compare(step(1.0, 12.0), step(1.5, 18.0))} == {"equivalent"}
