"""Every prompt answers its own question: a reader that knows only the wording finds the answers and no others."""

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from mixassay.tasks.ruler.generate import Ruler
from mixassay.tasks.ruler.niah import DEPTHS, NIAH, NOISE
from mixassay.tasks.ruler.sample import Sample
from mixassay.tasks.ruler.scores import score
from mixassay.tasks.ruler.table import TASKS
from mixassay.tokens import Bytes

NEEDLES = [name for name, task in TASKS.items() if isinstance(task, NIAH)]
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+(?: \S+){0,3}?) is: ([\w-]+)\.")


def some(task: str, length: int = 8192) -> list[Sample]:
    return list(Ruler(task, length, Bytes()).samples(6))


def needles(sample: Sample) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for _, key, value in NEEDLE.findall(sample.input):
        told.setdefault(key, []).append(value)
    return told


@pytest.mark.parametrize("task", NEEDLES)
def test_needles(task: str) -> None:
    """As many as the table says, keys and values without repeats, and the question names the right ones."""
    what: Any = TASKS[task]
    for sample in some(task):
        told = needles(sample)
        hay = sample.size if what.haystack == "needles" else 0
        assert sum(map(len, told.values())) == what.keys * what.values + hay
        assert len(told) == what.keys + hay
        values = [value for own in told.values() for value in own]
        assert len(set(values)) == len(values)
        form = (
            r"[1-9][0-9]{6}"
            if what.value == "numbers"
            else r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-.{12}"
        )
        assert all(re.fullmatch(form, value) for value in values)
        (whom,) = re.findall(r" for (.*) mentioned in the provided text\?$", sample.input)
        asked = re.split(r", and |, ", whom)
        assert len(asked) == what.queries
        assert sorted(v for key in asked for v in told[key]) == sorted(sample.answers)
        assert sample.prefix.count(whom) == 1
        many = what.queries * what.values > 1
        assert sample.input.startswith("Some special magic " if many else "A special magic ")
        assert sample.prefix.endswith(" are" if many else " is")


@pytest.mark.parametrize("task", NEEDLES)
def test_the_haystack_is_whole_but_for_the_needles(task: str) -> None:
    what: Any = TASKS[task]
    for sample in some(task, 4096):
        hay = NEEDLE.sub("", sample.input.split("\n", 1)[1].rsplit("\n", 1)[0])
        if what.haystack == "noise":
            assert [line for line in hay.split("\n") if line] == [NOISE] * sample.size
        elif what.haystack == "essay":
            words = Ruler(task, 4096, Bytes()).sources.prose().words[: sample.size]
            assert hay.split() == words
        else:
            assert not hay.strip()


def test_needles_in_prose_stand_between_sentences_at_the_depths_of_the_table() -> None:
    for sample in some("niah_multikey_1"):
        before = [sample.input[: match.start()] for match in NEEDLE.finditer(sample.input)]
        assert all(re.search(r"""([.!?]["'”’)\]_]*|afterwards\.\n) ?$""", text) for text in before)
    ends = Ruler("niah_multikey_1", 8192, Bytes()).sources.prose().ends
    for sample in some("niah_single_2", 32768):
        sentences = sum(end < sample.size for end in ends) + 1
        before = sample.input[: NEEDLE.search(sample.input).start()].split("\n", 1)[1]  # type: ignore[union-attr]
        words = len(before.split())
        at = sum(end <= words for end in ends)
        assert at in {sentences * depth // 100 for depth in DEPTHS}


def test_depths_are_spread_evenly() -> None:
    """Mean of 100 depths: 1/2 within 4.5 standard errors, also for lines."""
    for task in ("niah_single_2", "niah_multikey_2"):
        depths = [sample.depths[0] for sample in Ruler(task, 2048, Bytes()).samples(100)]
        assert abs(sum(depths) / 100 - 0.5) < 4.5 * (1 / 12 / 100) ** 0.5 + 0.02  # a line's own length is not a depth


@pytest.mark.parametrize("length", [1024, 8192])
def test_variables(length: int) -> None:
    for sample in some("vt", length):
        example, ours = sample.input.split("\n\nMemorize", 1)
        assert Bytes().count(f"{example}\n\n") <= 500
        for text, names, answer in ((example, 3, example.rsplit("they are:")[-1].split()), (ours, 5, sample.answers)):
            told = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", text, re.M)
            (value,) = set(re.findall(r"the value (\d{5}) in the text above\.", text))
            assert [a for a, _ in told] == list(answer)
            assert [b for _, b in told] == [value, *answer[:-1]]
            assert all(len(name) == names for name in answer)
            assert len(set(answer)) == 5
        assert ours.count(NOISE) == sample.size
        assert sample.prefix.endswith(f"5 variables are assigned the value {value}, they are:")


@pytest.mark.parametrize(
    ("length", "common", "other", "shown", "shown_common", "shown_other"),
    [(4095, 6, 1, 20, 3, 1), (8192, 30, 3, 40, 10, 3)],
)
def test_common_words(length: int, common: int, other: int, shown: int, shown_common: int, shown_other: int) -> None:
    for sample in some("cwe", length):
        example, ours = (read_list(text) for text in re.findall(r"often\.\n(.*)\nQuestion", sample.input))
        assert sorted(example.values(), reverse=True) == [shown_common] * 10 + [shown_other] * (shown - 10)
        assert sorted(ours.values(), reverse=True) == [common] * 10 + [other] * (sample.size - 10)
        assert {word for word, _ in ours.most_common(10)} == set(sample.answers)
        (answered,) = re.findall(r"are: (1\. .* 10\. .*)\n", sample.input)
        assert set(read_list(answered)) == {word for word, _ in example.most_common(10)}


def read_list(text: str) -> Counter[str]:
    """The words of "1. word 2. word ...", whose numbers must be right."""
    words = re.split(r" ?\d+\. ", text)[1:]
    assert text == " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))
    return Counter(words)


@pytest.mark.parametrize("length", [600, 700, 1024, 8192])
def test_frequent_words(length: int) -> None:
    """The three are more frequent than all others, at short lengths too, where rounding makes ties."""
    for sample in some("fwe", length):
        counts = Counter(sample.input.split("coded words. ")[1].split("\n")[0].split(" "))
        ranked = counts.most_common()
        assert ranked[0][0] == "..."
        assert {word for word, _ in ranked[1:4]} == set(sample.answers)
        assert len(ranked) == 4 or ranked[3][1] > ranked[4][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
        assert len(ranked) <= length // 50
        assert all(a >= b for (_, a), (_, b) in pairwise(ranked))


def test_an_oracle_scores_one_and_silence_nothing() -> None:
    for task in TASKS:
        if not task.startswith("qa"):
            sample = some(task)[0]
            assert score(task, ", ".join(sample.answers).upper(), sample.answers) == 1
            assert score(task, "I do not know", sample.answers) == 0
