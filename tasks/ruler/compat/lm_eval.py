"""lm-evaluation-harness 0.4.13's RULER tasks: sizes by coarse steps from below, and the faults that move scores.

    - haystacks are rounded down to whole steps: niah_multikey_3 uses 57 % of 4096 tokens
    - cwe's worked example counts towards the size and is then left out
    - fwe keeps nothing free for the answer
    - needles' budgets leave out the answer's opening, so a sample may be longer than asked for
    - a needle or question sample that does not fit is dropped: fewer samples than asked for, and gaps in `index`
    - one reference of several found counts as its share (`scores.share`), in questions too

The stock data depend on what else the process drew before; this is a task that runs alone, with the default seeds
(Python's generator 0, numpy's 1234).
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from string import ascii_uppercase

import numpy as np

from mixassay.errors import UserError
from mixassay.tasks.ruler import niah, variables, words
from mixassay.tasks.ruler.compat import draws
from mixassay.tasks.ruler.niah import NIAH, NOISE
from mixassay.tasks.ruler.qa import QA
from mixassay.tasks.ruler.sample import Sample, measured, prompt_tokens
from mixassay.tasks.ruler.sources import SHIPPED, Sources, sentences
from mixassay.tasks.ruler.table import TASKS
from mixassay.tasks.ruler.text import Text, after, framed
from mixassay.tasks.ruler.variables import EXAMPLE_TOKENS, VariableTracking
from mixassay.tasks.ruler.words import CommonWords
from mixassay.tokens import Counter

SHUFFLES = 42
"""Seed of every shuffle, whatever the run's seed."""

NUMPY_SEED = 1234
REDRAWS = 200


@dataclass(frozen=True)
class PublicLmEval:
    """seed: of Python's generator, as `simple_evaluate(random_seed=...)` sets it.

    split: prose into sentences; lm-eval takes nltk.sent_tokenize, whose needles may stand at other sentences.
    """

    task: str
    length: int
    tokenizer: Counter
    sources: Sources = SHIPPED
    seed: int = 0
    split: Callable[[str], list[str]] = sentences

    def samples(self, n: int) -> Iterator[Sample]:
        """What of the first n samples is not dropped. Raises UserError where the public code does not end or fails."""
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
        words = len(self.sources.prose().words) if task.haystack == "essay" else 0
        count = task.keys * task.values

        def build(size: int) -> Text:
            if 0 < words < size:
                raise UserError(
                    f"ruler: {self.task} at length {self.length}: the prose has {words} words; give a longer one"
                )
            return draws.needles(task, size, draw, SHUFFLES, self.sources, self.split)

        def probed(size: int) -> int:
            text = build(size)
            return self._tokens(text.input + " ".join(text.answers))

        size = max(self._grown(probed, max(step, count), step), count)
        unit = "words" if task.haystack == "essay" else "lines"
        return self._kept((range(size, 0, -step), build, index, unit) for index in range(n))

    def _questions(self, task: QA, draw: Random, n: int) -> Iterator[Sample]:
        source = self.sources.questions(task.data)
        count = len(source.documents)

        def build(index: int, size: int) -> Text:
            if size >= count:
                raise UserError(
                    f"ruler: {self.task} at length {self.length}: lm-eval's code mixes its documents up where all "
                    f"{count} of {source.name} are shown"
                )
            return draws.questioned(index, size, source, draw, SHUFFLES)

        def probed(size: int) -> int:
            text = build(0, size)
            return self._tokens(f"{text.input} {list(text.answers)}")

        size = max(self._grown(probed, 10, 10, count), 1)

        def tried(index: int) -> list[int]:
            needed = len(source.questions[index].needed) if index < len(source.questions) else 0
            return [*range(max(size, needed), needed, -10), needed]

        return self._kept((tried(index), partial(build, index), index, "documents") for index in range(n))

    def _variables(self, task: VariableTracking, draw: Random, n: int) -> Iterator[Sample]:
        values = np.random.RandomState(NUMPY_SEED)
        example = self._example(task, draw, values)
        before = self._tokens(example)

        def plain(size: int) -> Text:
            return chain(size, task.hops, 5, values, draw)

        def probed(size: int) -> int:
            text = plain(size)
            return self._tokens(f"{text.input}{text.prefix} {list(text.answers)}") + before

        size = self._grown(probed, 10, 10)
        for index in range(n):
            text, used = self._redrawn(plain, size, 10, before)
            shown = example
            for name in example[example.index("they are: ") + 10 :].split():
                shown = shown.replace(name, draws.joined(ascii_uppercase, 3, draw))
            text = after(shown + "\n\n", text)
            yield self._measured(replace(text, prefix=text.prefix.rstrip()), index, used, "lines")

    def _example(self, task: VariableTracking, draw: Random, values: np.random.RandomState) -> str:
        def build(size: int) -> Text:
            return chain(size, task.hops, 3, values, draw)

        def probed(size: int) -> int:
            text = build(size)
            return self._tokens(f"{text.input}{text.prefix} {list(text.answers)}")

        text, _ = self._redrawn(build, self._grown(probed, 5, 5, limit=EXAMPLE_TOKENS), 5, 0, EXAMPLE_TOKENS)
        return f"{text.input}{text.prefix} {' '.join(text.answers)}\n\n"

    def _common(self, draw: Random, n: int) -> Iterator[Sample]:
        pool, times, order = list(self.sources.words().all), words.listing(self.length), Random(SHUFFLES)
        order.shuffle(pool)

        def build(size: int) -> tuple[str, Text]:
            shown, ten = draws.listed(pool, times.example_words, times.example_common, times.example_other, draw, order)
            opening, closing = words.CWE_OPENING, words.CWE_QUESTION + words.CWE_PREFIX
            example = f"{opening}{words.numbered(shown)}{closing} {words.numbered(ten)}"
            body, ten = draws.listed(pool, size, times.common, times.other, draw, order)
            return example, framed(opening, words.numbered(body), words.CWE_QUESTION, words.CWE_PREFIX, tuple(ten), [])

        def probed(size: int) -> int:
            example, text = build(size)
            answer = words.numbered(list(text.answers))
            return self._tokens(f"{example}\n{text.input}{text.prefix} {answer}")

        size = self._grown(probed, 10, 10, len(pool))
        for index in range(n):
            text, used = self._redrawn(lambda size: build(size)[1], size, 10, 0)
            if not text.answers:
                raise UserError(f"ruler: {self.task} at length {self.length}: lm-eval's code makes an empty list here")
            yield self._measured(replace(text, prefix="\n\n" + text.prefix.strip()), index, used, "different words")

    def _frequent(self, draw: Random, n: int) -> Iterator[Sample]:
        drawn = draws.frequent(self.length, self.length // 50, self.length // 32, self._whole, draw, SHUFFLES)
        made = enumerate(islice(drawn, n))
        return (self._measured(text, index, size, "nominal words") for index, (text, size) in made)

    # --- sizes

    def _tokens(self, text: str) -> int:
        return self.tokenizer.count(text) + self.tokenizer.special

    def _whole(self, text: Text) -> int:
        return self._tokens(text.input + text.prefix)

    def _new(self) -> int:
        return TASKS[self.task].new_tokens

    def _grown(
        self, probed: Callable[[int], int], size: int, step: int, most: int | None = None, limit: int | None = None
    ) -> int:
        """Steps from below, each a fresh draw, to the last before the limit; 0 where the first is over it."""
        limit = limit or self.length
        while True:
            used = probed(size) + self._new()
            if used > limit:
                return size - step
            size = draws.counted(size + step, limit)
            if most is not None and size > most:
                return most
            if used >= limit:
                return size

    def _kept(self, tries: Iterator[tuple[list[int] | range, Callable[[int], Text], int, str]]) -> Iterator[Sample]:
        kept = 0
        for sizes, build, index, unit in tries:
            for size in sizes:
                with suppress(draws.NoRoom):
                    text = build(size)
                    if self._tokens(text.input) + self._new() <= self.length:
                        kept += 1
                        yield self._measured(text, index, size, unit)
                        break
        if not kept:
            raise UserError(f"ruler: {self.task} at length {self.length}: none of the samples fit lm-eval's sizes")

    def _redrawn(
        self, build: Callable[[int], Text], size: int, step: int, before: int, limit: int | None = None
    ) -> tuple[Text, int]:
        for _ in range(max(size, 0) // step + REDRAWS):
            with suppress(draws.NoRoom):
                text = build(size)
                if self._whole(text) + self._new() + before <= (limit or self.length):
                    return text, size
            size = size - step if size > step else size
        raise UserError(
            f"ruler: {self.task} at length {self.length} does not fit, and lm-eval's own code never ends here"
        )

    def _measured(self, text: Text, index: int, size: int, unit: str) -> Sample:
        return measured(
            text,
            self.tokenizer,
            prompt_tokens(text, self.tokenizer),
            task=self.task,
            length=self.length,
            seed=self.seed,
            index=index,
            new_tokens=self._new(),
            size=size,
            unit=unit,
        )


def chain(n: int, hops: int, letters: int, values: np.random.RandomState, draw: Random) -> Text:
    """One chain among n noise lines, without line breaks around it; among sentences where lines are too few."""
    if n < 1:
        raise draws.NoRoom
    names = draws.variable_names(hops + 1, letters, draw)
    value = str(values.randint(10000, 99999))
    lines = variables.assignments(names, value)
    hay = [NOISE + "\n"] * n
    if n <= len(lines):
        hay = [part + "." if part.strip() else part for line in hay for part in line.split(".")]
    context = " ".join(niah.inserted(hay, lines, sorted(draw.sample(range(len(hay)), len(lines)))))
    closing = variables.QUESTION.format(value=value)
    prefix = variables.PREFIX.format(count=hops + 1, value=value).replace("assigned", "assgined") + " "
    return framed(variables.OPENING, context.replace(". \n", ".\n"), closing, prefix, tuple(names), lines)
