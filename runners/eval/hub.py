"""Models of the Hugging Face library, through lm-eval's own adapter: `hf:PATH` is a folder with config.json,
model.safetensors and tokenizer.json. Needs the packages transformers and accelerate."""

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixassay import tokens
from mixassay.errors import UserError
from mixassay.runners.eval.engine import quiet


@dataclass(frozen=True)
class Read:
    """The tokenizer as lm-eval's adapter uses it, special tokens included."""

    lm: Any
    identity: str
    special: int = 0

    @property
    def vocab_size(self) -> int:
        return len(self.lm.tokenizer)

    @property
    def end(self) -> int:
        return int(self.lm.eot_token_id)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.lm.tok_encode(text)
        return ids

    def decode(self, ids: Sequence[int], /) -> str:
        text: str = self.lm.tok_decode(list(ids))
        return text

    def count(self, text: str) -> int:
        return len(self.encode(text))


def opened(path: str, device: str, batch: int, dtype: str, longest: int | None) -> tuple[Any, Read]:
    """lm-eval's model and its tokenizer. Raises `UserError` where there is no model, or packages are missing."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise UserError(f"hf:{path}: no {folder / 'config.json'}; give a folder that save_pretrained has written")
    if not (folder / tokens.FILE).is_file():
        raise UserError(f"hf:{path}: no {folder / tokens.FILE}; save the model's fast tokenizer there")
    try:
        with quiet():
            huggingface = importlib.import_module("lm_eval.models.huggingface")
    except ImportError as problem:
        raise UserError(
            f"hf: models need lm-eval, transformers and accelerate ({problem}): "
            "pip install 'mixassay[lm]' transformers accelerate"
        ) from problem
    with quiet():
        lm = huggingface.HFLM(pretrained=path, device=device, batch_size=batch, dtype=dtype, max_length=longest)
    return lm, Read(lm, "sha256:" + hashlib.sha256((folder / tokens.FILE).read_bytes()).hexdigest())


def weights(path: str) -> str:
    """One hash over all files of weights."""
    sha = hashlib.sha256()
    for file in sorted(Path(path).glob("*.safetensors")):
        with open(file, "rb") as data:
            while part := data.read(1 << 24):
                sha.update(part)
    return f"sha256:{sha.hexdigest()}"
