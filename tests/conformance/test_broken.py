"""Each of four broken mixers is caught by the check that is about its fault, and by no other."""

from pathlib import Path

import pytest

from mixassay.runners.conformance.subject import Subject, find
from mixassay.runners.conformance.table import CHECKS, Result, judge, run

CAUGHT = {
    "Sound": None,
    "LooksAhead": "causality",
    "WrongLastChunk": "lengths",
    "GrowingState": "state_size",
    "DroppedGradient": "carried_gradients",
}
LOOKS_AHEAD_TOO = {"causal_gradients", "lengths", "recurrent"}
SHORT = {"compiled", "recall", "time_law"}
"""Slow, and about none of these faults: left to the built-in mixers' test."""


def subject(name: str) -> Subject:
    return find(f"{Path(__file__).with_name('broken.py')}:{name}")


def results(name: str) -> dict[str, Result]:
    checks = tuple(check for check in CHECKS if check.name not in SHORT)
    return {result.check.name: result for result in run(subject(name), checks)}


@pytest.mark.parametrize(("name", "caught"), CAUGHT.items())
def test_the_right_check_fails_and_no_other(name: str, caught: str | None) -> None:
    found = results(name)
    assert [check for check, result in found.items() if result.status == "fail"] == ([caught] if caught else [])
    needing = {check for check, result in found.items() if result.status == "not judged"}
    assert needing == {check.name for check in CHECKS if check.name in needing and blocked(check.name, caught)}


def blocked(name: str, by: str | None) -> bool:
    """Whether a check needs another, at first or second hand."""
    needs = next(check.needs for check in CHECKS if check.name == name)
    return by in needs or any(blocked(need, by) for need in needs)


def test_the_smallest_failing_inputs() -> None:
    found = {name: results(name)[caught] for name, caught in CAUGHT.items() if caught}
    ahead, last, dropped = (found[name] for name in ("LooksAhead", "WrongLastChunk", "DroppedGradient"))
    assert ahead.message.startswith("y[0, 15] moves by")
    assert ahead.message.endswith("when x[0, 16:] changes")
    assert ahead.smallest == "x [1, 17, 16] = 0"
    assert last.smallest.startswith("x [1, 17, 16] = 0 but x[0, ")
    assert last.smallest.count("=") == 2
    assert dropped.smallest.startswith("x [1, 2, 16]")
    assert "declared constant in T and measured linear" in found["GrowingState"].message
    assert not found["GrowingState"].smallest


def test_what_is_not_judged_would_have_failed() -> None:
    """So nothing sound is passed over."""
    checks = {check.name: check for check in CHECKS}
    assert {name for name in LOOKS_AHEAD_TOO if judge(subject("LooksAhead"), checks[name]).status == "fail"} == (
        LOOKS_AHEAD_TOO
    )
    assert judge(subject("WrongLastChunk"), checks["recurrent"]).status == "fail"
