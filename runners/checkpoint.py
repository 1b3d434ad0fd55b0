"""A stack's state on disk: exact, atomic, and only ever the newest.

`state.json` names the tensor file that belongs to it and is replaced in one rename, so a reader sees either the old
pair or the new one, whenever the writer dies.
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


def save(folder: Path, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """`state` is JSON data (floats survive exactly); tensors are written as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{state['step']}.safetensors"
    write(folder / name, tensors)
    partial = folder / "state.json.partial"
    with open(partial, "w") as file:
        json.dump(state | {"tensors": name}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / "state.json")
    for old in folder.glob("step-*"):
        if old.name != name:
            old.unlink()


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that is there whole, on the disk, or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial, metadata)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The newest state and its tensors (on the CPU), or None where there is none. One that cannot be read (a disk lost
    it, a copy was cut short) costs time and no number: training begins again, and standard error says so."""
    if not (folder / "state.json").exists():
        return None
    try:
        state = json.loads((folder / "state.json").read_text())
        return state, load_file(folder / state["tensors"])
    except (ValueError, KeyError, TypeError, FileNotFoundError, SafetensorError) as problem:
        print(f"checkpoint {folder} is damaged ({problem}); training begins at its first step", file=sys.stderr)
        return None


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
