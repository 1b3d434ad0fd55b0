"""What holds for every task's samples: they fit, they are as long as they can be, and they are what they were."""

import doctest
import hashlib
import re
from contextlib import suppress
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.tasks.ruler import generate, niah
from mixassay.tasks.ruler.generate import Ruler
from mixassay.tasks.ruler.sample import Sample
from mixassay.tasks.ruler.sources import Sources
from mixassay.tasks.ruler.table import TASKS
from mixassay.tokens import Bytes

Words = Any  # the fixture's tokenizer
LENGTHS = (1024, 2000, 8192)


@pytest.fixture
def sources(small: Sources) -> Sources:
    return small


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_a_sample_fits_and_one_more_unit_does_not(task: str, length: int, words: Words, sources: Sources) -> None:
    """Also the share of the length that is used, wherever a unit is small beside it."""
    ruler = Ruler(task, length, words, sources)
    for index in (0, 3):
        sample = ruler.sample(index)
        used = words.count(sample.prompt) + words.special
        assert used == sample.prompt_tokens
        assert used + TASKS[task].new_tokens <= length
        assert sample.fill == (used + TASKS[task].new_tokens) / length
        draft = ruler._draft(index)
        assert draft.build(sample.size).input == sample.input
        more = draft.build(sample.size + 1)
        cost = words.count(more.input + more.prefix) + words.special + TASKS[task].new_tokens
        assert cost > length
        grain = cost - used - TASKS[task].new_tokens
        assert sample.fill > 1 - grain / length


@pytest.mark.parametrize("task", TASKS)
def test_fill_at_long_lengths(task: str, words: Words, sources: Sources) -> None:
    for length in (4096, 8192):
        assert Ruler(task, length, words, sources).sample(1).fill >= 0.97


@pytest.mark.parametrize("task", TASKS)
def test_needles_are_where_the_numbers_say(task: str, words: Words, sources: Sources) -> None:
    for index in range(4):
        sample = Ruler(task, 2048, words, sources).sample(index)
        assert all(answer.lower() in sample.input.lower() for answer in sample.answers)
        assert len(sample.positions) == len(sample.depths)
        assert all(0 <= depth < 1 for depth in sample.depths)
        if task in ("cwe", "fwe"):
            assert not sample.positions
        tokens = re.findall(r"\w+|[^\w\s]", sample.input)
        for i, position in enumerate(sample.positions):
            if task == "qa_2":
                assert re.fullmatch("Document[0-9]+:Title[0-9]+-[27]This.*", "".join(tokens[position : position + 8]))
            else:
                answer = "".join(re.findall(r"\w+|[^\w\s]", sample.answers[0 if task == "qa_1" else i]))
                assert answer in "".join(tokens[position : position + 28])


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_task_length_seed_and_index_alone(task: str, words: Words, sources: Sources) -> None:
    first = list(Ruler(task, 1500, words, sources).samples(3))
    backwards = [Ruler(task, 1500, words, sources).sample(index) for index in (2, 1, 0)]
    assert first == backwards[::-1]
    assert len({sample.prompt for sample in first}) == 3
    assert Ruler(task, 1500, words, sources, seed=43).sample(0).prompt != first[0].prompt
    if not task.startswith("qa"):
        assert Ruler(task, 1600, words, sources).sample(0).answers != first[0].answers


def test_another_tokenizer_fits_another_size_and_keeps_the_needles(words: Words) -> None:
    ours = [Ruler("niah_multiquery", 2048, tokenizer).sample(5) for tokenizer in (words, Bytes())]
    assert ours[0].answers == ours[1].answers
    assert ours[0].size > 3 * ours[1].size


HASHES = {
    ("niah_single_1", 2048): "1025e5efff073f2f",
    ("niah_single_2", 2048): "8bd02d3fb1498f31",
    ("niah_single_3", 2048): "af158a82440dc1ce",
    ("niah_multikey_1", 2048): "68d9918c019c85ac",
    ("niah_multikey_2", 2048): "f43b875d197693e9",
    ("niah_multikey_3", 2048): "9c173e8d5888ca18",
    ("niah_multivalue", 2048): "e79af674de7e17c3",
    ("niah_multiquery", 2048): "f7eb037cfe3f39ef",
    ("vt", 2048): "a9845eec79df3eb0",
    ("cwe", 2048): "97c348eaade282dc",
    ("fwe", 2048): "a6ed86604d548c5c",
    ("qa_1", 2048): "c59d0e89f4862242",
    ("qa_2", 8192): "5094917f2c2b8531",
    ("cwe", 8192): "2306ad271190cf1c",
}
"""sha256 of three samples of version 1, byte tokenizer. A change here is a new version."""


@pytest.mark.parametrize(("task", "length"), HASHES, ids=str)
def test_samples_are_those_of_the_version(task: str, length: int, sources: Sources) -> None:
    samples = Ruler(task, length, Bytes(), sources).samples(3)
    assert digest(samples) == HASHES[task, length]


def digest(samples: Any) -> str:
    whole = hashlib.sha256()
    for sample in samples:
        assert isinstance(sample, Sample)
        whole.update(repr((sample.input, sample.prefix, sample.answers, sample.positions)).encode())
    return whole.hexdigest()[:16]


# --- what cannot be


def test_nothing_hangs(sources: Sources) -> None:
    """Every task at lengths too short for most, with the tokenizer that needs most tokens: a sample or an error."""
    for task in TASKS:
        for length in (256, 300, 512):
            with suppress(UserError):
                assert Ruler(task, length, Bytes(), sources).sample(0).fill <= 1


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [
        ("niah_multikey_3", 512, "the smallest prompt and 128 tokens for the answer take 684 with this tokenizer"),
        ("vt", 512, "its example takes 409 tokens with this tokenizer, and only 256 are for it"),
        ("cwe", 1024, "the smallest prompt and 120 tokens for the answer take 1939 with this tokenizer"),
        ("qa_2", 1024, "only 0 of the 60 questions of hotpotqa.json fit, not 1"),
    ],
)
def test_the_error_has_the_numbers(task: str, length: int, message: str, sources: Sources) -> None:
    with pytest.raises(UserError) as error:
        Ruler(task, length, Bytes(), sources).sample(0)
    assert str(error.value) == f"ruler: {task} at length {length}: {message}"


def test_a_source_that_runs_out_is_an_error(words: Words, sources: Sources) -> None:
    with pytest.raises(UserError, match=r"all 360 documents of squad.json fill only \d+ tokens; give a larger source"):
        Ruler("qa_1", 32768, words, sources).sample(0)
    with pytest.raises(UserError, match="give its path as squad"):
        Ruler("qa_1", 1024, words).sample(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("niah_single_4", 4096), 'unknown RULER task "niah_single_4". Did you mean "niah_single_3"?'),
        (("vt", 255), "ruler: length must be at least 256, got 255"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, int], message: str) -> None:
    with pytest.raises(UserError) as error:
        Ruler(*arguments, Bytes())
    assert str(error.value) == message


def test_the_example_in_the_docstring() -> None:
    result = doctest.testmod(generate)
    assert (result.attempted, result.failed) == (3, 0)


@pytest.mark.parametrize("task", ["niah_multikey_1", "niah_multikey_2", "niah_multikey_3"])
def test_the_value_of_another_key_is_told_from_the_right_and_from_none(
    task: str, words: Words, sources: Sources
) -> None:
    sample = Ruler(task, 1024, words, sources).sample(1)
    told = niah.NEEDLE.findall(sample.prompt)
    assert len(told) == (4 if task == "niah_multikey_1" else sample.size + 1)  # lines of needles, and the one asked for
    (right,) = sample.answers
    others = [value for value in told if value != right]
    assert len(others) == len(told) - 1
    for text, another in (
        (others[0], True),
        (others[-1].upper(), True),
        (right, False),
        (f"{others[0]} {right}", False),
    ):
        assert niah.is_of_another_key(sample.prompt, sample.answers, f" {text}.") is another
    assert not niah.is_of_another_key(sample.prompt, sample.answers, "1234567, I think")


def test_a_key_of_several_words_is_a_key() -> None:
    """Some of RULER's nouns are two words, and one of its adjectives."""
    prompt = " ".join(
        niah.needle("numbers", key, value) for key, value in (("red-dog", "1"), ("ad hoc-dune buggy", "2"))
    )
    assert niah.is_of_another_key(prompt, ("1",), "2")
    assert not niah.is_of_another_key(prompt, ("2",), "2")
