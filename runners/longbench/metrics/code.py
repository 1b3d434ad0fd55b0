"""The next line of code: how alike are the answer's first line of code and the right one?

    score = round(100 similarity) / 100

The first line that holds no `, # or // counts, leading newlines skipped; an answer without one is "". The similarity
has two definitions in use, of which the published number depends by up to two and a half points:

    difflib      2 M / (|a| + |b|), M the characters in matching blocks as Python's difflib finds them: what the
                 authors' package fuzzywuzzy does by itself
    levenshtein  1 - d / (|a| + |b|), d the least number of insertions and deletions: what fuzzywuzzy does where
                 python-Levenshtein is installed; here by rapidfuzz
"""

from difflib import SequenceMatcher
from typing import Literal

from mixassay.runners.extras import need

EditDistance = Literal["difflib", "levenshtein"]


def code(prediction: str, answer: str, edit_distance: EditDistance) -> float:
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if edit_distance == "difflib":
        return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100
    return round(float(need("rapidfuzz.fuzz", "lm", "the edit distance levenshtein").ratio(line, answer))) / 100
