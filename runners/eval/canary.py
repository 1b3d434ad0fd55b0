"""Canaries: two models that know all answers run before any other, and must score 1 and 0.

The copyist writes the right answer, token by token with the tokenizer of the model to come, goes on behind it where a
stop string must end it, and is held to the same budget. The other one writes signs that no answer has, to the end of
the budget. So before a number is printed, templates, truncation, budgets, stop strings and scores are known to hold:

    copyist   1, wherever the answer fits into the budget; where it does not, what the cut answer is worth
    other     0
    prompt    as many tokens as its set says, room for the answer, and, where a task asks to copy, the answer in it
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


Asking = Callable[[Callable[[Question], str], Set], list[Answer]]
"""How a set is put to a model that is a function of the question."""


def sing(asked: Set, tokenizer: Tokens, longest: int | None, asking: Asking) -> Sung:
    """Both canaries, on all questions of a set. Raises `Refused`, saying which part of the evaluation is wrong."""
    for number, question in enumerate(asked.questions):
        _check_prompt(asked, number, question, tokenizer, longest)
    copies = asking(lambda question: written(question, tokenizer, right(asked, question), tail(question)), asked)
    short = 0
    for number, (question, answer) in enumerate(zip(asked.questions, copies, strict=True)):
        whole = right(asked, question)
        fits = len(tokenizer.encode(whole)) <= question.new_tokens
        expected = asked.score(question, whole if fits else written(question, tokenizer, whole))
        short += not fits
        if (fits and answer.score < 1 - NEAR) or abs(answer.score - expected) > NEAR:
            raise Refused(
                f"canary: {asked.name}, question {number}: the right answer {whole[:80]!r} was read as "
                f"{answer.text[:80]!r} and scores {answer.score:.4g}, not {1 if fits else expected:.4g}: template, "
                "stop strings or score of this task are wrong"
            )
    noise = asking(lambda question: written(question, tokenizer, NOISE * question.new_tokens), asked)
    for number, answer in enumerate(noise):
        if answer.score > NEAR:
            raise Refused(
                f"canary: {asked.name}, question {number}: an answer of nothing but {NOISE} scores {answer.score:.4g}, "
                "not 0: the score of this task is wrong"
            )
    return Sung(fmean(answer.score for answer in copies), short)


def _check_prompt(asked: Set, number: int, question: Question, tokenizer: Tokens, longest: int | None) -> None:
    where = f"canary: {asked.name}, question {number}"
    tokens = len(tokenizer.encode(question.prompt)) + tokenizer.special
    if tokens != question.tokens:
        raise Refused(f"{where}: the prompt has {tokens} tokens with the model's tokenizer, not {question.tokens}")
    for limit, whose in ((asked.length, "the set's length"), (longest, "the model's length")):
        if limit is not None and tokens + question.new_tokens > limit:
            raise Refused(f"{where}: {tokens} tokens and {question.new_tokens} new ones are more than {whose} {limit}")
    if asked.copied:
        lost = [answer for answer in question.answers if answer.lower() not in question.prompt.lower()]
        if lost:
            raise Refused(f"{where}: its prompt does not hold the answer {lost[0]!r}")


def right(asked: Set, question: Question) -> str:
    """An answer that deserves full marks."""
    return " ".join(question.answers) if asked.wants == "all" else question.answers[0]


def tail(question: Question) -> str:
    """What a model may write behind the answer, and a stop string must cut off."""
    return question.stop[0] + NOISE if question.stop else ""


def written(question: Question, tokenizer: Tokens, *texts: str) -> str:
    """Texts as a model with this tokenizer, budget and stop strings would have written them, one after another."""
    from mixassay.runners.eval.language import cut

    ids = [id for text in texts for id in tokenizer.encode(text)]
    return cut(tokenizer.decode(ids[: question.new_tokens]), question.stop)


def scripted(script: Callable[[Question], str], asked: Set) -> Any:
    """A model of lm-eval that answers each prompt of a set as the script says."""
    from lm_eval.api.model import LM

    by_prompt = {question.prompt: question for question in asked.questions}

    class Scripted(LM):  # type: ignore[misc]  # lm-eval has no types
        def generate_until(self, requests: Iterable[Any]) -> list[str]:
            return [script(by_prompt[request.args[0]]) for request in requests]

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
