"""The 21 sets of LongBench v1, as data (Bai et al. 2023, table 1 and the authors' configuration)."""

from dataclasses import dataclass
from typing import Literal

from mixassay.errors import UserError
from mixassay.registry import suggest

Kind = Literal["single-document QA", "multi-document QA", "summary", "few-shot", "synthetic", "code"]
Metric = Literal["qa_f1", "qa_f1_zh", "rouge", "rouge_zh", "classification", "count", "retrieval", "code"]
"""Functions of these names are in metrics/."""


@dataclass(frozen=True)
class Set:
    """What LongBench says of one set. Answers are generated greedily."""

    name: str
    kind: Kind
    metric: Metric
    max_new_tokens: int
    rows: int  # in the published set; a score over fewer is a score of a sample
    by_length: bool = False  # it has an even mixture of lengths in LongBench-E
    chat: bool = True  # a chat model gets its template around the prompt
    first_line: bool = False  # of an answer, leading newlines skipped, only the first line is scored
    stop: tuple[str, ...] = ()  # generation ends before these ...
    min_new_tokens: int = 0  # ... but not before so many tokens


_ALL = (
    Set("narrativeqa", "single-document QA", "qa_f1", 128, 200),
    Set("qasper", "single-document QA", "qa_f1", 128, 200, by_length=True),
    Set("multifieldqa_en", "single-document QA", "qa_f1", 64, 150, by_length=True),
    Set("multifieldqa_zh", "single-document QA", "qa_f1_zh", 64, 200),
    Set("hotpotqa", "multi-document QA", "qa_f1", 32, 200, by_length=True),
    Set("2wikimqa", "multi-document QA", "qa_f1", 32, 200, by_length=True),
    Set("musique", "multi-document QA", "qa_f1", 32, 200),
    Set("dureader", "multi-document QA", "rouge_zh", 128, 200),
    Set("gov_report", "summary", "rouge", 512, 200, by_length=True),
    Set("qmsum", "summary", "rouge", 512, 200),
    Set("multi_news", "summary", "rouge", 512, 200, by_length=True),
    Set("vcsum", "summary", "rouge_zh", 512, 200),
    Set("trec", "few-shot", "classification", 64, 200, by_length=True, chat=False, first_line=True),
    Set("triviaqa", "few-shot", "qa_f1", 32, 200, by_length=True, chat=False, first_line=True),
    Set(
        "samsum",
        "few-shot",
        "rouge",
        128,
        200,
        by_length=True,
        chat=False,
        first_line=True,
        stop=("\n",),
        min_new_tokens=1,
    ),
    Set("lsht", "few-shot", "classification", 64, 200, chat=False, first_line=True),
    Set("passage_count", "synthetic", "count", 32, 200, by_length=True),
    Set("passage_retrieval_en", "synthetic", "retrieval", 32, 200, by_length=True),
    Set("passage_retrieval_zh", "synthetic", "retrieval", 32, 200),
    Set("lcc", "code", "code", 64, 500, by_length=True, chat=False),
    Set("repobench-p", "code", "code", 64, 500, by_length=True, chat=False),
)
SETS = {one.name: one for one in _ALL}
"""By name, in the authors' order."""


def find(name: str) -> Set:
    """The set of that name. Raises `UserError` for an unknown one."""
    if name not in SETS:
        raise UserError(f'unknown LongBench set "{name}".{suggest(name, list(SETS))}')
    return SETS[name]
