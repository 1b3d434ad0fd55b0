"""Chinese texts as words (by jieba), and which characters are punctuation in them."""

import logging
import string
from functools import cache
from typing import Any

from mixassay.runners.extras import need

_RANGES = (
    (0x2013, 0x2014),
    (0x2018, 0x2019),
    (0x201B, 0x201F),
    (0x2026, 0x2027),
    (0x3001, 0x3003),
    (0x300B, 0x3011),
    (0x3014, 0x301F),
    (0x3030, 0x3030),
    (0x303E, 0x303F),
    (0xFE4F, 0xFE4F),
    (0xFF01, 0xFF0D),
    (0xFF0F, 0xFF0F),
    (0xFF1A, 0xFF20),
    (0xFF3B, 0xFF40),
    (0xFF5B, 0xFF64),
)
PUNCTUATION = frozenset(string.punctuation) | {chr(i) for first, last in _RANGES for i in range(first, last + 1)}
"""The authors' list, first and last code points. It has the closing mark U+300B but not its opening one, U+300A."""


def words(text: str) -> list[str]:
    """The words of a text, which joined are the text."""
    return list(_jieba().cut(text))


@cache
def _jieba() -> Any:
    jieba = need("jieba", "lm", "Chinese in LongBench")
    jieba.setLogLevel(logging.WARNING)  # else it tells standard error about its dictionary
    return jieba
