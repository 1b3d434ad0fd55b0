"""What the generator asks of a tokenizer: how many tokens a text has. It never decodes."""

import hashlib
import importlib
from pathlib import Path
from typing import Any, Protocol

from mixassay.errors import UserError


class Tokenizer(Protocol):
    """The evaluated model's tokenizer: "length" means its tokens."""

    @property
    def identity(self) -> str:
        """Equal for equal tokenizers, whatever the path: part of a sample's content address."""
        ...

    @property
    def special(self) -> int:
        """Tokens that the model puts around every prompt (e.g. 1 for a token that begins the sequence)."""
        ...

    def count(self, text: str) -> int:
        """Tokens of the text, special ones left out."""
        ...


class Bytes:
    """One token a byte of UTF-8."""

    identity = "bytes"
    special = 0

    def count(self, text: str) -> int:
        return len(text.encode())


class HuggingFace:
    """A `tokenizer.json` (or the folder that holds one), read by the optional package `tokenizers`; no network.

    Raises UserError where the package or the file is missing.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise UserError(f"ruler: no tokenizer at {file}; give a tokenizer.json or the folder that holds one")
        try:
            library: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError:
            raise UserError(f'ruler: {file} needs the package tokenizers: pip install "mixassay[ruler]"') from None
        self._tokenizer = library.Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()  # some files cut at the model's length and would report it for any text
        self._tokenizer.no_padding()
        self.identity = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
        self.special: int = self._tokenizer.num_special_tokens_to_add(False)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))
