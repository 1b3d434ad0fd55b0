"""The class of a question: which of the class names an answer mentions.

    score = 1 / (number of class names found in the answer) if the true one is among them, else 0

Of the names found, those that are part of the true one are not counted ("Other" when "Other location" is right). The
authors drop them from the list that they walk through, which passes over the name after each dropped one; published
scores were made so, and so are ours.
"""

from collections.abc import Sequence


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    found = [name for name in classes if name in prediction]
    at = 0
    while at < len(found):
        if found[at] in answer and found[at] != answer:
            del found[at]
        at += 1  # after a deletion too: see above
    return 1 / len(found) if answer in found else 0.0
