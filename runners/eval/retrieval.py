"""In-context retrieval (Arora et al. 2024, "Just read twice"): a document, then the beginning of a sentence that its
answer ends. Six sets, each a file of JSON lines with the fields `text` (all that the model reads) and `value` (its
answer), the layout of hazyresearch/based-swde on the hub.

An answer of at most 48 tokens, up to its first newline, is right if it holds the value, letter case ignored: the
protocol of lm-eval's tasks swde, fda and squad_completion.
"""

import json
from pathlib import Path

from mixassay.errors import UserError
from mixassay.runners.eval.question import Question, Set, hashed
from mixassay.tokens import Tokenizer

SETS = ("swde", "fda", "squad", "triviaqa", "drop", "nq")
NEW_TOKENS = 48
VERSION = 1


def make(name: str, folder: Path, n: int | None, tokenizer: Tokenizer) -> Set:
    """The first n rows. Raises `UserError` where there is no file, or a line has not both fields."""
    file = folder / f"{name}.jsonl"
    if not file.is_file():
        raise UserError(
            f"retrieval: no {file}: put the set there as JSON lines with the fields text (the document and the "
            "beginning of the sentence to end) and value (its end), as hazyresearch/based-swde on the hub has them"
        )
    rows = []
    for at, line in enumerate(file.read_text(encoding="utf-8").splitlines()[:n], start=1):
        try:
            raw = json.loads(line)
            rows.append((str(raw["text"]).strip(), str(raw["value"]).strip()))
        except (ValueError, KeyError, TypeError) as problem:
            raise UserError(f'{file}:{at}: expected {{"text": ..., "value": ...}}, found {line[:60]}') from problem
    if not rows:
        raise UserError(f"{file} is empty")

    def asked(text: str, value: str) -> Question:
        tokens = len(tokenizer.encode(text)) + tokenizer.special
        return Question(text, (value,), NEW_TOKENS, tokens, tokens, stop=("\n",))

    return Set(
        task=name,
        questions=tuple(asked(*row) for row in rows),
        score=lambda question, text: float(question.answers[0].lower() in text.lower()),
        version=f"retrieval-{name}/{VERSION}",
        recipe={
            "generator": "retrieval",
            "version": VERSION,
            "rows": hashed(text + value for text, value in rows)[:16],
            "tokenizer": tokenizer.identity,
        },
    )
