"""Needles in a haystack: which value was said to belong to this key? (RULER section 3.1, 8 of its 13 tasks)

    ... One of the special magic numbers for <key> is: <value>. ...
    What is the special magic number for <key> mentioned in the provided text?

The haystack is one noise line again and again, prose, or nothing but needles of other keys.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from mixassay.tasks.ruler.chance import Chance
from mixassay.tasks.ruler.sources import Prose, Sources
from mixassay.tasks.ruler.text import Draft, Text, framed

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Depths of needles in prose, in per cent of its sentences."""

Haystack = Literal["noise", "essay", "needles"]
Key = Literal["words", "uuids"]
Value = Literal["numbers", "uuids"]


@dataclass(frozen=True)
class NIAH:
    """keys: how many keys are hidden, each with `values` values. queries: how many of the keys are asked for."""

    scoring: ClassVar[Literal["all"]] = "all"
    new_tokens: ClassVar[int] = 128

    haystack: Haystack
    key: Key = "words"
    value: Value = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def one_of_many(self) -> bool:
        """Whether one value is asked for where others stand too."""
        return self.queries * self.values == 1 and (self.keys > 1 or self.haystack == "needles")

    def draft(self, length: int, chance: Chance, sources: Sources) -> Draft:
        K, V = self.keys, self.values
        count = K * V
        lines = length // 8  # no line of needles has fewer tokens than words
        keys = names(self.key, chance, "keys", K + (lines if self.haystack == "needles" else 0), sources)
        values = names(self.value, chance, "values", count + (lines if self.haystack == "needles" else 0), sources)
        ours = [needle(self.value, keys[i // V], values[i]) for i in range(count)]
        placed = [ours[i] for i in chance.order("needles", count)]
        asked = chance.order("queries", K)[: self.queries]
        wanted = [k * V + v for k in asked for v in range(V)]

        def text(context: str) -> Text:
            answers, needles = tuple(values[i] for i in wanted), [ours[i] for i in wanted]
            return question(self, context, [keys[k] for k in asked], answers, needles)

        if self.haystack == "essay":
            prose = sources.prose()
            depths = sorted(DEPTHS[i] for i in chance.distinct("depths", count, len(DEPTHS)))
            most = min(length, len(prose.words))
            source = None if most == length else prose.name
            return Draft(lambda n: text(in_prose(prose, n, placed, depths)), 1, most, "words", source)

        others = [needle(self.value, k, v) for k, v in zip(keys[K:], values[count:], strict=True)]

        def among_lines(n: int) -> Text:
            hay = others[:n] if self.haystack == "needles" else [NOISE] * n
            return text("\n".join(inserted(hay, placed, sorted(chance.distinct("places", count, n)))))

        return Draft(among_lines, count, max(count, lines), "lines")


def names(kind: Key | Value, chance: Chance, use: str, n: int, sources: Sources) -> list[str]:
    """n different words (adjective-noun), numbers of seven digits, or UUIDs."""
    if kind == "uuids":
        return chance.uuids(use, n)
    if kind == "numbers":
        return [str(10**6 + i) for i in chance.distinct(use, n, 9 * 10**6)]
    pairs = sources.words().pairs
    return [pairs[i] for i in chance.distinct(use, n, len(pairs))]


def needle(kind: Value, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


NEEDLE = re.compile(r"One of the special magic \w+ for .+? is: (\S+)\.")


def is_of_another_key(prompt: str, answers: Sequence[str], text: str) -> bool:
    """Whether a text without any right answer holds the value of a needle that was not asked for."""
    text = text.lower()
    if any(answer.lower() in text for answer in answers):
        return False
    return any(value.lower() in text for value in NEEDLE.findall(prompt))


def inserted(lines: list[str], extra: list[str], before: list[int]) -> list[str]:
    """`extra[i]` before line `before[i]`, ascending."""
    out: list[str] = []
    for start, end, line in zip([0, *before], before, extra, strict=False):
        out += [*lines[start:end], line]
    return out + lines[before[-1] :]


def in_prose(prose: Prose, n: int, needles: list[str], depths: list[int]) -> str:
    """The first n words; needle i stands where depths[i] per cent of their sentences are over."""
    ends = [0, *prose.ends[: bisect_left(prose.ends, n)], n]
    cuts = [ends[(len(ends) - 1) * depth // 100] for depth in depths]
    pieces: list[str] = []
    for start, end, line in zip([0, *cuts], cuts, needles, strict=False):
        pieces += [*prose.words[start:end], line]
    return " ".join(pieces + prose.words[cuts[-1] : n])


def question(task: NIAH, context: str, asked: list[str], answers: tuple[str, ...], needles: list[str]) -> Text:
    """The prompt: singular if one value is asked for."""
    many = task.queries * task.values > 1
    kind = task.value if many else task.value[:-1]
    whom = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    hidden = f"Some special magic {kind} are hidden" if many else f"A special magic {kind} is hidden"
    opening = (
        f"{hidden} within the following text. Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
    )
    about = f"special magic {kind} for {whom} mentioned in the provided text"
    closing = f"\nWhat are all the {about}?" if many else f"\nWhat is the {about}?"
    return framed(opening, context, closing, f" The {about} {'are' if many else 'is'}", answers, needles)
