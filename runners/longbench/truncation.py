"""Prompts that are longer than a model reads lose their middle, as the authors of LongBench cut them.

Instructions stand at both ends of a prompt. So of a prompt of more than `limit` tokens the first and the last
limit // 2 are kept, each half is decoded, and the joined text is tokenised again: at the seam, tokens may differ.
A recurrent model reads prompts of any length; its limit is None, and nothing is cut.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int], /) -> str:
        """The text of the tokens, special ones left out."""
        ...


@dataclass(frozen=True)
class Fitted:
    """A prompt as the model will read it. `whole`: how many tokens it had before it was cut."""

    text: str
    tokens: list[int]
    whole: int

    @property
    def cut(self) -> bool:
        return len(self.tokens) < self.whole


def fit(prompt: str, tokenizer: Tokenizer, limit: int | None) -> Fitted:
    """The prompt in at most `limit` tokens (None: as it is), up to what tokenising the seam again may add.

    The authors leave room for the answer: 3500 for a model that reads 4096 tokens, 31500 for 32K.
    """
    tokens = tokenizer.encode(prompt)
    if limit is None or len(tokens) <= limit:
        return Fitted(prompt, tokens, len(tokens))
    half = limit // 2
    text = tokenizer.decode(tokens[:half]) + tokenizer.decode(tokens[len(tokens) - half :])
    return Fitted(text, tokenizer.encode(text), len(tokens))


@dataclass(frozen=True)
class Truncation:
    """What cutting took from a set: the share of its prompts that were cut, and of all its tokens."""

    prompts: float
    tokens: float


def truncation(fitted: Iterable[Fitted]) -> Truncation:
    """Of the prompts of one set, at least one."""
    each = list(fitted)
    kept, whole = sum(len(one.tokens) for one in each), sum(one.whole for one in each)
    return Truncation(sum(one.cut for one in each) / len(each), 1 - kept / whole)
