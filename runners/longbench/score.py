"""A set's score: the mean over its rows, in points of 100, of the best metric over a row's right answers.

In LongBench-E the rows are parted by `length`: below 4000, below 8000, and the rest. The score of the benchmark is the
unweighted mean over sets.
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import fmean

from mixassay.runners.longbench.metrics.classification import classification
from mixassay.runners.longbench.metrics.code import EditDistance, code
from mixassay.runners.longbench.metrics.numbers import count, retrieval
from mixassay.runners.longbench.metrics.qa import qa_f1, qa_f1_zh
from mixassay.runners.longbench.metrics.summary import PACKAGE, rouge, rouge_zh
from mixassay.runners.longbench.sets import Set, find

BINS = ("0-4k", "4-8k", "8k+")
PLAIN = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge": rouge,
    "rouge_zh": rouge_zh,
    "count": count,
    "retrieval": retrieval,
}


@dataclass(frozen=True)
class Answered:
    """A model's answer to one row, as generated: neither stripped nor cut. `length` parts the rows of LongBench-E."""

    prediction: str
    answers: Sequence[str]
    all_classes: Sequence[str] = ()
    length: int | None = None


@dataclass(frozen=True)
class Score:
    """`value` in points of 100; `n` rows were scored, the published set has `of` (None in LongBench-E).

    rows: each row's score, in [0, 1]. tools: what the number depends on besides the answers: versions of libraries
    (of `rouge` the one whose scores ours are), and of code the `edit_distance`.
    """

    dataset: str
    metric: str
    value: float
    n: int
    of: int | None
    rows: tuple[float, ...]
    tools: dict[str, str]


def score(name: str, answered: Iterable[Answered], *, edit_distance: EditDistance = "difflib") -> Score:
    """The score of at least one row of a set. Default: the edit distance of the authors' requirements as they are."""
    one = find(name)
    rows = tuple(row_score(one, row, edit_distance) for row in answered)
    return Score(name, one.metric, 100 * fmean(rows), len(rows), one.rows, rows, tools(one, edit_distance))


def score_by_length(
    name: str, answered: Iterable[Answered], *, edit_distance: EditDistance = "difflib"
) -> dict[str, Score]:
    """The score in each range of lengths that has rows, as in LongBench-E."""
    one = find(name)
    parted: dict[str, list[float]] = {bin: [] for bin in BINS}
    for row in answered:
        if row.length is None:
            raise ValueError(f"{name}: scores by length need the length of each row")
        parted[bin_of(row.length)].append(row_score(one, row, edit_distance))
    told = tools(one, edit_distance)
    return {
        bin: Score(name, one.metric, 100 * fmean(rows), len(rows), None, tuple(rows), told)
        for bin, rows in parted.items()
        if rows
    }


def bin_of(length: int) -> str:
    """The range of lengths that a row of LongBench-E is counted in."""
    return BINS[(length >= 4000) + (length >= 8000)]


def row_score(one: Set, row: Answered, edit_distance: EditDistance) -> float:
    """In [0, 1]: the best over the right answers."""
    prediction = row.prediction.lstrip("\n").split("\n")[0] if one.first_line else row.prediction
    match one.metric:
        case "classification":
            return max(classification(prediction, answer, row.all_classes) for answer in row.answers)
        case "code":
            return max(code(prediction, answer, edit_distance) for answer in row.answers)
        case metric:
            return max(PLAIN[metric](prediction, answer) for answer in row.answers)


def tools(one: Set, edit_distance: EditDistance) -> dict[str, str]:
    """What a score of this set depends on besides the answers."""
    if one.metric == "code":
        library = {"python": platform.python_version()}
        if edit_distance == "levenshtein":
            library = {"rapidfuzz": version("rapidfuzz")}
        return {"edit_distance": edit_distance, **library}
    jieba = {"jieba": version("jieba")} if one.metric.endswith("_zh") else {}
    return jieba | ({"rouge": PACKAGE} if one.metric.startswith("rouge") else {})
