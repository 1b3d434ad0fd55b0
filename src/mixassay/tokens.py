"""Tokenizers: from a text to ids and back, for language models, their evaluation and RULER samples.

bytes                one id a byte of UTF-8, and 256 for the end of a text
a tokenizer.json     any fast tokenizer of Hugging Face, read by the package `tokenizers`
"""

import hashlib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mixassay.errors import UserError

FILE = "tokenizer.json"
ENDS = ("<|endoftext|>", "<|eot|>", "<|end_of_text|>", "</s>", "<eos>")
"""What tokenizers call the end of a text; the file itself does not say which of its tokens it is."""


class Counter(Protocol):
    """What making a prompt of a given length asks of a tokenizer."""

    @property
    def identity(self) -> str:
        """Equal for equal tokenizers, whatever the path."""
        ...

    @property
    def special(self) -> int:
        """Tokens that the model puts around every prompt (e.g. 1 for a token that begins the sequence)."""
        ...

    def count(self, text: str) -> int:
        """Tokens of the text, special ones left out."""
        ...


class Tokenizer(Counter, Protocol):
    """What a language model asks of it, too. Ids are 0 .. vocab_size - 1."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int:
        """The id of the end of a text, which also stands before the first token and fills rows."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text, none added."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of the ids, special ones left out; what is no UTF-8 becomes U+FFFD."""
        ...


class Bytes:
    """One id a byte of UTF-8; 256 ends a text."""

    identity = "bytes"
    special = 0
    vocab_size = 257
    end = 256

    def count(self, text: str) -> int:
        return len(text.encode())

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], /) -> str:
        """Ids from 256 on have no text."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HuggingFace:
    """A `tokenizer.json` (or the folder that holds one); no network.

    Raises UserError where the package `tokenizers` or the file is missing.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise UserError(f"no tokenizer at {file}; give a {FILE} or the folder that holds one")
        try:
            library: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError:
            raise UserError(f'{file} needs the package tokenizers: pip install "mixassay[ruler]"') from None
        self._file = file
        self._tokenizer = library.Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()  # some files cut at the model's length and would report it for any text
        self._tokenizer.no_padding()
        self.identity = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
        self.special: int = self._tokenizer.num_special_tokens_to_add(False)
        self.vocab_size: int = self._tokenizer.get_vocab_size()

    @property
    def end(self) -> int:
        """Raises UserError where no token of the file has a name in ENDS."""
        ids = [self._tokenizer.token_to_id(name) for name in ENDS]
        found = next((i for i in ids if i is not None), None)
        if found is None:
            raise UserError(f"{self._file} names no token for the end of a text: expected one of {', '.join(ENDS)}")
        return int(found)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], /) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def load(name: str | Path) -> Tokenizer:
    """The word "bytes", or the path of a tokenizer.json or of its folder."""
    return Bytes() if str(name) == Bytes.identity else HuggingFace(name)
