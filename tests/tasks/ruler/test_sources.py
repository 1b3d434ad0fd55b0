"""Texts, words and question files, and the errors of files that are not what they should be."""

import hashlib
import json
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.tasks.ruler.sources import Pairs, Sources, sentences


def test_sentences() -> None:
    text = 'Mr. Ahab came. "Is it so?" he said.  See p. 3, J. S. Mill!\nThe end [1]. 42 is (not one.) No'
    assert sentences(text) == [
        "Mr. Ahab came.",
        '"Is it so?" he said.',
        "See p. 3, J. S. Mill!",
        "The end [1].",
        "42 is (not one.)",
        "No",
    ]
    assert sentences("") == []


def test_pairs_are_the_sorted_set_without_being_written_out() -> None:
    adjectives = ["wide", "blue", "blue-eyed", "old", "ad hoc", "blue", "blue-eye"]
    nouns = ["zebra", "eyed-ant", "ant", "eye", "zebra", "tam-o'-shanter"]
    expected = sorted({f"{a}-{n}" for a in adjectives for n in nouns})
    pairs = Pairs(adjectives, nouns)
    assert [pairs[i] for i in range(len(pairs))] == expected
    with pytest.raises(IndexError):
        pairs[len(expected)]


def test_the_shipped_words_and_texts() -> None:
    sources = Sources()
    words, prose = sources.words(), sources.prose()
    assert (len(words.all), len(words.pairs)) == (8166, 6_171_620)
    assert prose.name == "on_liberty.txt+moby_dick.txt"
    assert len(prose.words) > 250_000  # enough for 131,072 tokens
    assert 15 < len(prose.words) / len(prose.ends) < 40


def test_a_text_file_and_the_layout_of_the_essays_are_the_same_words(tmp_path: Path) -> None:
    text = "One sentence here. And\nanother one."
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.json").write_text(json.dumps({"text": text}))
    plain, essays = (Sources(essay=(tmp_path / name,)).prose() for name in ("a.txt", "a.json"))
    assert plain.words == essays.words == text.split()
    assert plain.ends == [3]
    assert plain.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_questions(small: Sources) -> None:
    squad, hotpotqa = small.questions("squad"), small.questions("hotpotqa")
    assert (len(squad.questions), len(squad.documents)) == (360, 360)  # the unanswerable ones are left out
    asked = squad.questions[3]
    assert (asked.text, asked.answers) == ("What is said of topic 0-3?", ("topic 0-3", "it"))
    assert squad.documents[asked.gold[0]].startswith("This is the paragraph of topic 0-3.")
    assert len(asked.near) == 29
    asked = hotpotqa.questions[4]
    assert [hotpotqa.documents[i][:9] for i in asked.gold] == ["Title 4-2", "Title 4-7"]
    assert [hotpotqa.documents[i][:9] for i in asked.needed] == [f"Title 4-{j}" for j in range(10)]
    assert hotpotqa.documents[asked.needed[0]].endswith(" More.")


def test_the_real_question_files(data: Path) -> None:
    sources = Sources(
        squad=data / "squad/xquad.en.json", hotpotqa=data / "hotpotqa/hotpot_dev_distractor_sample100.json"
    )
    assert [len(sources.questions(name).questions) for name in ("squad", "hotpotqa")] == [1190, 100]


@pytest.mark.parametrize("text", ["[1, 2]", "not JSON", '{"data": [{}]}'])
def test_a_file_in_another_layout_says_which_is_wanted(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    path = tmp_path / "x.json"
    with pytest.raises(UserError, match=r"x\.json must be JSON in SQuAD's layout"):
        Sources(squad=path).questions("squad")
    with pytest.raises(UserError, match=r"x\.json must be JSON in HotpotQA's distractor layout"):
        Sources(hotpotqa=path).questions("hotpotqa")
    with pytest.raises(UserError, match=r"x\.json must be JSON in an object with the key text"):
        Sources(essay=(path,)).prose()
    with pytest.raises(UserError, match="no source file"):
        Sources(essay=(tmp_path / "none.txt",)).prose()
