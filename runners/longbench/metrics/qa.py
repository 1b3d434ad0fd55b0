"""Answers as bags of words: F1 of the words that prediction and answer share.

With bags p of the prediction and a of the answer, and |p ∩ a| counting repeats:

    precision = |p ∩ a| / |p|    recall = |p ∩ a| / |a|    F1 = 2 precision recall / (precision + recall)

English: lower case, ASCII punctuation dropped, then the words a, an and the; split at white space. Chinese: the words
of jieba, each in lower case, without punctuation and white space; empty ones dropped.
"""

import re
import string
from collections import Counter

from mixassay.runners.longbench.metrics import chinese

_DROPPED = str.maketrans("", "", string.punctuation)  # of ASCII only: typographic quotes and dashes stay


def qa_f1(prediction: str, answer: str) -> float:
    return f1(english_bag(prediction), english_bag(answer))


def qa_f1_zh(prediction: str, answer: str) -> float:
    return f1(chinese_bag(prediction), chinese_bag(answer))


def f1(predicted: list[str], answer: list[str]) -> float:
    """F1 of two bags of words; 0 where they share none."""
    shared = (Counter(predicted) & Counter(answer)).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


def english_bag(text: str) -> list[str]:
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_DROPPED)).split()


def chinese_bag(text: str) -> list[str]:
    kept = ("".join(c for c in w.lower() if not (c.isspace() or c in chinese.PUNCTUATION)) for w in chinese.words(text))
    return [word for word in kept if word]
