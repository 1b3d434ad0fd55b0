"""Summaries: ROUGE-L of the package `rouge` (Lin 2004, summary level), its F with equal weights.

Texts are split into sentences at full stops and these into words at spaces; a Chinese text is first written with spaces
between the words of jieba. An answer without a sentence, such as an empty one, scores 0.

The package recurses once for each word of two sentences. The authors score 0 when that exceeds Python's limit on
recursion, so that it would depend on who calls; here the limit is lifted for the call.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from mixassay.runners.extras import need
from mixassay.runners.longbench.metrics import chinese


def rouge(prediction: str, answer: str) -> float:
    with _recursion(len(prediction.split()) + len(answer.split())):
        try:
            (scores,) = _rouge().get_scores([prediction], [answer])
        except ValueError:  # its word for a text without sentences
            return 0.0
    return float(scores["rouge-l"]["f"])


def rouge_zh(prediction: str, answer: str) -> float:
    return rouge(" ".join(chinese.words(prediction)), " ".join(chinese.words(answer)))


@cache
def _rouge() -> Any:
    return need("rouge", "lm", "ROUGE in LongBench").Rouge(metrics=["rouge-l"], stats=["f"])


@contextmanager
def _recursion(further: int) -> Iterator[None]:
    """Room for so many more calls than Python allows."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + further)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
