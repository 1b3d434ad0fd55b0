"""Records of the benchmarks: JSON lines that are appended as they are measured, and read back. No torch here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mixassay.errors import UserError

SCHEMA = 1
"""Of the records of `bench kernels`, `decode` and `train`. Raise it when an old line no longer reads as it is."""

Record = dict[str, Any]

PASSES = ("forward", "forward_backward")
"""The two times of an operator. The second is with the gradients of all inputs."""


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One line, written at once: a run that is killed leaves whole lines, or at worst half of its last."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.is_file() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        with open(path, "a") as file:
            file.write(("\n" if torn else "") + json.dumps(record, allow_nan=False) + "\n")
    except OSError as problem:
        raise UserError(f"cannot write to {path}: {problem.strerror}") from problem


def read(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a file, oldest first, and a warning for each line that holds none."""
    try:
        lines = path.read_text().splitlines()
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from problem
    records, warnings = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.get("bench") not in ("data", "kernels", "decode", "train"):
            warnings.append(f"{path}:{number}: no record of a benchmark, skipped")
        elif record.get("schema", SCHEMA) > SCHEMA:
            raise UserError(f"{path}:{number}: written by a newer mixassay (schema {record['schema']}); upgrade")
        else:
            records.append(record)
    return records, warnings
