"""A prompt before it is measured, and the family of prompts that one sample may choose from by size."""

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Text:
    """input: the prompt but its end. prefix: the end, which opens the answer, with a blank before it; a base model
    gets input + prefix. answers: accepted strings. needles: (start, end) in `input` of what the answers must be read
    from, in the answers' order. context: (start, end) in `input` of the haystack.
    """

    input: str
    prefix: str
    answers: tuple[str, ...]
    needles: tuple[tuple[int, int], ...]
    context: tuple[int, int]


@dataclass(frozen=True)
class Draft:
    """One sample at every size: `build(n)` for n in least .. most, in `unit`s of haystack.

    source: what runs out at `most`, if anything does.
    """

    build: Callable[[int], Text]
    least: int
    most: int
    unit: str
    source: str | None = None


def framed(opening: str, context: str, closing: str, prefix: str, answers: tuple[str, ...], needles: list[str]) -> Text:
    """opening + context + closing, the needles looked up in the context."""
    start = len(opening)
    found = [context.index(needle) + start for needle in needles]
    spans = tuple((at, at + len(needle)) for at, needle in zip(found, needles, strict=True))
    return Text(opening + context + closing, prefix, answers, spans, (start, start + len(context)))


def after(before: str, text: Text) -> Text:
    """The text behind an answered example."""
    moved = tuple((start + len(before), end + len(before)) for start, end in text.needles)
    start, end = text.context
    return replace(text, input=before + text.input, needles=moved, context=(start + len(before), end + len(before)))
