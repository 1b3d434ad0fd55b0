"""What the two public generators draw alike: prompts by Python's own random numbers, in the public order of calls.

A prompt here is the result of a size and of everything drawn before it, so samples come one after another only.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from string import ascii_lowercase, ascii_uppercase
from uuid import UUID

from mixassay.errors import UserError
from mixassay.tasks.ruler import niah, variables, words
from mixassay.tasks.ruler.niah import DEPTHS, NIAH, NOISE
from mixassay.tasks.ruler.qa import shown
from mixassay.tasks.ruler.sources import Questions, Sources
from mixassay.tasks.ruler.text import Text, framed


class NoRoom(Exception):
    """The public code fails here and tries a smaller size."""


def name(kind: niah.Key | niah.Value, draw: Random, sources: Sources) -> str:
    if kind == "numbers":
        return str(draw.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(UUID(int=draw.getrandbits(128), version=4))
    return draw.choice(sources.words().pairs)


def needles(task: NIAH, n: int, draw: Random, seed: int, sources: Sources, split: Callable[[str], list[str]]) -> Text:
    """Keys and values may repeat, and the needles' order depends on the seed alone."""
    keys: list[str] = []
    values: list[list[str]] = []
    for _ in range(task.keys):
        keys.append(name(task.key, draw, sources))
        values.append([name(task.value, draw, sources) for _ in range(task.values)])
    ours = [niah.needle(task.value, key, value) for key, own in zip(keys, values, strict=True) for value in own]
    placed = list(ours)
    Random(seed).shuffle(placed)
    if task.haystack == "essay":
        prose = sources.prose().words
        parts = split(" ".join((prose * -(-n // len(prose)))[:n]))  # a text that is too short comes again
        cuts = sorted(int(len(parts) * (depth / 100)) for depth in draw.sample(DEPTHS, len(placed)))
        pieces = [" ".join(parts[a:b]) for a, b in pairwise([0, *cuts, len(parts)])]  # an empty one leaves its blank
        context = " ".join(niah.inserted(pieces, placed, list(range(1, len(pieces)))))
    else:
        hay = [NOISE] * n
        if task.haystack == "needles":
            hay = [
                niah.needle(task.value, name(task.key, draw, sources), name(task.value, draw, sources))
                for _ in range(n)
            ]
        if n < len(placed):
            raise NoRoom
        context = "\n".join(niah.inserted(hay, placed, sorted(draw.sample(range(n), len(placed)))))
    asked = draw.sample(range(task.keys), task.queries)
    answers = tuple(value for k in asked for value in values[k])
    hidden = [niah.needle(task.value, keys[k], value) for k in asked for value in values[k]]
    return niah.question(task, context, [keys[k] for k in asked], answers, hidden)


def chain(n: int, hops: int, letters: int, value: str, draw: Random) -> Text:
    """One chain of variables among n noise lines."""
    names = variable_names(hops + 1, letters, draw)
    return variables.chained(names, value, n, sorted(draw.sample(range(n), hops + 1)))


def variable_names(n: int, letters: int, draw: Random) -> list[str]:
    """Raises UserError where a name comes twice (once in 1,800 draws of three letters): the public code fails there."""
    names = [joined(ascii_uppercase, letters, draw) for _ in range(n)]
    if len(set(names)) < n:
        raise UserError(
            "ruler: vt has a variable's name twice with this seed, where the public code fails; take another"
        )
    return names


def joined(alphabet: str, size: int, draw: Random) -> str:
    return "".join(draw.choices(alphabet, k=size))


def listed(
    pool: list[str], n: int, common: int, other: int, draw: Random, order: Random
) -> tuple[list[str], list[str]]:
    """(a list of n different words, the ten common ones among them)."""
    if n > len(pool):
        raise UserError(
            f"ruler: cwe needs {n} different words, more than the {len(pool)} that RULER takes from wonderwords"
        )
    chosen = draw.sample(pool, n)
    body = chosen[:10] * common + chosen[10:] * other
    order.shuffle(body)
    return body, chosen[:10]


def questioned(number: int, n: int, source: Questions, draw: Random, seed: int) -> Text:
    """Question `number` over n documents, again and again the same ones where there are fewer.

    Raises NoRoom where its own documents are more than n.
    """
    if number >= len(source.questions):
        raise UserError(f"ruler: {source.name} has {len(source.questions)} questions, not {number + 1}")
    question, count = source.questions[number], len(source.documents)
    needed, near = list(question.needed), list(question.near)
    if n >= count:
        chosen = [i % count for i in range(n)]
    elif n - len(needed) > len(near):
        taken = {*needed, *near}
        others = [i for i in range(count) if i not in taken]
        chosen = needed + near + draw.sample(others, max(0, n - len(needed) - len(near)))
    elif n < len(needed):
        raise NoRoom
    else:
        chosen = needed + draw.sample(near, n - len(needed))
    Random(seed).shuffle(chosen)
    return shown(question, chosen, source.documents)


def frequent(
    limit: int, ranks: int, step: int, tokens: Callable[[Text], int], draw: Random, seed: int
) -> Iterator[tuple[Text, int]]:
    """(text, its nominal words) without end. Ranks 4 and 5 may tie; the order depends on the seed and the size alone.

    The size grows by `step` to just under `limit` tokens; a longer sample shrinks by `step` and keeps its words.
    """

    def text(vocabulary: list[str], size: int) -> Text:
        counts = words.frequencies(size, ranks)
        body = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
        Random(seed).shuffle(body)
        answers = tuple(vocabulary[1:4])
        return framed(words.FWE_OPENING, " ".join(body), words.FWE_QUESTION, words.FWE_PREFIX, answers, [])

    vocabulary, size = coded(ranks, draw, seed), limit // 6
    while tokens(text(vocabulary, size)) < limit:
        size = counted(size + step, limit)
    while True:
        vocabulary, used = coded(ranks, draw, seed), size - step
        while tokens(text(vocabulary, used)) > limit:
            used -= step
            if used <= 0:
                raise UserError(f"ruler: fwe does not fit {limit} tokens, and the public code never ends here")
        yield text(vocabulary, used), used


def counted(size: int, limit: int) -> int:
    """`size`, unless prompts of so many words or lines should long have been over the limit."""
    if size > 16 * limit:
        raise UserError("ruler: this tokenizer counts almost nothing; has it a vocabulary?")
    return size


def coded(ranks: int, draw: Random, seed: int) -> list[str]:
    drawn = [joined(ascii_lowercase, 6, draw) for _ in range(ranks)]
    while len(set(drawn)) < ranks:
        drawn.append(joined(ascii_lowercase, 6, draw))
    vocabulary = sorted(set(drawn))
    Random(seed).shuffle(vocabulary)
    return ["...", *vocabulary[1:]]
