"""Samples with their answers, to train on: RULER's tasks and `recall`.

    told      ...
    asked     What is ...? The special magic number for <key> mentioned in the provided text is
    answer     4821907.<end>

RULER's are as the evaluated ones, but of other seeds and in other prose. Several answers are `a, b, c.`, in the order
asked; several values of one key in the order of the text. Evaluated samples have small numbers for seeds, ours 63-bit
hashes.
"""

import itertools
from dataclasses import dataclass, field

from mixassay import draws
from mixassay.errors import UserError
from mixassay.registry import suggest
from mixassay.tasks.lm import recall
from mixassay.tasks.lm.parts import Part, Piece
from mixassay.tasks.ruler.chance import Chance
from mixassay.tasks.ruler.generate import LEAST_LENGTH, Ruler
from mixassay.tasks.ruler.niah import NIAH
from mixassay.tasks.ruler.qa import QA
from mixassay.tasks.ruler.sample import Sample
from mixassay.tasks.ruler.sources import Prose, Source, Sources
from mixassay.tasks.ruler.table import TASKS
from mixassay.tokens import Tokenizer

RECALL = "recall"
NAMES = (RECALL, *(name for name, task in TASKS.items() if not isinstance(task, QA)))
"""Those of RULER need no file of questions."""

TRIES = 8

ROOM = 128
"""Tokens to spare for answers that may be longer than what RULER keeps free for them: all but those of needles."""


@dataclass(frozen=True)
class Passage(Sources):
    """Prose cut out of a text, where RULER always takes a text's beginning: that could be learnt by heart."""

    passage: Prose | None = None

    def prose(self) -> Prose:
        assert self.passage is not None
        return self.passage


@dataclass(frozen=True)
class Sampler:
    """`marked(seed, index, length)` is a sample's ids, the end of a text behind it, at most `length` of them, and what
    part of it each belongs to. `prose` is what haystacks are cut from; `per_token` its characters a token."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    prose: str = field(repr=False)
    per_token: float

    def marked(self, seed: int, index: int, length: int) -> tuple[list[int], list[Part]]:
        chance = Chance(seed, index, "text", length)
        name = self.names[chance.below("task", 1, len(self.names))[0]]
        if name == RECALL:
            return self._recall(chance, length)
        ids, parts = self._encoded(question_and_answer(self._sample(name, chance, seed, index, length)))
        return [*ids, self.tokenizer.end], [*parts, Part.ANSWER]

    def try_all(self, lengths: tuple[int, ...]) -> None:
        """Raises UserError where a task does not fit a length, before it is met in the middle of a run."""
        for name, length in itertools.product(self.names, lengths):
            if name == RECALL:  # two of its lines fit any
                continue
            try:
                self._sample(name, Chance(0, 0, "text", length), 0, 0, length)
            except UserError as fault:
                raise UserError(f"text: lengths: {fault}") from fault

    def _recall(self, chance: Chance, length: int) -> tuple[list[int], list[Part]]:
        """As many lines as fit. Where they end is nothing that can be known."""
        ids: list[int] = []
        parts: list[Part] = []
        for line in recall.lines(chance, length // recall.LEAST_TOKENS):
            more, its = self._encoded(line)
            if len(ids) + len(more) >= length:
                break
            ids += more
            parts += its
        return [*ids, self.tokenizer.end], [*parts, Part.TOLD]

    def _encoded(self, pieces: list[Piece]) -> tuple[list[int], list[Part]]:
        encoded = [(self.tokenizer.encode(text), part) for text, part in pieces]
        return [i for ids, _ in encoded for i in ids], [part for ids, part in encoded for _ in ids]

    def _sample(self, name: str, chance: Chance, seed: int, index: int, length: int) -> Sample:
        within = length - (0 if isinstance(TASKS[name], NIAH) else ROOM)
        return fitting(Ruler(name, within, self.tokenizer, Passage(passage=self._passage(chance, length)), seed), index)

    def _passage(self, chance: Chance, length: int) -> Prose:
        """Half as much again as the length takes, from some word on."""
        size = int(1.5 * self.per_token * length) + 100
        start = chance.below("passage", 1, max(1, len(self.prose) - size))[0]
        return Prose(Source("the text", self.prose[start : start + size].partition(" ")[2].encode()))


def fitting(ruler: Ruler, index: int) -> Sample:
    """Where a length is so short that some keys are too long for it, the first of a few samples that fits."""
    for number in range(TRIES * index, TRIES * index + TRIES - 1):
        try:
            return ruler.sample(number)
        except UserError:
            continue
    return ruler.sample(TRIES * index + TRIES - 1)


def question_and_answer(sample: Sample) -> list[Piece]:
    told, _, asked = sample.input.rpartition("\n")
    answer = f" {', '.join(in_order(sample))}."
    return [(told, Part.TOLD), (f"\n{asked}{sample.prefix}", Part.ASKED), (answer, Part.ANSWER)]


def in_order(sample: Sample) -> list[str]:
    family = TASKS[sample.task]
    if isinstance(family, NIAH) and family.values > 1:
        return [answer for _, answer in sorted(zip(sample.positions, sample.answers, strict=True))]
    return list(sample.answers)


def check(names: tuple[str, ...], lengths: tuple[int, ...], seq_len: int) -> None:
    """Raises UserError for unknown tasks, and lengths that RULER or a row cannot hold."""
    for name in names:
        if name not in NAMES:
            raise UserError(f'text: unknown sample "{name}".{suggest(name, list(NAMES))}')
    for length in lengths:
        if not LEAST_LENGTH <= length <= seq_len:
            raise UserError(f"text: lengths must be from {LEAST_LENGTH} to seq_len={seq_len}, got {length}")


def seed_of(seed: int, split: str) -> int:
    """The generator's seed for a run's seed and a split: no two agree."""
    return draws.derive(seed, "samples", split)
