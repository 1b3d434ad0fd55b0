"""RULER's two scores, on answers scored by hand."""

import pytest

from mixassay.tasks.ruler.scores import cleaned, score
from mixassay.tasks.ruler.table import TASKS


@pytest.mark.parametrize(
    ("task", "prediction", "answers", "expected"),
    [
        ("niah_single_1", " 1234567.", ["1234567"], 1.0),
        ("niah_single_1", "12345678", ["1234567"], 1.0),  # a substring is enough
        ("niah_single_1", "123456 7", ["1234567"], 0.0),
        ("niah_multivalue", "1111111, 3333333", ["1111111", "2222222", "3333333", "4444444"], 0.5),
        ("niah_single_3", "AB-cd", ["ab-CD"], 1.0),
        ("vt", "ABCDE\x00VWXYZ", ["ABCDE", "VWXYZ", "AAAAA", "BBBBB"], 0.5),
        ("cwe", "", ["a", "b"], 0.0),
        ("fwe", "abcdef ghijkl mnopqr", ["abcdef", "mnopqr", "zzzzzz"], 2 / 3),
        ("qa_1", "in Denver, I think", ["Denver, Colorado", "Denver", "denver"], 1.0),  # any, not the share of them
        ("qa_1", "Boston", ["Denver, Colorado", "Denver"], 0.0),
        ("qa_2", "Yes", ["yes"], 1.0),
        ("qa_1", "two\twords", ["two words"], 0.0),  # a tab is a control character
    ],
)
def test_by_hand(task: str, prediction: str, answers: list[str], expected: float) -> None:
    assert score(task, prediction, answers) == pytest.approx(expected)


def test_control_characters_become_newlines_and_the_ends_are_stripped() -> None:
    assert cleaned(" \n\x01a\tb\x00\x1fc\x7f\n\x02") == "a\nb\n\nc\x7f"


def test_every_task_has_a_score_and_a_budget_of_the_reference() -> None:
    budgets = {name: task.new_tokens for name, task in TASKS.items()}
    expected = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert len(budgets) == 13
    assert budgets == {name: expected.get(name, 128) for name in budgets}
    assert {name for name, task in TASKS.items() if task.scoring == "any"} == {"qa_1", "qa_2"}
