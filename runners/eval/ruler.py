"""RULER's tasks as sets of questions, of samples that are made for the model's tokenizer (see `tasks/ruler`)."""

from collections.abc import Sequence
from pathlib import Path

from mixassay.runners.eval.question import Question, Set
from mixassay.tasks.ruler import niah, scores
from mixassay.tasks.ruler.sample import Sample
from mixassay.tasks.ruler.sets import SampleSet
from mixassay.tasks.ruler.sources import Sources
from mixassay.tasks.ruler.table import TASKS, Compat
from mixassay.tokens import Counter

NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")
"""The six of the log-linear and DLA papers."""


def make(
    task: str,
    length: int,
    seed: int,
    n: int,
    tokenizer: Counter,
    sources: Sources,
    cache: Path,
    compat: Compat | None = None,
) -> Set:
    """The first n samples of (task, length, seed). Raises `UserError` where they cannot be made."""
    made = SampleSet(task, length, tokenizer, sources, seed, compat)
    samples = made.cached(n, cache)

    def score(question: Question, text: str) -> float:
        return scores.score(task, text, question.answers, compat=compat)

    def wrong_needle(question: Question, text: str) -> float:
        return float(niah.is_of_another_key(question.prompt, question.answers, text))

    asked = TASKS[task]
    one_of_many = isinstance(asked, niah.NIAH) and asked.one_of_many
    return Set(
        task=task,
        questions=tuple(question(sample) for sample in samples),
        score=score,
        version=f"ruler-{compat or 'ours'}/{made.recipe()['version']}.{scores.VERSION}",
        recipe=made.recipe(),
        wants="any" if compat != "lm-eval" and asked.scoring == "any" else "all",
        copied=asked.scoring == "all",
        within=compat != "lm-eval",
        length=length,
        seed=seed,
        measures={"wrong_needle": wrong_needle} if one_of_many else {},
    )


def question(sample: Sample) -> Question:
    depths = sample.depths if TASKS[sample.task].scoring == "all" and len(sample.depths) == len(sample.answers) else ()
    return Question(
        sample.prompt, sample.answers, sample.new_tokens, sample.prompt_tokens, sample.prompt_tokens, depths=depths
    )


def by_depth(asked: Set, texts: Sequence[str]) -> dict[float, list[float]]:
    """Depth, in tenths of the haystack -> for each answer that stands there, whether it was found."""
    found: dict[float, list[float]] = {}
    for question, text in zip(asked.questions, texts, strict=True):
        for depth, answer in zip(question.depths, question.answers, strict=False):
            tenth = min(int(depth * 10), 9) / 10
            found.setdefault(tenth, []).append(scores.score(asked.task, text, [answer]))
    return dict(sorted(found.items()))
