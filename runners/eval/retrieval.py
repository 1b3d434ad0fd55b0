"""In-context retrieval (Arora et al. 2024, "Just read twice"): a document, then a question, or the beginning of a
sentence that the answer ends. Six sets, each a file of JSON lines in one of the two layouts that the authors' sets have
on the hub:

    text, value                  all that the model reads, and its answer (based-swde, based-fda, based-squad)
    context, question, answers   the document, what is asked, and spellings of the answer (based_triviaqa, _drop, _nq)

An answer of at most 48 tokens, up to its first newline, is right if it holds an answer of the row, letter case ignored:
the protocol of lm-eval's tasks swde, fda and squad_completion.

At a length, prompt and answer together take at most so many of the model's tokens. The ending stays (of a text its last
sentence, as far as it goes), and of a longer document a window is read, as the authors cut them: the tokens around the
first place of an answer, and of triviaqa and drop, whose answers need not stand in the text, the beginning. A window
at an end of the document is moved inwards, so that every prompt that was cut has the length. (The authors' windows
for swde and fda are around the first place of the answer or of its key, and their question is not counted.)
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.runners.eval.question import Question, Set, hashed
from mixassay.tokens import Tokenizer

SETS = ("swde", "fda", "squad", "triviaqa", "drop", "nq")
FROM_THE_BEGINNING = ("triviaqa", "drop")
NEW_TOKENS = 48
LONGEST_ENDING = 48
"""In words, of a text whose last sentence has no visible beginning."""
VERSION = 1
FIELDS = (
    "text and value, as those of hazyresearch/based-swde on the hub, or context, question and answers, as those of "
    "hazyresearch/based_drop"
)


@dataclass(frozen=True)
class Row:
    """A prompt is document + ending. `answers`: at least one, spellings of one answer."""

    document: str
    ending: str
    answers: tuple[str, ...]


def load(name: str, folder: Path, n: int | None) -> list[Row]:
    """The first n rows. Raises `UserError` where there is no file, or a line has neither layout."""
    file = folder / f"{name}.jsonl"
    if not file.is_file():
        raise UserError(f"retrieval: no {file}: put the set there as JSON lines with the fields {FIELDS}")
    rows = []
    for at, line in enumerate(file.read_text(encoding="utf-8").rstrip().split("\n")[:n], start=1):
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, KeyError, TypeError, IndexError) as problem:
            raise UserError(
                f'{file}:{at}: expected {{"text": ..., "value": ...}} or {{"context": ..., "question": ..., '
                f'"answers": [...]}}, found {line[:60]}'
            ) from problem
    return rows


def _row(raw: Any) -> Row:
    if "text" in raw:
        text = str(raw["text"]).strip()
        words = [word.start() for word in re.finditer(r"\S+", text)][-LONGEST_ENDING:]
        at = max([*words[:1], *(end.end() for end in re.finditer(r"[.!?]\s+|\n", text))], default=0)
        return Row(text[:at], text[at:], (str(raw["value"]).strip(),))
    context, question = re.sub(r"\[(PAR|DOC|TLE)\]", "", str(raw["context"])).strip(), str(raw["question"]).strip()
    if question and context.endswith(question):  # in some of the authors' rows it stands there, too
        context = context[: -len(question)]
    answers = tuple(str(answer).strip() for answer in raw["answers"])
    return Row(f"{context.strip().strip('.')}. ", question, (answers[0], *answers[1:]))


def make(name: str, rows: list[Row], tokenizer: Tokenizer, length: int | None = None) -> Set:
    """The rows of a set, read whole or, at a length, cut to it. Raises `UserError` where an ending does not fit."""

    def asked(row: Row) -> Question:
        text = row.document + row.ending
        whole = tokens(text)
        if length is not None and whole > length - NEW_TOKENS:
            text = cut(row, length - NEW_TOKENS)
        return Question(text, row.answers, NEW_TOKENS, tokens(text), whole, stop=("\n",))

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text)) + tokenizer.special

    def cut(row: Row, limit: int) -> str:
        """A window of the document and the ending in at most `limit` tokens, the seam's included."""
        ids = tokenizer.encode(row.document)
        place = -1 if name in FROM_THE_BEGINNING else first(row.document, row.answers)
        before = len(tokenizer.encode(row.document[:place])) if place > 0 else 0
        room = limit - tokens(row.ending)
        while room > 0:
            start = max(0, min(before - room // 2, len(ids) - room))
            seam = " " if start + room < len(ids) else ""
            text = tokenizer.decode(ids[start : start + room]) + seam + row.ending
            if (over := tokens(text) - limit) <= 0:
                return text
            room -= over
        raise UserError(
            f"retrieval: {name} at length {length}: {row.ending[-60:]!r} and {NEW_TOKENS} tokens for the answer leave "
            "no room for the document"
        )

    window = "start" if name in FROM_THE_BEGINNING else "answer"
    return Set(
        task=name,
        questions=tuple(map(asked, rows)),
        score=lambda question, text: float(first(text, question.answers) >= 0),
        version=f"retrieval-{name}/{VERSION}",
        recipe={
            "generator": "retrieval",
            "version": VERSION,
            "rows": hashed(row.document + row.ending + "\n".join(row.answers) for row in rows)[:16],
            "tokenizer": tokenizer.identity,
            **({} if length is None else {"length": length, "window": window}),
        },
        length=length,
        measures={"answer_in_prompt": lambda question, _: float(first(question.prompt, question.answers) >= 0)},
    )


def first(text: str, answers: tuple[str, ...]) -> int:
    """Where the earliest of the answers begins in a text, letter case ignored; -1 where none does."""
    lower = text.lower()
    return min((at for answer in answers if (at := lower.find(answer.lower())) >= 0), default=-1)
