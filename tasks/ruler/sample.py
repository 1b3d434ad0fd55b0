"""A measured prompt, with every number by which its result may later be split."""

from dataclasses import dataclass
from typing import Any

from mixassay.tasks.ruler.text import Text
from mixassay.tokens import Counter


@dataclass(frozen=True)
class Sample:
    """input, prefix, answers: see `Text`; a base model continues `prompt`.

    length: tokens asked for, prompt and answer together. prompt_tokens: of `prompt`, special ones included.
    new_tokens: kept free for the answer. size: of the haystack, in `unit`s.
    positions: tokens before each needle (special ones not counted), in the answers' order; none where all words count.
    depths: where each needle begins in the haystack, by tokens: 0 at its start, 1 at its end.
    """

    task: str
    length: int
    seed: int
    index: int
    input: str
    prefix: str
    answers: tuple[str, ...]
    prompt_tokens: int
    new_tokens: int
    size: int
    unit: str
    positions: tuple[int, ...]
    depths: tuple[float, ...]

    @property
    def prompt(self) -> str:
        return self.input + self.prefix

    @property
    def fill(self) -> float:
        """Share of the length that prompt and answer use."""
        return (self.prompt_tokens + self.new_tokens) / self.length


def measured(text: Text, tokenizer: Counter, used: int, *, new_tokens: int, **known: Any) -> Sample:
    """The sample of a text whose `prompt_tokens` are `used`; `known` are the other fields."""
    positions, depths = places(text, tokenizer, used - tokenizer.special)
    return Sample(
        input=text.input,
        prefix=text.prefix,
        answers=text.answers,
        prompt_tokens=used,
        new_tokens=new_tokens,
        positions=positions,
        depths=depths,
        **known,
    )


def prompt_tokens(text: Text, tokenizer: Counter) -> int:
    """Tokens of the whole prompt, special ones included."""
    return tokenizer.count(text.input + text.prefix) + tokenizer.special


def places(text: Text, tokenizer: Counter, total: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(positions, depths) of the needles in a prompt of `total` tokens."""
    if not text.needles:
        return (), ()
    start = tokenizer.count(text.input[: text.context[0]])
    end = total - tokenizer.count(text.input[text.context[1] :] + text.prefix)  # give or take a token across the seam
    positions = tuple(tokenizer.count(text.input[:at]) for at, _ in text.needles)
    return positions, tuple(round((at - start) / max(1, end - start), 4) for at in positions)
