"""Canaries: two models that know all answers run before any other, and must score 1 and 0.

The copyist writes the right answer, token by token with the tokenizer of the model to come, and goes on behind it where
a stop string must end it. The other one writes signs that no answer has, and more of them than the budget. One of our
models is asked through its own engine, with them in the place of its layers (`script.py`). So before a number is
printed, what is between the prompt and the score is known to hold: what is read, budgets, ends, stop strings, whose
answer is whose, and the scores themselves.

    copyist   the right answer and nothing else, for a score of 1, wherever it fits into the budget; where it does not,
              what the cut answer is worth
    other     its signs to the end of the budget, for 0
    prompt    as many tokens as its set says, room for the answer, and, where a task asks to copy, the answer in it
    score     where all of several answers are wanted, less than 1 without the first

Whether a template still asks what its authors ask they cannot know: its words are compared with theirs in tests.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from mixassay.errors import UserError
from mixassay.runners.eval.question import Answer, Question, Set

NOISE = "§"
NEAR = 1e-6
"""What the ROUGE library leaves out of a perfect score is less."""


class Refused(UserError):
    """A canary has died: what is wrong is the evaluation, not the model."""


class Tokens(Protocol):
    """What canaries ask of a tokenizer."""

    @property
    def special(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True)
class Sung:
    """best: what the copyist scores, the most that any model can. short: questions whose answer the budget cuts."""

    best: float
    short: int


Script = Callable[[Question], list[int]]
"""What a canary writes, in tokens, if nothing ends it."""

Asking = Callable[[Script, Set], list[Answer]]
"""How a set is put to a canary."""


def sing(asked: Set, tokenizer: Tokens, longest: int | None, asking: Asking) -> Sung:
    """Both canaries, on all questions of a set. Raises `Refused`, saying which part of the evaluation is wrong."""
    for number, question in enumerate(asked.questions):
        _check_prompt(asked, number, question, tokenizer, longest)
        _check_score(asked, number, question)
    first = {question.prompt: question for question in reversed(asked.questions)}  # who asks the same is told the same
    whole = {prompt: tokenizer.encode(right(asked, question)) for prompt, question in first.items()}
    copies = asking(lambda q: whole[q.prompt] + tail(q, tokenizer, whole[q.prompt]), asked)
    short = 0
    for number, (question, answer) in enumerate(zip(asked.questions, copies, strict=True)):
        ids = whole[question.prompt]
        fits = len(ids) <= question.new_tokens
        text = tokenizer.decode(ids) if fits else written(question, tokenizer, ids)
        expected = 1.0 if fits and first[question.prompt] is question else asked.score(question, text)
        short += not fits
        if answer.text != text or abs(answer.score - expected) > NEAR:
            raise Refused(
                f"canary: {asked.name}, question {number}: the right answer {text[:80]!r} was read as "
                f"{answer.text[:80]!r} and scores {answer.score:.4g}, not {expected:.4g}: template, engine, stop "
                "strings or score of this task are wrong"
            )
    noise = asking(lambda question: noise_of(question, tokenizer), asked)
    for number, (question, answer) in enumerate(zip(asked.questions, noise, strict=True)):
        if answer.score > NEAR:
            raise Refused(
                f"canary: {asked.name}, question {number}: an answer of nothing but {NOISE} scores {answer.score:.4g}, "
                "not 0: the score of this task is wrong"
            )
        text = written(question, tokenizer, noise_of(question, tokenizer))
        if answer.text != text:
            raise Refused(
                f"canary: {asked.name}, question {number}: {len(answer.text)} signs of noise were read, and the budget "
                f"of {question.new_tokens} tokens is {len(text)}: the engine does not keep to it"
            )
    return Sung(fmean(answer.score for answer in copies), short)


def _check_prompt(asked: Set, number: int, question: Question, tokenizer: Tokens, longest: int | None) -> None:
    where = f"canary: {asked.name}, question {number}"
    tokens = len(tokenizer.encode(question.prompt)) + tokenizer.special
    if tokens != question.tokens:
        raise Refused(f"{where}: the prompt has {tokens} tokens with the model's tokenizer, not {question.tokens}")
    for limit, whose in ((asked.length if asked.within else None, "the set's length"), (longest, "the model's length")):
        if limit is not None and tokens + question.new_tokens > limit:
            raise Refused(f"{where}: {tokens} tokens and {question.new_tokens} new ones are more than {whose} {limit}")
    if asked.copied:
        lost = [answer for answer in question.answers if answer.lower() not in question.prompt.lower()]
        if lost:
            raise Refused(f"{where}: its prompt does not hold the answer {lost[0]!r}")


def _check_score(asked: Set, number: int, question: Question) -> None:
    """Where all of several answers are wanted, those without the first deserve less than full marks."""
    first, rest = question.answers[0], " ".join(question.answers[1:])
    if asked.wants == "all" and rest and first.lower() not in rest.lower() and asked.score(question, rest) > 1 - NEAR:
        raise Refused(
            f"canary: {asked.name}, question {number}: {rest[:80]!r} scores 1 without {first!r}: the score of this "
            "task is wrong"
        )


def right(asked: Set, question: Question) -> str:
    """An answer that deserves full marks."""
    return " ".join(question.answers) if asked.wants == "all" else question.answers[0]


def tail(question: Question, tokenizer: Tokens, answer: list[int]) -> list[int]:
    """What a model may write behind the answer, and a stop string must cut off where there is room for one."""
    stop = tokenizer.encode(question.stop[0]) if question.stop else []
    return stop + tokenizer.encode(NOISE) if stop and len(answer) + len(stop) <= question.new_tokens else []


def noise_of(question: Question, tokenizer: Tokens) -> list[int]:
    """More tokens than the budget has."""
    return tokenizer.encode(NOISE) * (question.new_tokens + 1)


def written(question: Question, tokenizer: Tokens, ids: Sequence[int]) -> str:
    """The text of these tokens within the budget and before a stop string."""
    from mixassay.runners.eval.language import cut

    return cut(tokenizer.decode(ids[: question.new_tokens]), question.stop)


def scripted(script: Script, asked: Set, tokenizer: Tokens) -> Any:
    """A model of lm-eval that answers each prompt of a set as the script says."""
    from lm_eval.api.model import LM

    by_prompt = {question.prompt: question for question in asked.questions}

    class Scripted(LM):  # type: ignore[misc]  # lm-eval has no types
        def generate_until(self, requests: Iterable[Any]) -> list[str]:
            questions = [by_prompt[request.args[0]] for request in requests]
            return [written(question, tokenizer, script(question)) for question in questions]

        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: Any) -> Any:
            raise NotImplementedError

    return Scripted()


def judge(tasks: dict[str, Any], *, honest: bool) -> Any:
    """A model of lm-eval for tasks of likelihoods: it finds the right continuation likeliest, or (not honest) every
    other one."""
    from lm_eval.api.model import LM

    def favours(request: Any) -> bool:
        task = tasks[request.task_name]
        if task.OUTPUT_TYPE != "multiple_choice":
            return honest
        gold = task.doc_to_text(request.doc) if task.multiple_input else task.doc_to_target(request.doc)
        choices = task.doc_to_choice(request.doc)
        golds = [choices.index(g) if isinstance(g, str) else g for g in (gold if isinstance(gold, list) else [gold])]
        return (request.idx in golds) == honest

    class Judge(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Iterable[Any]) -> list[tuple[float, bool]]:
            return [(0.0, True) if favours(request) else (-100.0, False) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [0.0] * len(requests)

        def generate_until(self, requests: Any) -> Any:
            raise NotImplementedError

    return Judge()
