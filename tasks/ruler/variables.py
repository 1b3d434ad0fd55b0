"""Variable tracking: a chain of assignments hidden in noise; which variables have the value? (RULER section 3.2)

    VAR KIMBV = 77221 ... VAR KUYAW = VAR KIMBV ... -> KIMBV KUYAW ...

A worked example with names of three letters stands before the text.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from mixassay.errors import UserError
from mixassay.tasks.ruler.chance import Chance
from mixassay.tasks.ruler.fit import largest
from mixassay.tasks.ruler.niah import NOISE, inserted
from mixassay.tasks.ruler.sources import Sources
from mixassay.tasks.ruler.text import Draft, Text, after, framed
from mixassay.tokens import Counter

OPENING = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are:"
)
EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class VariableTracking:
    """One chain of hops + 1 variables. The example has as much noise as fits 500 tokens, or half the length if less."""

    scoring: ClassVar[Literal["all"]] = "all"
    new_tokens: ClassVar[int] = 30

    hops: int = 4

    def draft(self, length: int, chance: Chance, sources: Sources, tokenizer: Counter) -> Draft:
        example = self.example(min(EXAMPLE_TOKENS, length // 2), chance, tokenizer)
        variables = letters(chance, "variables", self.hops + 1, 5)
        value = str(10000 + chance.below("value", 1, 90000)[0])

        def build(n: int) -> Text:
            return after(example, chained(variables, value, n, spread(chance, "places", len(variables), n)))

        return Draft(build, 0, length // 8, "lines")

    def example(self, limit: int, chance: Chance, tokenizer: Counter) -> str:
        """The prompt of a chain of its own, answered, in at most `limit` tokens."""
        variables = letters(chance, "example variables", self.hops + 1, 3)
        value = str(10000 + chance.below("example value", 1, 90000)[0])

        def build(n: int) -> str:
            text = chained(variables, value, n, spread(chance, "example places", len(variables), n))
            return f"{text.input}{text.prefix} {' '.join(variables)}\n\n"

        n = largest(lambda n: tokenizer.count(build(n)), limit, 0, limit)
        if n is None:
            least = tokenizer.count(build(0))
            raise UserError(f"its example takes {least} tokens with this tokenizer, and only {limit} are for it")
        return build(n)


def letters(chance: Chance, use: str, n: int, size: int) -> list[str]:
    """n different names of `size` capital letters."""
    out = []
    for number in chance.distinct(use, n, 26**size):
        name = ""
        for _ in range(size):
            number, letter = divmod(number, 26)
            name += chr(ord("A") + letter)
        out.append(name)
    return out


def spread(chance: Chance, use: str, count: int, n: int) -> list[int]:
    """`count` different ones of n lines, ascending; n itself, the end, where lines are fewer."""
    return sorted(min(place, n) for place in chance.distinct(use, count, max(n, count)))


def assignments(variables: list[str], value: str) -> list[str]:
    return [f"VAR {variables[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(variables))]


def chained(variables: list[str], value: str, n: int, places: list[int]) -> Text:
    """The assignments among n noise lines, the i-th before line places[i]."""
    lines = assignments(variables, value)
    context = "\n".join(inserted([NOISE] * n, lines, places))
    closing, prefix = QUESTION.format(value=value), PREFIX.format(count=len(variables), value=value)
    return framed(OPENING, context, closing, prefix, tuple(variables), lines)
