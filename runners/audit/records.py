"""Records of audits: one line of JSON for each stream and policy. Nothing here imports torch."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError

from mixassay.errors import UserError
from mixassay.record import Code, Number, Part
from mixassay.spec import Args

VERSION: Final = 1
"""Schema of a stored line."""


class AuditRecord(Part):
    """`metrics`: name -> the number of each seed, in their order; None where there is none (see `measure.py`), and
    slots in use, gap to the least bound in as many blocks (both means over prefixes), boundaries raised, and precision,
    recall and f1 of the boundaries that are left at the end."""

    v: Literal[1] = VERSION
    audit: str
    stream: str
    policy: str
    config: Args
    tau: float | None
    seeds: tuple[int, ...]
    metrics: dict[str, tuple[Number, ...]]
    state_bytes: int  # of the most slots that were ever in use, K V numbers in float32 each
    code: Code
    env: dict[str, str | int | bool | None]
    data: str
    start: str  # UTC, ISO 8601
    seconds: float

    def values(self, metric: str) -> list[float]:
        return [value for value in self.metrics[metric] if value is not None]


def write(path: Path, records: Iterable[AuditRecord]) -> None:
    """Replace the file: an audit is run as a whole, and gives the same numbers again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_bytes(b"".join(record.model_dump_json().encode() + b"\n" for record in records))
        os.replace(draft, path)
    except OSError as problem:
        raise UserError(f"cannot write {path}: {problem.strerror}") from problem


def read(path: Path) -> list[AuditRecord]:
    """The records of a file. Raises `UserError` with the line that holds none."""
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from problem
    for number, line in enumerate(lines, start=1):
        try:
            found.append(AuditRecord.model_validate_json(line))
        except ValidationError as problem:
            said = problem.errors(include_url=False)[0]["msg"]
            raise UserError(f"{path}:{number}: not a record of an audit (schema {VERSION}): {said}") from None
    return found
