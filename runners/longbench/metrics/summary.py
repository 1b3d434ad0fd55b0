"""Summaries: ROUGE-L (Lin 2004, summary level) as the package `rouge` counts it, F with equal weights.

Texts are split into sentences at full stops and these into words at white space; a Chinese text is first written with
spaces between the words of jieba. With L the distinct words that stand in a longest common subsequence of one sentence
of the answer and one of the prediction, any two of them, and p and a the distinct words of prediction and answer:

    precision = |L| / |p|    recall = |L| / |a|    F = 2 precision recall / (precision + recall + 1e-8)

A text without a sentence, such as an empty one, scores 0. Of several longest common subsequences the package takes one,
which decides what is in L; `common_words` takes the same. The package itself needs a table of Python objects for each
two sentences, and recurses once a word, so that the authors score 0 where Python's limit ends that; here nothing does.
"""

from mixassay.runners.longbench.metrics import chinese

PACKAGE = "1.0.1"
"""The release of `rouge` whose scores these are."""


def rouge(prediction: str, answer: str) -> float:
    predicted, right = sentences(prediction), sentences(answer)
    if not predicted or not right:
        return 0.0
    shared: set[str] = set()
    for wanted in right:
        for said in predicted:
            if not shared.issuperset(set(wanted).intersection(said)):
                shared |= common_words(wanted, said)
    precision = len(shared) / len({word for said in predicted for word in said})
    recall = len(shared) / len({word for wanted in right for word in wanted})
    return 2 * (precision * recall / (precision + recall + 1e-8))


def rouge_zh(prediction: str, answer: str) -> float:
    return rouge(" ".join(chinese.words(prediction)), " ".join(chinese.words(answer)))


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence. One of white space alone has a single empty word, as in the package."""
    return [part.split() or [""] for part in text.split(".") if part]


def common_words(x: list[str], y: list[str]) -> set[str]:
    """The words of a longest common subsequence: that which is found from the ends, where a word of y is passed over
    before one of x.

    Row i of the table of lengths is a number of len(y) bits. Bit j is 0 where the longest common subsequence of the
    first i words of x with j + 1 words of y is longer than with j (Hyyrö 2004).
    """
    places: dict[str, int] = {}
    for j, word in enumerate(y):
        places[word] = places.get(word, 0) | 1 << j
    full = (1 << len(y)) - 1
    rows = [full]
    for word in x:
        row = rows[-1]
        met = row & places.get(word, 0)
        rows.append((row + met | row - met) & full)
    found, i, j = set(), len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            found.add(x[i - 1])
            i, j = i - 1, j - 1
        elif rows[i] >> j - 1 & 1:
            j -= 1
        else:
            i -= 1
    return found
