"""From answers to a set's score."""

import pytest

from mixassay.runners.longbench.score import Answered, score, score_by_length
from mixassay.runners.longbench.sets import SETS


def test_the_sets() -> None:
    assert len(SETS) == 21
    assert sum(one.by_length for one in SETS.values()) == 13
    assert sum(one.rows for one in SETS.values()) == 4750
    assert {one.name for one in SETS.values() if one.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert {one.name for one in SETS.values() if not one.chat} == {
        *("trec", "triviaqa", "samsum", "lsht"),
        *("lcc", "repobench-p"),
    }


def test_a_score_is_the_mean_of_the_best_over_the_answers() -> None:
    got = score("qasper", [Answered("Paris", ["London", "Paris"]), Answered("Rome", ["Paris"])])
    assert (got.value, got.n, got.of, got.rows, got.tools) == (50, 2, 200, (1, 0), {})


def test_few_shot_answers_are_cut_after_their_first_line() -> None:
    answer = "\n\nParis\nQuestion: what"
    assert score("triviaqa", [Answered(answer, ["Paris"])]).value == 100
    assert score("hotpotqa", [Answered(answer, ["Paris"])]).value == 50


def test_code_says_by_which_edit_distance() -> None:
    answered = [Answered("abcd", ["abcd"])]
    assert score("lcc", answered).tools["edit_distance"] == "difflib"
    pytest.importorskip("rapidfuzz")
    tools = score("lcc", answered, edit_distance="levenshtein").tools
    assert tools["edit_distance"] == "levenshtein"
    assert "rapidfuzz" in tools


def test_lengths_are_parted_at_4000_and_8000() -> None:
    rows = [Answered("Paris", ["Paris"], length=n) for n in (3999, 4000, 7999, 8000, 8001)]
    assert {bin: part.n for bin, part in score_by_length("qasper", rows).items()} == {"0-4k": 1, "4-8k": 2, "8k+": 2}
    assert list(score_by_length("qasper", rows[1:2])) == ["4-8k"]
    with pytest.raises(ValueError, match="length"):
        score_by_length("qasper", [Answered("Paris", ["Paris"])])
