"""Samples of one RULER task at one length for one tokenizer, each a pure function of (task, length, seed, index)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from mixassay.errors import UserError
from mixassay.registry import suggest
from mixassay.tasks.ruler.chance import Chance
from mixassay.tasks.ruler.fit import largest
from mixassay.tasks.ruler.qa import QA
from mixassay.tasks.ruler.sample import Sample, measured, prompt_tokens
from mixassay.tasks.ruler.sources import SHIPPED, Sources
from mixassay.tasks.ruler.table import TASKS
from mixassay.tasks.ruler.text import Draft
from mixassay.tasks.ruler.variables import VariableTracking
from mixassay.tokens import Counter

VERSION = 1
"""Raised whenever the same arguments give another sample."""

LEAST_LENGTH = 256
LEAST_FILL = 0.97
"""Of a sample whose source ran out: below it the source is too small for the length."""


@dataclass(frozen=True)
class Ruler:
    """`ruler.sample(index)` is the index-th sample. Raises UserError for unknown tasks and lengths below 256.

    A task of questions asks those that fit the length, in an order drawn from the seed, each of them once.

    >>> from mixassay.tokens import Bytes
    >>> sample = Ruler("niah_single_1", 1024, Bytes()).sample(0)
    >>> sample.answers, sample.prompt_tokens + sample.new_tokens, sample.size
    (('6160148',), 1019, 6)
    """

    task: str
    length: int
    tokenizer: Counter
    sources: Sources = SHIPPED
    seed: int = 42
    _fits: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    """Which questions fit, in the order in which they are asked, as far as that was looked at."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UserError(f'unknown RULER task "{self.task}".{suggest(self.task, list(TASKS))}')
        if self.length < LEAST_LENGTH:
            raise UserError(f"ruler: length must be at least {LEAST_LENGTH}, got {self.length}")

    def samples(self, n: int) -> Iterator[Sample]:
        """The first n samples."""
        return (self.sample(index) for index in range(n))

    def sample(self, index: int) -> Sample:
        """Raises UserError where not even the smallest prompt fits, or a source is too small for the length."""
        try:
            return self._fitted(self._draft(index), index)
        except UserError as error:
            raise UserError(f"ruler: {self.task} at length {self.length}: {error}") from None

    def _draft(self, index: int) -> Draft:
        task, chance = TASKS[self.task], self._chance(index)
        if isinstance(task, QA):
            return self._question(task, index)
        if isinstance(task, VariableTracking):
            return task.draft(self.length, chance, self.sources, self.tokenizer)
        return task.draft(self.length, chance, self.sources)

    def _chance(self, index: int) -> Chance:
        return Chance(self.seed, index, "ruler", VERSION, self.task, self.length)

    def _question(self, task: QA, index: int) -> Draft:
        source = self.sources.questions(task.data)
        order = self._chance(0).order("questions", len(source.questions))
        while (asked := sum(self._fits)) <= index and len(self._fits) < len(order):
            draft = task.draft(source.questions[order[len(self._fits)]], self._chance(asked), source)
            self._fits.append(self._cost(draft, draft.least) <= self.length)
        fitting = [number for number, fits in zip(order, self._fits, strict=False) if fits]
        if len(fitting) <= index:
            raise UserError(f"only {len(fitting)} of the {len(order)} questions of {source.name} fit, not {index + 1}")
        return task.draft(source.questions[fitting[index]], self._chance(index), source)

    def _cost(self, draft: Draft, n: int) -> int:
        return prompt_tokens(draft.build(n), self.tokenizer) + TASKS[self.task].new_tokens

    def _fitted(self, draft: Draft, index: int) -> Sample:
        cost = cache(lambda n: self._cost(draft, n))
        size, new_tokens = largest(cost, self.length, draft.least, draft.most), TASKS[self.task].new_tokens
        if size is None:
            least = cost(draft.least)
            raise UserError(
                f"the smallest prompt and {new_tokens} tokens for the answer take {least} with this tokenizer"
            )
        if size == draft.most and draft.source and cost(size) / self.length < LEAST_FILL:
            raise UserError(
                f"all {size} {draft.unit} of {draft.source} fill only {cost(size)} tokens; give a larger source"
            )
        return measured(
            draft.build(size),
            self.tokenizer,
            cost(size) - new_tokens,
            task=self.task,
            length=self.length,
            seed=self.seed,
            index=index,
            new_tokens=new_tokens,
            size=size,
            unit=draft.unit,
        )
