"""The language model of a kept run: its weights, and the tokenizer that it was trained with.

A run keeps its weights with `run.keep_weights: true` (see `runners/weights.py`). Its tokenizer is the field
`task.tokenizer` where that is "bytes", else the file KEY.tokenizer.json or tokenizer.json beside the weights.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mixassay import tokens
from mixassay.errors import UserError
from mixassay.model import Model
from mixassay.runners import weights
from mixassay.tokens import Tokenizer


@dataclass(frozen=True)
class Opened:
    """`about` is the header of the weights: key, cell, seed, config, source; `sha256` is of their file."""

    model: Model
    tokenizer: Tokenizer
    about: dict[str, Any]
    sha256: str


def opened(
    run: str | Path,
    results: str | Path = "results",
    tokenizer: str | Path | None = None,
    device: str = "auto",
    plugins: Sequence[str] = (),
) -> Opened:
    """`run` is a file of weights, a folder that holds one, or the start of a run's key under `results`.

    Raises `UserError` where there is no such run, or none that a tokenizer is known of.
    """
    chosen = device_of(device)
    path = found(Path(run)) if Path(run).is_dir() else weights.find(run, Path(results))
    model = weights.load(path, results, plugins)
    about = header(path)
    words = tokenizer_of(path, about) if tokenizer is None else tokens.load(tokenizer)
    return Opened(model.to(chosen), words, about, f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")


def device_of(wanted: str) -> str:
    """For "auto" the GPU if there is one. Raises `UserError` for a device that this machine does not have."""
    if wanted in ("auto", "cpu"):
        return "cuda" if wanted == "auto" and torch.cuda.is_available() else "cpu"
    if not (named := re.fullmatch(r"cuda(?::(\d+))?", wanted)):
        raise UserError(f"device should be auto, cpu, cuda or cuda:1, got {wanted}")
    there = torch.cuda.device_count()
    if int(named[1] or 0) >= there:
        raise UserError(f"device {wanted} is asked for, but this machine has {there or 'no'} GPU{'s' * (there != 1)}")
    return wanted


def found(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise UserError(f"{folder} holds {len(files)} files of weights (*.safetensors), expected one")
    return files[0]


def header(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        about: dict[str, Any] = json.loads(file.metadata()[weights.HEADER])
    return about


def tokenizer_of(path: Path, about: dict[str, Any]) -> Tokenizer:
    name = about["config"]["task"].get("tokenizer")
    if name == tokens.Bytes.identity:
        return tokens.Bytes()
    for file in (path.with_suffix(f".{tokens.FILE}"), path.with_name(tokens.FILE)):
        if file.is_file():
            return tokens.load(file)
    raise UserError(
        f"run {about['key']}: its task {about['config']['task']['name']} has tokenizer {name}, and there is no "
        f"{tokens.FILE} beside {path}: name one (tokenizer=bytes, or the path of a {tokens.FILE})"
    )
