"""LongBench's sets as sets of questions, cut for the model where it does not read such long prompts: the 21 of version
1, and the 13 of LongBench-E, whose scores are told by ranges of length, too."""

from pathlib import Path

from mixassay.errors import UserError
from mixassay.runners.eval.question import Question, Set, hashed
from mixassay.runners.longbench import prompts, rows
from mixassay.runners.longbench.metrics.code import EditDistance
from mixassay.runners.longbench.rows import Row
from mixassay.runners.longbench.score import Answered, bin_of, row_score, tools
from mixassay.runners.longbench.sets import SETS, find
from mixassay.runners.longbench.truncation import Fitted, fit
from mixassay.tokens import Tokenizer

VERSION = 1
"""Raised whenever the same rows give other prompts, or the same answer another score."""

BY_LENGTH = tuple(f"{name}_e" for name, one in SETS.items() if one.by_length)
"""The 13 sets of LongBench-E, as its authors name their files."""


def make(
    task: str,
    source: str | Path,
    n: int | None,
    tokenizer: Tokenizer,
    longest: int | None,
    edit_distance: EditDistance = "difflib",
) -> Set:
    """The first n rows of a set (None: all), prompts cut in their middle to what a model of `longest` tokens reads.

    `task` is a set of LongBench or, NAME_e, of LongBench-E. A recurrent model's `longest` is None: nothing is cut.
    Answers are generated to the set's number of tokens; where only the first line counts, it is taken from the whole
    answer.
    """
    by_length = task in BY_LENGTH
    one = find(task.removesuffix("_e") if by_length else task)
    taken = rows.load(one.name, source, by_length=by_length)[:n]

    def asked(row: Row) -> Question:
        read = fitted(prompts.prompt(row), tokenizer, longest, one.max_new_tokens, task)
        return Question(
            read.text,
            row.answers,
            one.max_new_tokens,
            len(read.tokens) + tokenizer.special,
            read.whole + tokenizer.special,
            groups={"length": bin_of(row.length)} if by_length else {},
            about={"all_classes": row.all_classes, "length": row.length, "id": row.id},
        )

    def score(question: Question, text: str) -> float:
        answered = Answered(text, question.answers, question.about["all_classes"])
        return row_score(one, answered, edit_distance)

    return Set(
        task=task,
        questions=tuple(asked(row) for row in taken),
        score=score,
        version=f"longbench-{task}/{VERSION}",
        recipe={
            "generator": "longbench",
            "version": VERSION,
            "template": prompts.HASHES[one.name],
            "metric": one.metric,
            "tools": tools(one, edit_distance),
            "rows": hashed(row.context + row.input for row in taken)[:16],
            "published_rows": None if by_length else one.rows,
            "tokenizer": tokenizer.identity,
            "limit": longest,
        },
    )


def fitted(prompt: str, tokenizer: Tokenizer, longest: int | None, new_tokens: int, name: str) -> Fitted:
    """The prompt for a model that reads and writes `longest` tokens: `truncation.fit`, with what the seam may add
    taken off again."""
    if longest is None:
        return fit(prompt, tokenizer, None)
    limit = room = longest - new_tokens - tokenizer.special
    if limit < 2:
        raise UserError(f"longbench: {name}: the model's {longest} tokens leave no room for a prompt")
    while len((found := fit(prompt, tokenizer, room)).tokens) > limit:
        room -= len(found.tokens) - limit
    return found
