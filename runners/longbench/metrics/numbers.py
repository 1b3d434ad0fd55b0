"""Answers that are a number: the share of all numbers in the answer that are the right one, 0 where there is none.

A number is a run of digits. A model that lists many numbers gains little by one of them being right. `count` has the
number itself as right answer, `retrieval` a paragraph's name that holds it ("Paragraph 7").
"""

import re


def count(prediction: str, answer: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    (number,) = re.findall(r"\d+", answer)
    return count(prediction, number)
