"""LongBench v2 (Bai et al. 2024, arXiv 2412.15204): 503 questions about long texts, each with four choices.

The authors' zero-shot protocol: the model writes up to 128 tokens at temperature 0.1 and is asked to say "The correct
answer is (X)". An answer in which that cannot be found is wrong; "compensated", it counts a quarter, as a guess would.
(lm-eval's longbench2 compares the likelihoods of four letters instead: other numbers.) Chain of thought is not here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from mixassay.errors import UserError
from mixassay.runners.longbench.prompts import fill, right
from mixassay.runners.longbench.rows import read

HUB = "THUDM/LongBench-v2"
ROWS = 503
MAX_NEW_TOKENS = 128
TEMPERATURE = 0.1

Letter = Literal["A", "B", "C", "D"]
LETTERS: tuple[Letter, ...] = get_args(Letter)

CORRECTION = ("Answer:", 'Format your response as follows: "The correct answer is (insert answer here)".')
"""The end of lm-eval's template, and the authors'. See prompts.py."""
HASH = "f413ded7249313de"


@dataclass(frozen=True)
class Question:
    """One row. Its groups: difficulty (easy, hard), length (short, medium, long), domain."""

    id: str
    question: str
    choices: tuple[str, str, str, str]
    answer: Letter
    context: str
    difficulty: str
    length: str
    domain: str


def load(source: str | Path = HUB) -> list[Question]:
    """The questions, from a file of JSON, a folder that holds longbench_v2.jsonl, or a hub. Raises `UserError`."""
    raws = read(source, "longbench_v2", split="train", configured=False)
    return [_question(raw, f"{source}, row {at}") for at, raw in enumerate(raws, start=1)]


def prompt(row: Question) -> str:
    """The zero-shot prompt, before any chat template and whole."""
    text = right("longbench2/_longbench_common_yaml", CORRECTION, HASH)
    choices = {f"choices[{i}]": choice.strip() for i, choice in enumerate(row.choices)}
    return fill(text, {"context": row.context.strip(), "question.strip()": row.question.strip(), **choices})


def chosen(response: str) -> Letter | None:
    """The letter that a response says is right, with or without parentheses; asterisks are passed over."""
    said = response.replace("*", "")
    for form in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        if found := re.search(form, said):
            return LETTERS["ABCD".index(found[1])]
    return None


@dataclass(frozen=True)
class Accuracy:
    """In points of 100, over n questions, of which `unread` had a response without a choice."""

    value: float
    compensated: float
    n: int
    unread: int


def score(rows: Iterable[Question], responses: Iterable[str]) -> dict[str, Accuracy]:
    """`overall`, and each group of questions: `difficulty=hard`, `length=long`, `domain=...`."""
    groups: dict[str, list[tuple[Letter, Letter | None]]] = {}
    for row, response in zip(rows, responses, strict=True):
        pair = row.answer, chosen(response)
        for group in ("overall", f"difficulty={row.difficulty}", f"length={row.length}", f"domain={row.domain}"):
            groups.setdefault(group, []).append(pair)
    return {group: _accuracy(pairs) for group, pairs in groups.items()}


def _accuracy(pairs: list[tuple[Letter, Letter | None]]) -> Accuracy:
    unread = sum(said is None for _, said in pairs)
    value = 100 * fmean(said == answer for answer, said in pairs)
    return Accuracy(value, value + 25 * unread / len(pairs), len(pairs), unread)


def _question(raw: Mapping[str, Any], where: str) -> Question:
    choices = [f"choice_{letter}" for letter in LETTERS]
    texts = ["question", "answer", "context", "difficulty", "length", "domain"]
    if missing := [name for name in (*texts, *choices) if name not in raw]:
        raise UserError(f"{where}: no field {', '.join(missing)}; found {', '.join(raw)}")
    if raw["answer"] not in LETTERS:
        raise UserError(f'{where}: field "answer" must be A, B, C or D, found {raw["answer"]!r}')
    a, b, c, d = (raw[name] for name in choices)
    return Question(id=str(raw.get("_id", "")), choices=(a, b, c, d), **{name: raw[name] for name in texts})
