"""Questions over documents, of which one or a few hold the answer. (RULER section 3.4)

The documents that the question came with stay in; more of the same article go in first, then any others.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mixassay.tasks.ruler.chance import Chance
from mixassay.tasks.ruler.sources import Question, Questions
from mixassay.tasks.ruler.text import Draft, Text

OPENING = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n"
)
CLOSING = (
    "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words."
    "\n\nQuestion: {question}"
)
PREFIX = " Answer:"


@dataclass(frozen=True)
class QA:
    """data: whose questions, "squad" or "hotpotqa"."""

    scoring: ClassVar[Literal["any"]] = "any"
    new_tokens: ClassVar[int] = 32

    data: Literal["squad", "hotpotqa"]

    def draft(self, question: Question, chance: Chance, source: Questions) -> Draft:
        documents = range(len(source.documents))
        near = [question.near[i] for i in chance.order("near", len(question.near))]
        first = list(dict.fromkeys([*question.needed, *near]))
        taken = set(first)
        others = [i for i in documents if i not in taken]
        queue = first + [others[i] for i in chance.order("others", len(others))]
        needed = len(dict.fromkeys(question.needed))

        def build(n: int) -> Text:
            return shown(question, [queue[i] for i in chance.order("order", n)], source.documents)

        return Draft(build, needed, len(queue), "documents", source.name)


def shown(question: Question, chosen: list[int], documents: list[str]) -> Text:
    """The prompt over the chosen documents, in their order."""
    at, parts, gold = len(OPENING), list[str](), dict[int, tuple[int, int]]()
    for i, number in enumerate(chosen, start=1):
        part = f"Document {i}:\n{documents[number]}"
        if number in question.gold:
            gold[number] = (at, at + len(part))
        parts.append(part)
        at += len(part) + 2
    context = "\n\n".join(parts)
    spans = tuple(gold[number] for number in dict.fromkeys(question.gold))
    inside = (len(OPENING), len(OPENING) + len(context))
    return Text(OPENING + context + CLOSING.format(question=question.text), PREFIX, question.answers, spans, inside)
