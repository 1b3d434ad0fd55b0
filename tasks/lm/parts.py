"""A sample is pieces of text, and of each it is known what it is to a reader."""

from enum import IntEnum


class Part(IntEnum):
    """told: cannot be known before. asked: repeats what was told, and says what of it is wanted. answer: follows."""

    TOLD = 0
    ASKED = 1
    ANSWER = 2


Piece = tuple[str, Part]
