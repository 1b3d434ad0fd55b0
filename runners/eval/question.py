"""What is asked of a language model: prompts with their right answers, in sets of one task and length."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mixassay.spec import digest


@dataclass(frozen=True)
class Question:
    """A prompt as the model reads it.

    answers     right answers: all of them wanted, or spellings of one, as the task says
    new_tokens  that the model may write
    stop        texts before which an answer ends
    tokens      of the prompt, with the model's tokenizer; `whole`: before anything was cut
    depths      where in its haystack each answer stands, 0 to 1; empty where answers have no place
    groups      in which it is counted beside the whole set: kind of group -> its group
    """

    prompt: str
    answers: tuple[str, ...]
    new_tokens: int
    tokens: int
    whole: int
    stop: tuple[str, ...] = ()
    depths: tuple[float, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict, compare=False)
    about: dict[str, Any] = field(default_factory=dict, compare=False)  # what else its score needs

    @property
    def cut(self) -> bool:
        return self.tokens < self.whole


@dataclass(frozen=True)
class Set:
    """Questions of one kind; `score` of an answer as written is between 0 and 1.

    version   of the task and its score
    recipe    all that decides the questions and their score: for the record
    wants     "all" the answers, or "any" of them
    copied    whether the answers stand in the prompt, letter by letter
    within    whether prompt and answer keep to the length: not all samples of lm-eval's generator do
    measures  what else is told of questions and answers as written: name -> a function, whose mean is recorded
    """

    task: str
    questions: tuple[Question, ...]
    score: Callable[[Question, str], float]
    version: str
    recipe: dict[str, Any]
    wants: Literal["all", "any"] = "any"
    copied: bool = False
    within: bool = True
    length: int | None = None
    seed: int | None = None
    measures: Mapping[str, Callable[[Question, str], float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`niah_single_1@4096 (seed 42)`"""
        length = "" if self.length is None else f"@{self.length}"
        return self.task + length + ("" if self.seed is None else f" (seed {self.seed})")

    @property
    def data(self) -> str:
        """Equal for equal questions and scores, but for the seed: only then may numbers be compared."""
        made = {name: value for name, value in self.recipe.items() if name != "seed"}
        return f"{self.version}:{digest(made, length=16)}"


def hashed(texts: Iterable[str]) -> str:
    """sha256 of texts, each with its length: no two lists have one."""
    sha = hashlib.sha256()
    for text in texts:
        data = text.encode()
        sha.update(len(data).to_bytes(8) + data)
    return sha.hexdigest()


@dataclass(frozen=True)
class Answer:
    """What a model wrote, and its score."""

    text: str
    score: float
