"""LongBench v2: loading, the prompt, and reading a choice from a response."""

import json
from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.runners.longbench import v2

RAW = {
    "_id": "1",
    "domain": "Code",
    "sub_domain": "Repository",
    "difficulty": "hard",
    "length": "long",
    "question": " Which? ",
    "choice_A": "one",
    "choice_B": "two {{context}}",
    "choice_C": "three\n",
    "choice_D": "four",
    "answer": "C",
    "context": "\nA text. ",
}
ROW = v2.Question(
    "1", " Which? ", ("one", "two {{context}}", "three\n", "four"), "C", "\nA text. ", "hard", "long", "Code"
)


def test_questions_are_read_from_json(cache: Any, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps([RAW]))  # as it lies on the hub
    (tmp_path / "longbench_v2.jsonl").write_text(json.dumps(RAW))
    assert v2.load(tmp_path / "data.json") == v2.load(tmp_path) == [ROW]


@pytest.mark.parametrize(("change", "said"), [({"answer": "E"}, "must be A, B, C or D"), ({}, "no field choice_D")])
def test_other_rows_are_refused(cache: Any, tmp_path: Path, change: dict[str, str], said: str) -> None:
    raw = {**RAW, **change} if change else {k: v for k, v in RAW.items() if k != "choice_D"}
    (tmp_path / "longbench_v2.jsonl").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=said):
        v2.load(tmp_path)


def test_the_prompt() -> None:
    pytest.importorskip("lm_eval")
    assert v2.prompt(ROW).endswith(
        "<text>\nA text.\n</text>\n\nWhat is the correct answer to this question: Which?\nChoices:\n(A) one\n"
        '(B) two {{context}}\n(C) three\n(D) four\n\nFormat your response as follows: "The correct answer is '
        '(insert answer here)".'
    )


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is (B)**", "B"),
        ("The correct answer is B", "B"),
        ("The correct answer is A, no: The correct answer is (D)", "D"),  # parentheses first
        ("The answer is (B)", None),
        ("The correct answer is (E)", None),
        ("", None),
    ],
)
def test_a_choice_is_read_from_a_response(response: str, letter: str | None) -> None:
    assert v2.chosen(response) == letter


def test_accuracy_overall_and_in_groups() -> None:
    easy = v2.Question("2", "", ("", "", "", ""), "A", "", "easy", "medium", "Law")
    said = [f"The correct answer is ({letter})" for letter in "CAB"]
    got = v2.score([ROW, easy, easy, easy], [*said, "I do not know"])
    assert got["overall"] == v2.Accuracy(50, 56.25, 4, 1)
    assert got["difficulty=hard"] == got["length=long"] == v2.Accuracy(100, 100, 1, 0)
    assert got["length=medium"].value == pytest.approx(100 / 3)
    assert got["domain=Law"].n == 3
    with pytest.raises(ValueError, match="zip"):
        v2.score([ROW], [])
