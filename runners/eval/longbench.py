"""LongBench's sets as sets of questions, cut for the model where it does not read such long prompts."""

from pathlib import Path

from mixassay.errors import UserError
from mixassay.runners.eval.question import Question, Set, hashed
from mixassay.runners.longbench import prompts, rows
from mixassay.runners.longbench.metrics.code import EditDistance
from mixassay.runners.longbench.rows import Row
from mixassay.runners.longbench.score import Answered, row_score, tools
from mixassay.runners.longbench.sets import find
from mixassay.runners.longbench.truncation import Fitted, fit
from mixassay.tokens import Tokenizer

VERSION = 1
"""Raised whenever the same rows give other prompts, or the same answer another score."""


def make(
    name: str,
    source: str | Path,
    n: int | None,
    tokenizer: Tokenizer,
    longest: int | None,
    edit_distance: EditDistance = "difflib",
) -> Set:
    """The first n rows of a set (None: all), prompts cut in their middle to what a model of `longest` tokens reads.

    A recurrent model's `longest` is None: nothing is cut. Answers are generated to the set's number of tokens; where
    only the first line counts, it is taken from the whole answer.
    """
    one = find(name)
    taken = rows.load(name, source)[:n]

    def asked(row: Row) -> Question:
        whole = prompts.prompt(row)
        limit = None if longest is None else longest - one.max_new_tokens
        read = fitted(whole, tokenizer, limit, name)
        return Question(
            read.text,
            row.answers,
            one.max_new_tokens,
            len(read.tokens),
            read.whole,
            about={"all_classes": row.all_classes, "length": row.length, "id": row.id},
        )

    def score(question: Question, text: str) -> float:
        answered = Answered(text, question.answers, question.about["all_classes"])
        return row_score(one, answered, edit_distance)

    return Set(
        task=name,
        questions=tuple(asked(row) for row in taken),
        score=score,
        version=f"longbench-{name}/{VERSION}",
        recipe={
            "generator": "longbench",
            "version": VERSION,
            "template": prompts.HASHES[name],
            "metric": one.metric,
            "tools": tools(one, edit_distance),
            "rows": hashed(row.context + row.input for row in taken)[:16],
            "published_rows": one.rows,
            "tokenizer": tokenizer.identity,
            "limit": longest,
        },
    )


def fitted(prompt: str, tokenizer: Tokenizer, limit: int | None, name: str) -> Fitted:
    """`truncation.fit`, with what the seam may add taken off again."""
    if limit is not None and limit < 2:
        raise UserError(f"longbench: {name}: the model's {limit} tokens leave no room for a prompt")
    room = limit
    while True:
        found = fit(prompt, tokenizer, room)
        if limit is None or len(found.tokens) <= limit:
            return found
        assert room is not None
        room -= len(found.tokens) - limit
