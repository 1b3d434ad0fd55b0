"""RULER's score of one answer: which of the accepted strings it holds, letter case ignored.

    all   share of the strings found (needles, variables, words)
    any   1 if any string is found (questions, whose strings are spellings of one answer)

lm-eval 0.4.13 scores the share in questions too, and so understates qa_1.

A model that lists everything wins: an answer must have been cut at the task's `new_tokens`.
"""

import re
from collections.abc import Sequence

from mixassay.tasks.ruler.table import TASKS, Compat

VERSION = 1
"""Raised whenever the same answer gets another score."""

_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(prediction: str) -> str:
    """Control characters as newlines, white space around the text taken off."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def score(task: str, prediction: str, answers: Sequence[str], *, compat: Compat | None = None) -> float:
    """Between 0 and 1. Publications print the mean times 100."""
    text = cleaned(prediction).lower()
    found = [answer.lower() in text for answer in answers]
    any_counts = TASKS[task].scoring == "any" and compat != "lm-eval"
    return float(any(found)) if any_counts else sum(found) / len(found)
