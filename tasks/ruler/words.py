"""Aggregation: common words of a list, frequent words of a coded text. Every word counts, so nothing is a needle.
(RULER section 3.3)"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from mixassay.errors import UserError
from mixassay.tasks.ruler.chance import Chance
from mixassay.tasks.ruler.sources import Sources
from mixassay.tasks.ruler.text import Draft, Text, framed

CWE_OPENING = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FWE_OPENING = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
ZETA_2 = math.pi**2 / 6


@dataclass(frozen=True)
class Listing:
    """How often each of ten common words and each of the others stands in a list, and the same of its example."""

    common: int
    other: int
    example_words: int
    example_common: int
    example_other: int


LONG, SHORT = Listing(30, 3, 40, 10, 3), Listing(6, 1, 20, 3, 1)


def listing(length: int) -> Listing:
    return LONG if length >= 4096 else SHORT


@dataclass(frozen=True)
class CommonWords:
    """A numbered list in which ten words come more often than all others; an answered example stands before it."""

    scoring: ClassVar[Literal["all"]] = "all"
    new_tokens: ClassVar[int] = 120

    common: int = 10

    def draft(self, length: int, chance: Chance, sources: Sources) -> Draft:
        times, words = listing(length), sources.words().all
        drawn = [words[i] for i in chance.distinct("words", len(words), len(words))]
        shown = [words[i] for i in chance.distinct("example words", times.example_words, len(words))]
        body = self.shuffled(shown, times.example_common, times.example_other, chance, "example order")
        answer = numbered(shown[: self.common])
        example = f"{CWE_OPENING}{numbered(body)}{CWE_QUESTION}{CWE_PREFIX} {answer}\n"

        def build(n: int) -> Text:
            body = self.shuffled(drawn[:n], times.common, times.other, chance, "order")
            answers = tuple(drawn[: self.common])
            return framed(example + CWE_OPENING, numbered(body), CWE_QUESTION, CWE_PREFIX, answers, [])

        return Draft(build, self.common + 1, len(words), "different words", "the word list")

    def shuffled(self, words: list[str], common: int, other: int, chance: Chance, use: str) -> list[str]:
        body = words[: self.common] * common + words[self.common :] * other
        return [body[i] for i in chance.order(use, len(body))]


def numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


@dataclass(frozen=True)
class FrequentWords:
    """Coded words of six letters whose frequencies fall as rank^-2; rank 1 is written "..." and not asked for."""

    scoring: ClassVar[Literal["all"]] = "all"
    new_tokens: ClassVar[int] = 50

    def draft(self, length: int, chance: Chance, sources: Sources) -> Draft:
        ranks = length // 50
        if ranks < 4:
            raise UserError("it needs four different words, which are length / 50")
        vocabulary = ["...", *coded(chance, ranks - 1)]

        def build(n: int) -> Text:
            counts = frequencies(unambiguous(n), ranks)
            body = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
            context = " ".join(body[i] for i in chance.order("order", len(body)))
            return framed(FWE_OPENING, context, FWE_QUESTION, FWE_PREFIX, tuple(vocabulary[1:4]), [])

        return Draft(build, LEAST, max(LEAST, length), "nominal words")


def coded(chance: Chance, n: int) -> list[str]:
    """n different words of six small letters."""
    out = []
    for number in chance.distinct("vocabulary", n, 26**6):
        out.append("".join(chr(ord("a") + number // 26**i % 26) for i in range(6)))
    return out


def frequencies(n: int, ranks: int) -> list[int]:
    """How often the word of each rank comes in a text of nominally n words: n rank^-2 / zeta(2), rounded down."""
    return [int(n * rank**-2.0 / ZETA_2) for rank in range(1, ranks + 1)]


def unambiguous(n: int) -> int:
    """The largest size up to n in which rank 4 comes more often than rank 5; every size from 74 on is one."""
    while n > 0 and len(set(frequencies(n, 5)[3:])) == 1:
        n -= 1
    return n


LEAST = 27
"""The first size in which rank 4 comes at all."""
