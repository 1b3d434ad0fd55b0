"""Scores of predictions that were kept in files, as the authors' code writes them.

A folder holds NAME.jsonl for each set, a line for each row: {"pred", "answers", "all_classes", "length"}; beside them,
`result.json` may hold the scores that were published with them: NAME -> points, or NAME -> range of lengths -> points.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mixassay.errors import UserError
from mixassay.runners.longbench.metrics.code import EditDistance
from mixassay.runners.longbench.score import Answered, Score, score, score_by_length
from mixassay.runners.longbench.sets import SETS


class Rescored(NamedTuple):
    """`bin`: the range of lengths, None for a whole set. `published`: what result.json says, where it does."""

    score: Score
    bin: str | None
    published: float | None


def rescore(folder: Path, *, by_length: bool = False, edit_distance: EditDistance = "difflib") -> Iterator[Rescored]:
    """Each set in the folder, in the authors' order; files with other names are passed over.

    Raises `UserError` where there is none, and for files that cannot be read.
    """
    files = {name: folder / f"{name}.jsonl" for name in SETS if (folder / f"{name}.jsonl").is_file()}
    if not files:
        raise UserError(f"{folder} holds no predictions: expected files such as qasper.jsonl")
    said = _published(folder / "result.json")
    for name, path in files.items():
        answered = predictions(path)
        known = said.get(name)
        if not by_length:
            published = known if isinstance(known, (int, float)) else None
            yield Rescored(score(name, answered, edit_distance=edit_distance), None, published)
            continue
        if any(row.length is None for row in answered):
            raise UserError(f'{path}: scores by length need the field "length" in each line')
        for bin, part in score_by_length(name, answered, edit_distance=edit_distance).items():
            yield Rescored(part, bin, known.get(bin) if isinstance(known, dict) else None)


def predictions(path: Path) -> list[Answered]:
    """The rows of one file, at least one."""
    rows = []
    for at, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            row = Answered(raw["pred"], raw["answers"], raw.get("all_classes") or (), raw.get("length"))
        except (json.JSONDecodeError, KeyError, TypeError) as problem:
            raise UserError(
                f'{path}:{at}: expected {{"pred": text, "answers": [text, ...], ...}}, found {line[:60]}'
            ) from problem
        if not isinstance(row.prediction, str) or not isinstance(row.answers, list) or not row.answers:
            raise UserError(f'{path}:{at}: "pred" must be a text and "answers" a list of texts that is not empty')
        rows.append(row)
    if not rows:
        raise UserError(f"{path} is empty")
    return rows


def _published(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as problem:
        raise UserError(f"{path}: not JSON: {problem}") from problem
    if not isinstance(said, dict):
        raise UserError(f"{path}: expected an object of scores by set")
    return said
