"""Canaries die of every fault that a published number has had: lost templates, cut prompts, stop strings, scorers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mixassay.runners.eval import canary, engine, ruler
from mixassay.runners.eval.language import Language
from mixassay.runners.eval.question import Answer, Question, Set
from mixassay.runners.eval.script import told
from mixassay.tasks.ruler.sources import SHIPPED
from mixassay.tokens import Bytes


def contains(question: Question, text: str) -> float:
    return float(question.answers[0] in text)


def question(prompt: str = "the key is 42, so the key is", answer: str = "42", **fields: Any) -> Question:
    n = len(prompt.encode())
    return Question(prompt, (answer,), **{"new_tokens": 8, "tokens": n, "whole": n, **fields})


def some(*questions: Question, **fields: Any) -> Set:
    return Set(**{"task": "t", "questions": questions, "score": contains, "version": "t/1", "recipe": {}, **fields})


def asking(script: Any, asked: Set) -> list[Answer]:
    texts = [canary.written(q, Bytes(), script(q)) for q in asked.questions]
    return [Answer(text, asked.score(q, text)) for q, text in zip(asked.questions, texts, strict=True)]


def sing(asked: Set, longest: int | None = None) -> canary.Sung:
    return canary.sing(asked, Bytes(), longest, asking)


def test_a_sound_set_passes() -> None:
    assert sing(some(question(), question(stop=("\n",)), copied=True, length=36), longest=36) == canary.Sung(1.0, 0)


def test_answers_beyond_the_budget_are_counted_and_are_no_fault() -> None:
    assert sing(some(question(), question("the other is 123456789: ", "123456789"))) == canary.Sung(0.5, 1)


FAULTS = {
    "its prompt does not hold the answer '42'": some(question("the template lost its context"), copied=True),
    "the prompt has 28 tokens with the model's tokenizer, not 27": some(question(tokens=27)),
    "28 tokens and 8 new ones are more than the set's length 35": some(question(), length=35),
    "scores 0, not 1: template, engine, stop strings or score": some(question(answer="4\n2", stop=("\n",))),
    "an answer of nothing but § scores 1, not 0": some(question(), score=lambda *_: 1.0),
    "scores 0.5, not 1": some(question(), score=lambda q, text: 0.5 * contains(q, text)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_set(fault: str) -> None:
    with pytest.raises(canary.Refused, match=fault):
        sing(FAULTS[fault])


def test_a_prompt_that_the_model_would_cut() -> None:
    with pytest.raises(canary.Refused, match="28 tokens and 8 new ones are more than the model's length 35"):
        sing(some(question()), longest=35)


def test_a_score_that_one_of_several_answers_fills() -> None:
    both = Question("42 and 7, so", ("42", "7"), new_tokens=8, tokens=12, whole=12)
    assert sing(some(both, score=share, wants="all", copied=True)) == canary.Sung(1.0, 0)
    with pytest.raises(canary.Refused, match="'7' scores 1 without '42'"):
        sing(some(both, score=lambda q, text: float("7" in text), wants="all"))


def share(question: Question, text: str) -> float:
    return sum(answer in text for answer in question.answers) / len(question.answers)


def test_two_questions_of_one_prompt() -> None:
    """No model can answer both: the copyist knows the answer to the first."""
    assert sing(some(question(), question(answer="7"))) == canary.Sung(0.5, 0)


PROMPTS = (
    "the key is 42, so the key is",
    "of all keys that there are 17 is the last, and so the key is",
    "7 is the key: ",
)
ANSWERS = ("42", "17", "7")


@pytest.fixture
def asked() -> Set:
    exact = some(*map(question, PROMPTS, ANSWERS), score=lambda q, text: float(text == q.answers[0]))
    stopped = tuple(replace(q, stop=("\n",), new_tokens=4) for q in exact.questions)
    return replace(exact, questions=exact.questions[:1] + stopped[1:])


@pytest.fixture(params=["linear_attention", "attention"])
def through_language(request: Any, tiny: Any) -> Any:
    language = Language(tiny(request.param), Bytes(), 2)

    def ask(script: Any, asked: Set) -> list[Answer]:
        return engine.ask_directly(told(language, {q.prompt: script(q) for q in asked.questions}), asked)

    return ask


def test_our_engine_passes(asked: Set, through_language: Any) -> None:
    assert canary.sing(asked, Bytes(), None, through_language) == canary.Sung(1.0, 0)


def only_the_end(self: Language, wanted: Any) -> list[str]:
    return ANSWER_ALL(self, [replace(one, prompt=one.prompt[-12:]) for one in wanted])


def shorter(self: Language, wanted: Any) -> list[str]:
    return ANSWER_ALL(self, [replace(one, new_tokens=3) for one in wanted])


def longer(self: Language, wanted: Any) -> list[str]:
    return ANSWER_ALL(self, [replace(one, new_tokens=9) for one in wanted])


def without_stop(self: Language, wanted: Any) -> list[str]:
    return ANSWER_ALL(self, [replace(one, stop=()) for one in wanted])


def in_another_order(self: Language, wanted: Any) -> list[str]:
    return ANSWER_ALL(self, wanted)[::-1]


ANSWER_ALL = Language.answers
ENGINES = {
    "the right answer '42' was read as ''": only_the_end,
    "2 signs of noise were read, and the budget of 8 tokens is 4": shorter,
    "5 signs of noise were read, and the budget of 8 tokens is 4": longer,
    r"the right answer '17' was read as '17\\n": without_stop,
    "the right answer '42' was read as '7'": in_another_order,
}


@pytest.mark.parametrize("fault", ENGINES)
def test_faults_of_our_engine(fault: str, asked: Set, through_language: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Language, "answers", ENGINES[fault])
    with pytest.raises(canary.Refused, match=fault):
        canary.sing(asked, Bytes(), None, through_language)


def test_a_stop_string_that_the_score_does_not_mind(asked: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_on(script: Any, asked: Set) -> list[Answer]:
        return [Answer(Bytes().decode(script(q)[: q.new_tokens]), contains(q, q.answers[0])) for q in asked.questions]

    with pytest.raises(canary.Refused, match=r"was read as '17\\n"):
        canary.sing(replace(asked, score=contains), Bytes(), None, runs_on)


def test_samples_of_lm_evals_generator_may_be_longer_than_their_length(tmp_path: Path) -> None:
    made = ruler.make("fwe", 1024, 0, 2, Bytes(), SHIPPED, tmp_path, "lm-eval")
    assert min(q.tokens + q.new_tokens for q in made.questions) > 1024
    assert sing(made).best == 1.0
    with pytest.raises(canary.Refused, match="more than the model's length 1024"):
        sing(made, longest=1024)
