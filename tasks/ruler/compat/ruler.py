"""NVIDIA/RULER's generator: one size for a whole task, found by bisection on fresh draws; a sample that turns out
longer gives up a coarse step of its haystack and is drawn anew."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from string import ascii_uppercase

import numpy as np

from mixassay.errors import UserError
from mixassay.tasks.ruler import words
from mixassay.tasks.ruler.compat import draws
from mixassay.tasks.ruler.niah import NIAH
from mixassay.tasks.ruler.qa import QA
from mixassay.tasks.ruler.sample import Sample, measured, prompt_tokens
from mixassay.tasks.ruler.sources import SHIPPED, Sources, sentences
from mixassay.tasks.ruler.table import TASKS
from mixassay.tasks.ruler.text import Text, after, framed
from mixassay.tasks.ruler.variables import EXAMPLE_TOKENS, VariableTracking
from mixassay.tasks.ruler.words import CommonWords
from mixassay.tokens import Counter

REDRAWS = 200
"""Of a sample at its smallest size; the public code goes on for ever."""

EXAMPLE_VALUE = "12345"


@dataclass(frozen=True)
class PublicRuler:
    """Its budget leaves out the special tokens that a model may put around a prompt.

    split: prose into sentences; RULER takes nltk.sent_tokenize, whose needles may stand at other sentences.
    """

    task: str
    length: int
    tokenizer: Counter
    sources: Sources = SHIPPED
    seed: int = 42
    split: Callable[[str], list[str]] = sentences

    def samples(self, n: int) -> Iterator[Sample]:
        """The first n samples. Raises UserError where the public code does not end or lacks data."""
        task, draw = TASKS[self.task], Random(self.seed)
        if isinstance(task, NIAH):
            return self._needles(task, draw, n)
        if isinstance(task, VariableTracking):
            return self._variables(task, draw, n)
        if isinstance(task, CommonWords):
            return self._common(draw, n)
        if isinstance(task, QA):
            return self._questions(task, draw, n)
        return self._frequent(draw, n)

    # --- families

    def _needles(self, task: NIAH, draw: Random, n: int) -> Iterator[Sample]:
        step = 500 if task.haystack == "essay" else 25 if self.length >= 4096 else 5

        def build(size: int) -> Text:
            return draws.needles(task, size, draw, self.seed, self.sources, self.split)

        size = self._searched(lambda size: self._cost(build(size)), step, self._bound(build(step), step, self.length))
        unit = "words" if task.haystack == "essay" else "lines"
        return (self._shrunk(build, size, step, index, unit) for index in range(n))

    def _variables(self, task: VariableTracking, draw: Random, n: int) -> Iterator[Sample]:
        values = np.random.RandomState(self.seed)
        example = self._example(task, draw)
        step = 10 if self.length >= 4096 else 5

        def plain(size: int) -> Text:
            text = draws.chain(size, task.hops, 5, str(values.randint(10000, 99999)), draw)
            return replace(text, prefix=text.prefix + " ")

        def build(size: int) -> Text:
            text, shown = plain(size), example
            for name in example.split()[-task.hops - 1 :]:
                shown = shown.replace(name, draws.joined(ascii_uppercase, 3, draw))
            return after(shown.replace(EXAMPLE_VALUE, str(values.randint(10000, 99999))) + "\n", text)

        before = self.tokenizer.count(example)
        bound = self._bound(plain(step), step, self.length)
        size = self._searched(lambda size: self._cost(plain(size)) + before, step, bound)
        return (self._shrunk(build, size, step, index, "lines") for index in range(n))

    def _example(self, task: VariableTracking, draw: Random) -> str:
        step = 5

        def build(size: int) -> str:
            text = draws.chain(size, task.hops, 3, EXAMPLE_VALUE, draw)
            return f"{text.input}{text.prefix}  {' '.join(text.answers)}\n"

        def tokens(example: str) -> int:
            return self.tokenizer.count(example[: example.rindex("are: ") + len("are: ")])

        most = max(int(EXAMPLE_TOKENS / (tokens(build(step)) / step) * 3), 2 * step)
        size = self._searched(lambda size: tokens(build(size)), step, most, EXAMPLE_TOKENS)
        for _ in range(size // step + REDRAWS):
            example = build(size)
            if tokens(example) <= EXAMPLE_TOKENS:
                return example
            size = size - step if size > step else size
        raise self._endless()

    def _common(self, draw: Random, n: int) -> Iterator[Sample]:
        pool, times = list(self.sources.words().all), words.listing(self.length)
        Random(self.seed).shuffle(pool)

        def build(size: int) -> Text:
            order = [Random(self.seed), Random(self.seed)]
            body, ten = draws.listed(
                pool, times.example_words, times.example_common, times.example_other, draw, order[0]
            )
            opening = words.CWE_OPENING
            example = f"{opening}{words.numbered(body)}{words.CWE_QUESTION}{words.CWE_PREFIX} {words.numbered(ten)}\n"
            body, ten = draws.listed(pool, size, times.common, times.other, draw, order[1])
            text = framed(opening, words.numbered(body), words.CWE_QUESTION, words.CWE_PREFIX, tuple(ten), [])
            return after(example, text)

        most = max(int(self.length // (self._tokens(build(4096)) / 4096)) * 2, 20)
        size = self._searched(lambda size: self._cost(build(size)), 10, most)
        return (self._shrunk(build, size, 10, index, "different words") for index in range(n))

    def _frequent(self, draw: Random, n: int) -> Iterator[Sample]:
        limit = self.length - TASKS[self.task].new_tokens
        drawn = draws.frequent(limit, limit // 50, limit // 32, self._tokens, draw, self.seed)
        made = enumerate(islice(drawn, n))
        return (self._measured(text, index, size, "nominal words") for index, (text, size) in made)

    def _questions(self, task: QA, draw: Random, n: int) -> Iterator[Sample]:
        source = self.sources.questions(task.data)

        def build(index: int, size: int) -> Text:
            return draws.questioned(index, size, source, draw, self.seed)

        bound = self._bound(build(0, 10), 10, self.length)
        size = self._searched(lambda size: self._cost(build(0, size)), 10, bound)
        return (self._shrunk(partial(build, index), size, 10, index, "documents") for index in range(n))

    # --- sizes

    def _tokens(self, text: Text) -> int:
        return self.tokenizer.count(text.input + text.prefix)

    def _cost(self, text: Text) -> int:
        return self._tokens(text) + TASKS[self.task].new_tokens

    def _bound(self, probe: Text, size: int, limit: int) -> int:
        return max(int(limit / (self._tokens(probe) / size) * 3), 2 * size)

    def _searched(self, cost: Callable[[int], int], low: int, high: int, limit: int | None = None) -> int:
        """Bisection where every cost is a fresh draw; `low` if nothing fits."""
        best = low
        while low <= high:
            size = (low + high) // 2
            if cost(size) <= (limit or self.length):
                best, low = size, size + 1
            else:
                high = size - 1
        return best

    def _shrunk(self, build: Callable[[int], Text], size: int, step: int, index: int, unit: str) -> Sample:
        for _ in range(size // step + REDRAWS):
            with suppress(draws.NoRoom):
                text = build(size)
                if self._cost(text) <= self.length:
                    return self._measured(text, index, size, unit)
            size = size - step if size > step else size
        raise self._endless()

    def _measured(self, text: Text, index: int, size: int, unit: str) -> Sample:
        return measured(
            text,
            self.tokenizer,
            prompt_tokens(text, self.tokenizer),
            task=self.task,
            length=self.length,
            seed=self.seed,
            index=index,
            new_tokens=TASKS[self.task].new_tokens,
            size=size,
            unit=unit,
        )

    def _endless(self) -> UserError:
        return UserError(
            f"ruler: {self.task} at length {self.length} does not fit, and RULER's own code never ends here"
        )
