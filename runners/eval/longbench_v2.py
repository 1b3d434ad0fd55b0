"""LongBench v2's questions with four choices as a set of questions: the authors' zero-shot prompt, and a choice that is
read from what the model says. They sample at temperature 0.1; here generation is greedy, as everywhere."""

from pathlib import Path

from mixassay.errors import UserError
from mixassay.runners.eval.longbench import fitted
from mixassay.runners.eval.question import Question, Set, hashed
from mixassay.runners.longbench import v2
from mixassay.tokens import Tokenizer

TASK = "longbench_v2"
VERSION = 1
GUESS = 1 / len(v2.LETTERS)


def make(source: str | Path, n: int | None, tokenizer: Tokenizer, longest: int | None) -> Set:
    """The first n questions (None: all), prompts cut in their middle to what a model of `longest` tokens reads."""
    taken = v2.load(source)[:n]
    if not taken:
        raise UserError(f"{source}: no questions of LongBench v2")

    def asked(row: v2.Question) -> Question:
        read = fitted(v2.prompt(row), tokenizer, longest, v2.MAX_NEW_TOKENS, TASK)
        return Question(
            read.text,
            (f"The correct answer is ({row.answer})",),
            v2.MAX_NEW_TOKENS,
            len(read.tokens) + tokenizer.special,
            read.whole + tokenizer.special,
            groups={"difficulty": row.difficulty, "length": row.length, "domain": row.domain},
            about={"letter": row.answer, "id": row.id},
        )

    def score(question: Question, text: str) -> float:
        return float(v2.chosen(text) == question.about["letter"])

    def unread(question: Question, text: str) -> float:
        return float(v2.chosen(text) is None)

    return Set(
        task=TASK,
        questions=tuple(asked(row) for row in taken),
        score=score,
        version=f"{TASK}/{VERSION}",
        recipe={
            "generator": "longbench-v2",
            "version": VERSION,
            "template": v2.HASH,
            "rows": hashed(text for r in taken for text in (r.context, r.question, *r.choices, r.answer))[:16],
            "published_rows": v2.ROWS,
            "tokenizer": tokenizer.identity,
            "limit": longest,
        },
        measures={"unread": unread, "compensated": lambda q, text: score(q, text) + GUESS * unread(q, text)},
    )
