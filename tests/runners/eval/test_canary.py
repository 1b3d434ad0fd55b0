"""Canaries die of every fault that a published number has had: lost templates, cut prompts, stop strings, scorers."""

from dataclasses import replace
from typing import Any

import pytest

from mixassay.runners.eval import canary
from mixassay.runners.eval.question import Answer, Question, Set
from mixassay.tokens import Bytes


def contains(question: Question, text: str) -> float:
    return float(question.answers[0] in text)


def question(prompt: str = "the key is 42, so the key is", answer: str = "42", **fields: Any) -> Question:
    n = len(prompt.encode())
    return Question(prompt, (answer,), **{"new_tokens": 8, "tokens": n, "whole": n, **fields})


def some(*questions: Question, **fields: Any) -> Set:
    return Set(**{"task": "t", "questions": questions, "score": contains, "version": "t/1", "recipe": {}, **fields})


def asking(script: Any, asked: Set) -> list[Answer]:
    texts = [script(q) for q in asked.questions]
    return [Answer(text, asked.score(q, text)) for q, text in zip(asked.questions, texts, strict=True)]


def sing(asked: Set, longest: int | None = None) -> canary.Sung:
    return canary.sing(asked, Bytes(), longest, asking)


def test_a_sound_set_passes() -> None:
    assert sing(some(question(), question(stop=("\n",)), copied=True, length=36), longest=36) == canary.Sung(1.0, 0)


def test_answers_beyond_the_budget_are_counted_and_are_no_fault() -> None:
    assert sing(some(question(), question(answer="123456789"))) == canary.Sung(0.5, 1)


FAULTS = {
    "its prompt does not hold the answer '42'": some(question("the template lost its context"), copied=True),
    "the prompt has 28 tokens with the model's tokenizer, not 27": some(question(tokens=27)),
    "28 tokens and 8 new ones are more than the set's length 35": some(question(), length=35),
    "scores 0, not 1: template, stop strings or score": some(question(answer="4\n2", stop=("\n",))),
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


def test_an_engine_that_does_not_stop_where_it_should() -> None:
    def runs_on(script: Any, asked: Set) -> list[Answer]:
        return asking(lambda q: script(replace(q, stop=())) + "\n§", asked)

    exact = some(question(stop=("\n",)), score=lambda q, text: float(text == q.answers[0]))
    assert sing(exact) == canary.Sung(1.0, 0)
    with pytest.raises(canary.Refused, match=r"was read as '42\\n§"):
        canary.sing(exact, Bytes(), None, runs_on)
