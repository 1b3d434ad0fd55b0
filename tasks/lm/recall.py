"""Lines that come again: a fifth of their bytes are answers, where those of RULER's samples at 1024 are 1 to 5 %.

    amber-lantern: 4821907          told
    amber-lantern: 4821907          asked, answered
    quiet-harbor: 1180335           told
    amber-lantern: 4821907          asked, answered
    idle-canyon: 7712046            told
    quiet-harbor: 1180335           asked, answered

Every other line is one of those that were told: one of the last 2, 4, 8, ... or of all, each of these windows equally
likely. So there is something to learn at once, whatever the length, and always something harder to go on with. The
values of a sample are numbers, or words as the keys are: where all were numbers, small models learnt them later or not.
"""

from collections.abc import Iterator

from mixassay.tasks.lm.parts import Part, Piece
from mixassay.tasks.ruler.chance import Chance
from mixassay.tasks.ruler.niah import Key, Value, names
from mixassay.tasks.ruler.sources import SHIPPED

LEAST_TOKENS = 8
"""Of two lines, with any tokenizer."""

VALUES: tuple[Key | Value, ...] = ("numbers", "words")

WORD = 31
"""Bits of a random number."""


def lines(chance: Chance, n: int) -> Iterator[list[Piece]]:
    """2 n lines, of which lines 0, 2, ... tell something new and lines 1, 3, ... come again."""
    kind = VALUES[chance.below("kind", 1, len(VALUES))[0]]
    keys, values = names("words", chance, "keys", n, SHIPPED), names(kind, chance, "values", n, SHIPPED)
    windows, places = chance.below("windows", n, 2**WORD), chance.below("places", n, 2**WORD)
    for i in range(n):
        yield line(keys[i], values[i], Part.TOLD, Part.TOLD)
        back = places[i] * window(i + 1, windows[i]) >> WORD
        yield line(keys[i - back], values[i - back], Part.ASKED, Part.ANSWER)


def window(told: int, word: int) -> int:
    """One of 2, 4, 8, ... that are less than `told`, or `told` itself, by a random number below 2^31."""
    number = max(1, (told - 1).bit_length())
    return min(told, 2 << (word * number >> WORD))


def line(key: str, value: str, name: Part, content: Part) -> list[Piece]:
    """In two pieces, so that its tokens are the same wherever it stands."""
    return [(f"{key}:", name), (f" {value}\n", content)]
