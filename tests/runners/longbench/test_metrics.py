"""The metrics against values worked out by hand, and against slow definitions."""

import random
import sys
from difflib import SequenceMatcher
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from mixassay.runners.longbench.metrics import chinese
from mixassay.runners.longbench.metrics.classification import classification
from mixassay.runners.longbench.metrics.code import code
from mixassay.runners.longbench.metrics.numbers import count, retrieval
from mixassay.runners.longbench.metrics.qa import qa_f1, qa_f1_zh
from mixassay.runners.longbench.metrics.summary import rouge, rouge_zh
from mixassay.runners.longbench.rescore import predictions


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1),
        ("It is in Paris, France", "Paris", 2 / 6),  # precision 1/5, recall 1
        ("Paris Paris London", "Paris Paris", 4 / 5),  # repeats count: precision 2/3, recall 1
        ("London", "Paris", 0),
        ("", "Paris", 0),
        ("the", "a", 0),  # nothing is left of either
        ("mother-in-law's", "motherinlaws", 1),
        ("law’s", "laws", 0),  # a typographic apostrophe is no ASCII punctuation
        ("theatre an", "theatre", 1),  # whole words only
    ],
)
def test_qa_f1(prediction: str, answer: str, f1: float) -> None:
    assert qa_f1(prediction, answer) == pytest.approx(f1)


def test_qa_f1_of_chinese_counts_words_without_punctuation() -> None:
    pytest.importorskip("jieba")
    assert chinese.words("我来到北京") == ["我", "来到", "北京"]
    assert qa_f1_zh("我来到，北京。", "北京") == pytest.approx(2 * (1 / 3) / (1 / 3 + 1))
    assert qa_f1_zh("「北京」 。", "北京") == 1
    assert qa_f1_zh("《北京", "北京") == pytest.approx(2 / 3)  # U+300A is not on the authors' list


def test_rouge() -> None:
    assert rouge("a cat sat", "a cat ran") == pytest.approx(2 / 3)  # longest common subsequence 2, of 3 and 3
    assert rouge("sat a cat. a dog", "a cat") == pytest.approx(2 * 2 / (4 + 2))  # distinct words: 4 and 2
    for empty in ("", "...", "."):
        assert rouge(empty, "a cat") == 0


def test_rouge_of_chinese_is_of_words() -> None:
    pytest.importorskip("jieba")
    assert rouge_zh("我来到北京", "北京") == pytest.approx(2 / 4)
    assert rouge_zh("", "北京") == 0


def test_rouge_is_that_of_the_package(data: Path) -> None:
    """To the last bit: of random texts, odd stops and spaces among them, and of published predictions."""
    package = pytest.importorskip("rouge").Rouge(metrics=["rouge-l"], stats=["f"])

    def slow(prediction: str, answer: str) -> float:
        try:
            return float(package.get_scores(prediction, answer)[0]["rouge-l"]["f"])
        except ValueError:  # its word for a text without sentences
            return 0.0

    draw = random.Random(0)
    texts = ["".join(draw.choices("abc  ..\n", k=draw.randint(0, 60))) for _ in range(1000)]
    rows = predictions(data / "predictions/rwkv6-7b/qmsum.jsonl")[:40]
    for prediction, answer in [*pairwise(texts), *((row.prediction, row.answers[0]) for row in rows)]:
        assert rouge(prediction, answer) == slow(prediction, answer), (prediction, answer)


def test_rouge_has_no_limit_of_length() -> None:
    """The package recurses once a word."""
    words = [f"w{i}" for i in range(2 * sys.getrecursionlimit())]
    assert rouge(" ".join(words), " ".join(reversed(words))) == pytest.approx(1 / len(words), abs=1e-8)  # any one word


CLASSES = ["Other location", "Other", "location", "City", "Individual"]


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("City", "City", 1),
        ("City or Individual", "City", 1 / 2),
        ("Individual", "City", 0),
        ("nothing", "City", 0),
        # Found: all of "Other location", "Other" and "location". "Other" goes, and "location" is passed over.
        ("Other location", "Other location", 1 / 2),
        # "Other" is right here; "Other location" is no part of it and counts.
        ("Other location", "Other", 1 / 3),
    ],
)
def test_classification(prediction: str, answer: str, score: float) -> None:
    assert classification(prediction, answer, CLASSES) == pytest.approx(score)


def test_numbers() -> None:
    assert count("There are 4 of 12, so 4", "4") == pytest.approx(2 / 3)
    assert count("14", "4") == 0
    assert count("four", "4") == 0
    assert retrieval("Paragraph 7, or 8", "Paragraph 7") == 1 / 2
    assert retrieval("段落27", "段落27") == 1


@pytest.mark.parametrize(
    ("prediction", "line"),
    [
        ("x = 1\ny = 2", "x = 1"),
        ("\n\n# add\nx = 1", "x = 1"),
        ("```python\nx = 1  // no\nx = 2", "x = 2"),
        ("x = 1\n", "x = 1"),
        ("# only", ""),
        ("\n \nx", " "),  # a line of white space is a line
    ],
)
def test_code_scores_the_first_line_that_is_code(prediction: str, line: str) -> None:
    assert code(prediction, line, "difflib") == 1


def test_code_by_both_edit_distances() -> None:
    """Levenshtein is held to its definition: 2 (longest common subsequence) / (both lengths), rounded to 0.01."""
    pytest.importorskip("rapidfuzz")
    draw = random.Random(0)
    differ = 0
    for _ in range(50):
        a, b = ("".join(draw.choices("abc (", k=draw.randint(1, 12))) for _ in range(2))
        exact = Fraction(200 * common(a, b), len(a) + len(b))
        assert code(a, b, "levenshtein") == round(exact) / 100
        difflib = SequenceMatcher(None, a, b).get_matching_blocks()
        assert code(a, b, "difflib") == round(Fraction(200 * sum(m.size for m in difflib), len(a) + len(b))) / 100
        differ += code(a, b, "difflib") != code(a, b, "levenshtein")
    assert differ > 5


def common(a: str, b: str) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        above = row
        row = [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(row[j], above[j + 1]))
    return row[-1]
