"""In-context retrieval at lengths: which tokens are kept, and what of it is told."""

import json
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.runners.eval import kept, retrieval
from mixassay.runners.eval.kept import Asked
from mixassay.runners.eval.question import Answer
from mixassay.runners.eval.retrieval import Row
from mixassay.tokens import Bytes

FILLER = "".join(f"Line {i:03} says little. " for i in range(100))  # 2200 bytes


def written(tmp_path: Path, name: str, *rows: object) -> Path:
    (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def hidden(at: int) -> Row:
    """The answer in line `at` of the filler."""
    return Row(
        FILLER.replace(f"Line {at:03} says little", f"Line {at:03} is by Anna"), "The name is", ("Anna", "A. K.")
    )


def test_both_layouts(tmp_path: Path) -> None:
    text = {"text": " One. Two is long.\nThree is ", "value": " 3 "}
    asked = {"context": "One [PAR] is first. Which?", "question": "Which?", "answers": ["One", "1"]}
    assert retrieval.load("swde", written(tmp_path, "swde", text, asked), None) == [
        Row("One. Two is long.\n", "Three is", ("3",)),
        Row("One  is first. ", "Which?", ("One", "1")),
    ]
    (endless,) = retrieval.load("fda", written(tmp_path, "fda", {"text": "so " * 99 + "so", "value": "so"}), 1)
    assert endless.ending.split() == ["so"] * retrieval.LONGEST_ENDING


@pytest.mark.parametrize("row", [{"text": "One"}, {"context": "One", "question": "?", "answers": []}, ["One"], 1])
def test_other_rows_are_refused(tmp_path: Path, row: object) -> None:
    with pytest.raises(UserError, match=r"nq\.jsonl:1: expected"):
        retrieval.load("nq", written(tmp_path, "nq", row), None)


def test_without_a_length_texts_are_whole() -> None:
    asked = retrieval.make("swde", [hidden(50)], Bytes())
    assert asked.questions[0].prompt == hidden(50).document + "The name is"
    assert not asked.questions[0].cut


@pytest.mark.parametrize("at", [0, 1, 50, 98, 99])
def test_a_window_around_the_answer_and_the_ending_are_kept(at: int) -> None:
    row = hidden(at)
    (question,) = retrieval.make("squad", [row], Bytes(), 512).questions
    window, _, ending = question.prompt.rpartition("The name is")
    assert ending == ""
    assert window.strip() in row.document
    assert "is by Anna" in window
    assert question.tokens == 512 - retrieval.NEW_TOKENS, "wherever the answer stands, all of the length is used"
    assert question.whole == len(row.document) + len("The name is")
    before, after = window.split("Anna")
    if at == 50:
        assert abs(len(before) - len(after)) <= len("Anna") + 2


def test_triviaqa_and_drop_keep_their_beginning() -> None:
    for name in retrieval.FROM_THE_BEGINNING:
        (question,) = retrieval.make(name, [hidden(50)], Bytes(), 512).questions
        assert question.prompt.startswith("Line 000")
        assert question.prompt.endswith(" The name is")
        assert "Anna" not in question.prompt


def test_what_fits_is_left_alone_and_shares_are_told() -> None:
    short, lost = Row("It was Anna. ", "It was", ("anna",)), Row(FILLER, "The name is", ("Anna",))
    asked = retrieval.make("swde", [hidden(7), short, lost, hidden(90)], Bytes(), 512)
    assert asked.questions[1].prompt == "It was Anna. It was"
    assert [question.cut for question in asked.questions] == [True, False, True, True]
    assert asked.questions[2].prompt.startswith("Line 000"), "an answer that is nowhere: the beginning"
    assert all(question.tokens + question.new_tokens <= 512 for question in asked.questions)
    metrics = kept.metrics(Asked((asked,), ((Answer("", 0.0),) * 4,), (1.0,), 1.0))
    assert (metrics["test/cut_prompts"], metrics["test/answer_in_prompt"]) == (0.75, 0.75)


def test_signs_of_several_bytes_are_cut_to_fit() -> None:
    row = Row("é€𝄞" * 300, "Anna is", ("𝄞",))
    (question,) = retrieval.make("nq", [row], Bytes(), 256).questions
    assert 200 <= question.tokens <= 256 - retrieval.NEW_TOKENS


def test_an_ending_that_is_longer_than_the_length() -> None:
    with pytest.raises(UserError, match=r"swde at length 64: .* leave no room for the document"):
        retrieval.make("swde", [Row(FILLER, "A beginning of a sentence is", ("x",))], Bytes(), 64)


def test_lengths_are_other_data_but_whole_texts_stay_what_they_were() -> None:
    whole, at_512, at_1024 = (retrieval.make("swde", [hidden(3)], Bytes(), length) for length in (None, 512, 1024))
    assert len({whole.data, at_512.data, at_1024.data}) == 3
    assert "length" not in whole.recipe
    assert (at_512.name, at_512.recipe["window"]) == ("swde@512", "answer")
