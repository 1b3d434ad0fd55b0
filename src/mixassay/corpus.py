"""Local text for language models: files and folders by name, the hash of what they hold, and what of it is held out.

Of every file the last part is held out: a share for validation, and behind it as much for tests. Nothing here imports
torch, so a run's record knows its text and its tokenizer before any worker has started.
"""

import hashlib
import importlib
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from mixassay import tokens
from mixassay.errors import UserError
from mixassay.spec import Args, TaskSpec, task_cells

VERSION = 1
"""Raised whenever the same files give another split, or another BPE."""

BPE = "bpe-"
"""`bpe-4096` is a BPE of 4096 words, built from the training part of the text."""

SHIPPED = ("moby_dick", "on_liberty")
"""Texts that come with the package, for RULER's haystacks: these begin with On Liberty."""

DATA = Path(__file__).parent / "tasks" / "ruler" / "data"

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Corpus:
    """The texts of some files, in order. `sha256` is of their bytes; names decide nothing."""

    names: tuple[str, ...]
    texts: tuple[str, ...] = field(repr=False)
    held_out: float

    @cached_property
    def sha256(self) -> str:
        each = (hashlib.sha256(text.encode()).hexdigest() for text in self.texts)
        return hashlib.sha256("".join(each).encode()).hexdigest()

    def part(self, split: Split) -> list[str]:
        """Of every file its part of the split, cut behind the end of a line where there is one."""
        return [text[slice(*self._cuts(text)[split])] for text in self.texts]

    def _cuts(self, text: str) -> dict[Split, tuple[int, int]]:
        n = len(text)
        a, b = (
            text.find("\n", at) + 1 or at for at in (int(n * (1 - 2 * self.held_out)), int(n * (1 - self.held_out)))
        )
        return {"train": (0, a), "valid": (a, b), "test": (b, n)}


@cache
def read(files: tuple[str, ...], held_out: float) -> Corpus:
    """Files as named, of folders all .txt below, by name, and shipped texts. Raises `UserError` for what is not there,
    or no UTF-8."""
    paths: list[Path] = []
    for name in files:
        path = DATA / f"{name}.txt" if name in SHIPPED else Path(name)
        below = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not below:
            raise UserError(f"the folder {name} holds no .txt file")
        paths += below
    texts = []
    for path in paths:
        try:
            texts.append(path.read_bytes().decode())
        except OSError as problem:
            raise UserError(f"cannot read {path}: {problem.strerror}") from problem
        except UnicodeDecodeError as problem:
            raise UserError(f"{path} is no UTF-8 (byte {problem.start})") from problem
    if not any(texts):
        raise UserError(f"no text in {', '.join(files)}")
    return Corpus(tuple(path.name for path in paths), tuple(texts), held_out)


@cache
def tokenizer(name: str, files: tuple[str, ...], held_out: float) -> tokens.Tokenizer:
    """`bytes`, the path of a tokenizer.json, or `bpe-N` for one that is built from the files."""
    return tokens.load(built(read(files, held_out), name) if name.startswith(BPE) else name)


def built(corpus: Corpus, name: str) -> Path:
    """The file of `bpe-N`, made now unless it was made before: in the user's cache, by what it is made of."""
    size = name.removeprefix(BPE)
    if not size.isdigit() or not 257 < int(size) <= 2**16:
        raise UserError(f"tokenizer {name} should be bpe-N with N from 258 to 65536, such as bpe-4096")
    library = _library(name)
    recipe = json.dumps(["bpe", VERSION, int(size), corpus.held_out, corpus.sha256, library.__version__])
    file = cache_folder() / hashlib.sha256(recipe.encode()).hexdigest()[:16] / tokens.FILE
    if not file.is_file():
        _write(file, bpe(corpus.part("train"), int(size)))
    return file


def bpe(texts: Sequence[str], size: int) -> str:
    """A tokenizer.json of `size` words over the bytes of the texts (Sennrich et al. 2016), every digit a word of its
    own, and the end of a text the first: the same for the same texts."""
    library = _library(f"{BPE}{size}")
    models, trainers, pre, decoders = (
        importlib.import_module(f"tokenizers.{part}") for part in ("models", "trainers", "pre_tokenizers", "decoders")
    )
    made: Any = library.Tokenizer(models.BPE())
    made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[tokens.ENDS[0]],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = itertools.chain.from_iterable(text.splitlines(keepends=True) for text in texts)
    made.train_from_iterator(lines, trainer)
    if made.get_vocab_size() != size:
        raise UserError(f"the text is too small for {BPE}{size}: it gives {made.get_vocab_size()} words")
    return str(made.to_str())


def described(task: TaskSpec) -> str:
    """What of a task's data its configuration does not tell: hashes of the text and the tokenizer; "" without text."""
    if not text(task):
        return ""
    found: set[tuple[str, str]] = set()
    for args, _, _ in [*task_cells(task, "train"), *task_cells(task, "eval")]:
        files, held_out = tuple(args["files"]), args.get("held_out", HELD_OUT)
        words = tokenizer(args["tokenizer"], files, held_out)
        found.add((read(files, held_out).sha256[:16], words.identity[:23]))
    return " ".join(f"text:{text} tokenizer:{words}" for text, words in sorted(found))


def text(task: TaskSpec) -> bool:
    """Whether a task reads local text: it has `files` and a `tokenizer`, and mixassay must know them before it runs."""
    return named(task.args)


def named(args: Args) -> bool:
    """Whether files and a tokenizer are named, in the only form that will be accepted."""
    return isinstance(args.get("files"), list | tuple) and isinstance(args.get("tokenizer"), str)


def tokenizer_file(task: TaskSpec) -> Path | None:
    """The tokenizer.json of a task of text, None where it needs no file."""
    if not text(task) or task.args["tokenizer"] == tokens.Bytes.identity:
        return None
    name = task.args["tokenizer"]
    if name.startswith(BPE):
        return built(read(tuple(task.args["files"]), task.args.get("held_out", HELD_OUT)), name)
    return Path(name) / tokens.FILE if Path(name).is_dir() else Path(name)


HELD_OUT = 0.05
"""Share of every file that is kept for validation, and as much for tests, unless a task says otherwise."""


def cache_folder() -> Path:
    """Where built tokenizers are kept: they can be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mixassay" / "tokenizers"


def _library(name: str) -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise UserError(f'{name} needs the package tokenizers: pip install "mixassay[ruler]"') from None


def _write(file: Path, text: str) -> None:
    """Whole or not at all: several workers may build the same."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as out:
            out.write(text)
        os.replace(out.name, file)
    except OSError as problem:
        raise UserError(f"cannot write to {file.parent}: {problem.strerror}") from problem
