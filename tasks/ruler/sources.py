"""Texts and words that prompts are made of: what ships with the package, and local files named by path.

Every source carries the sha256 of its bytes, which enters a sample set's address. Nothing is fetched.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar

from mixassay.errors import UserError

T = TypeVar("T")

DATA = Path(__file__).parent / "data"
TEXTS = ("on_liberty", "moby_dick")

TITLES = {"Mr.", "Mrs.", "Ms.", "Dr.", "St.", "Rev.", "Hon.", "Capt.", "Prof.", "Esq.", "Messrs."}
ABBREVIATIONS = TITLES | {"e.g.", "i.e.", "viz.", "cf.", "vol.", "p.", "pp."}
_STOP = re.compile(r"""[.!?]["'”’)\]_]*$""")
_OPENING = re.compile(r"""["'“‘(\[_]*[A-Z0-9]""")
_INITIAL = re.compile(r"""["'“‘(\[_]*[A-Z]\.$""")


@dataclass(frozen=True)
class Source:
    """The bytes of a file and their sha256."""

    name: str
    data: bytes = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@cache
def read(path: Path) -> Source:
    """Raises UserError where there is no such file."""
    if not path.is_file():
        raise UserError(f"ruler: no source file {path}")
    return Source(path.name, path.read_bytes())


# --- prose


def sentence_ends(words: Sequence[str]) -> list[int]:
    """Numbers of words after which a sentence ends, ascending; the text's own end is not among them.

    A word ends one if it ends in . ! or ?, is no abbreviation or initial, and the next word may open a sentence.
    """
    ends = []
    for i in range(len(words) - 1):
        word = words[i]
        if (
            _STOP.search(word)
            and word not in ABBREVIATIONS
            and not _INITIAL.match(word)
            and _OPENING.match(words[i + 1])
        ):
            ends.append(i + 1)
    return ends


def sentences(text: str) -> list[str]:
    """The text cut by `sentence_ends`, white space as single spaces."""
    words = text.split()
    cuts = [0, *sentence_ends(words), len(words)]
    return [" ".join(words[a:b]) for a, b in pairwise(cuts) if a < b]


class Prose:
    """Words of running text, and where its sentences end."""

    def __init__(self, *sources: Source) -> None:
        self.name = "+".join(source.name for source in sources)
        self.sha256 = sources[0].sha256 if len(sources) == 1 else _join(source.sha256 for source in sources)
        self.words = [word for source in sources for word in _text(source).split()]
        self.ends = sentence_ends(self.words)


def _text(source: Source) -> str:
    """Plain text, or JSON with a key "text" (the layout of RULER's PaulGrahamEssays.json)."""
    text = source.data.decode()
    return (
        str(_json(source, "an object with the key text", lambda x: x["text"]))
        if source.name.endswith(".json")
        else text
    )


# --- words


class Words:
    """RULER's words: nouns, adjectives and verbs of wonderwords 3.0.1."""

    def __init__(self) -> None:
        kinds = [read(DATA / f"{kind}.txt") for kind in ("nouns", "adjectives", "verbs")]
        self.sha256 = _join(kind.sha256 for kind in kinds)
        nouns, adjectives, verbs = (kind.data.decode().splitlines() for kind in kinds)
        self.all = sorted({*nouns, *adjectives, *verbs})
        self.pairs = Pairs(adjectives, nouns)


class Pairs:
    """Every adjective-noun, sorted and without repeats: six million strings, which are not stored.

    Strings that begin with different adjectives are in the order of these, unless one adjective and its hyphen begin
    another ("blue-", "blue-eyed-"). Such adjectives, ten in all, form groups, and only these are written out.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._groups: list[list[str]] = []
        for head in sorted({f"{adjective}-" for adjective in adjectives}):
            if self._groups and head.startswith(self._groups[-1][0]):
                self._groups[-1].append(head)
            else:
                self._groups.append([head])
        self._written = {
            at: sorted({head + noun for head in group for noun in self._nouns})
            for at, group in enumerate(self._groups)
            if len(group) > 1
        }
        sizes = (len(self._written.get(at, self._nouns)) for at in range(len(self._groups)))
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, k: int) -> str:
        if not 0 <= k < len(self):
            raise IndexError(k)
        at = bisect_right(self._starts, k) - 1
        rest = k - self._starts[at]
        return self._written[at][rest] if at in self._written else self._groups[at][0] + self._nouns[rest]


# --- questions


@dataclass(frozen=True)
class Question:
    """text, accepted answers, and numbers of documents: `needed` must be in the prompt, `gold` of them hold the answer,
    `near` (of the same article) go in before any others."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    name: str
    sha256: str
    questions: list[Question] = field(repr=False)
    documents: list[str] = field(repr=False)


def squad(source: Source) -> Questions:
    """The layout of SQuAD 1.1 or 2.0, whose unanswerable questions are left out."""

    def parse(data: Any) -> Questions:
        documents = sorted({p["context"] for article in data["data"] for p in article["paragraphs"]})
        number = {document: i for i, document in enumerate(documents)}
        questions = []
        for article in data["data"]:
            here = [number[p["context"]] for p in article["paragraphs"]]
            for p in article["paragraphs"]:
                gold = number[p["context"]]
                near = tuple(i for i in here if i != gold)
                for qa in p["qas"]:
                    if not qa.get("is_impossible", False):
                        answers = tuple(answer["text"] for answer in qa["answers"])
                        questions.append(Question(qa["question"], answers, (gold,), (gold,), near))
        return Questions(source.name, source.sha256, questions, documents)

    return _json(source, "SQuAD's layout (data, paragraphs, context, qas)", parse)


def hotpotqa(source: Source) -> Questions:
    """The layout of HotpotQA's distractor setting: ten documents a question, of which the supporting ones are gold."""

    def parse(data: Any) -> Questions:
        texts = [[f"{title}\n{''.join(lines)}" for title, lines in item["context"]] for item in data]
        documents = sorted({document for own in texts for document in own})
        number = {document: i for i, document in enumerate(documents)}
        questions = []
        for item, own in zip(data, texts, strict=True):
            supporting = {title for title, _ in item.get("supporting_facts", [])}
            needed = tuple(number[document] for document in own)
            titles = [title for title, _ in item["context"]]
            gold = tuple(i for i, title in zip(needed, titles, strict=True) if title in supporting) or needed
            questions.append(Question(item["question"], (item["answer"],), gold, needed))
        return Questions(source.name, source.sha256, questions, documents)

    return _json(source, "HotpotQA's distractor layout (question, answer, context)", parse)


def _json(source: Source, layout: str, parse: Callable[[Any], T]) -> T:
    try:
        return parse(json.loads(source.data))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"ruler: {source.name} must be JSON in {layout}; found {error!r}") from None


def _join(hashes: Iterable[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


# --- what a sample set is made from


@dataclass(frozen=True)
class Sources:
    """essay: names of shipped texts or paths of own ones (.txt, or .json with a key "text"), one after the other.
    squad, hotpotqa: paths of the question files of qa_1 and qa_2, which are not shipped (CC BY-SA 4.0)."""

    essay: tuple[str | Path, ...] = TEXTS
    squad: str | Path | None = None
    hotpotqa: str | Path | None = None

    def prose(self) -> Prose:
        return _prose(tuple(DATA / f"{text}.txt" if text in TEXTS else Path(text) for text in self.essay))

    def words(self) -> Words:
        return _words()

    def questions(self, data: str) -> Questions:
        """`data` is "squad" or "hotpotqa"."""
        path = self.squad if data == "squad" else self.hotpotqa
        if path is None:
            file = {"squad": "dev-v2.0.json (SQuAD)", "hotpotqa": "hotpot_dev_distractor_v1.json (HotpotQA)"}[data]
            raise UserError(
                f"ruler: this task asks the questions of {file}, which is not shipped: give its path as {data}"
            )
        return _questions(data, Path(path))


SHIPPED = Sources()
"""Without question files."""


@cache
def _prose(paths: tuple[Path, ...]) -> Prose:
    return Prose(*map(read, paths))


@cache
def _words() -> Words:
    return Words()


@cache
def _questions(data: str, path: Path) -> Questions:
    return (squad if data == "squad" else hotpotqa)(read(path))
