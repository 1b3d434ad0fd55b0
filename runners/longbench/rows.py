"""The rows of a LongBench v1 set, read by the library `datasets` from a file, a folder or a hub.

Two layouts are in use: the authors' names the question `input`, the parquet mirror's on the hub `question`. (The
authors' own place on the hub, THUDM/LongBench, is a loading script, which `datasets` no longer runs.)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.runners.extras import need
from mixassay.runners.longbench.sets import find

HUB = "Xnhyacinth/LongBench"
"""The mirror that lm-eval reads, too."""


@dataclass(frozen=True)
class Row:
    """One question. `length` counts words (Chinese: characters), as the authors did."""

    id: str
    dataset: str
    input: str
    context: str
    answers: tuple[str, ...]
    length: int
    language: str
    all_classes: tuple[str, ...]  # of classification; else empty


def load(name: str, source: str | Path = HUB, *, by_length: bool = False) -> list[Row]:
    """The rows of set `name`, with `by_length` of its LongBench-E form (NAME_e).

    source: a file of JSON lines; a folder that holds NAME.jsonl, itself or in `data/`; a folder or a name on the hub
    that `datasets.load_dataset` understands, with the set as its configuration.
    Raises `UserError` where there is none, and for rows that are not of this set.
    """
    asked = find(name)
    if by_length and not asked.by_length:
        raise UserError(f"LongBench-E has no set {name}")
    config = f"{name}_e" if by_length else name
    rows = [_row(raw, f"{source}, {config}, row {at}") for at, raw in enumerate(read(source, config), start=1)]
    if not rows:
        raise UserError(f"{source}: no rows of the LongBench set {config}")
    for at, row in enumerate(rows, start=1):
        if row.dataset.removesuffix("_e") != name:
            raise UserError(f'{source}, {config}, row {at}: field "dataset" says {row.dataset}, expected {name}')
    return rows


def read(source: str | Path, name: str, *, split: str = "test", configured: bool = True) -> list[dict[str, Any]]:
    """The rows as they are written. `source` as for `load`, with `configured` naming its configuration."""
    datasets = need("datasets", "lm", "LongBench")
    file = _file(Path(source), name)
    try:
        if file is not None:
            found = datasets.load_dataset("json", data_files={split: str(file)}, split=split)
        else:
            found = datasets.load_dataset(str(source), name if configured else None, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as problem:
        why = next(iter(str(problem).splitlines()), type(problem).__name__)
        said = f"{name} of LongBench cannot be read from {file or source}: {why}"
        raise UserError(said if file else f"{said}; a folder with {name}.jsonl needs no network") from problem
    return list(found)


def held(folder: Path, name: str) -> bool:
    """Whether a folder on the disk has rows of that name: a file, or a card that lists a configuration."""
    card = folder / "README.md"
    listed = re.compile(rf"^\W*config_name: *{re.escape(name)}\s*$", re.M)
    return _file(folder, name) is not None or (card.is_file() and bool(listed.search(card.read_text(encoding="utf-8"))))


def _file(source: Path, name: str) -> Path | None:
    files = [source, source / f"{name}.jsonl", source / "data" / f"{name}.jsonl"]
    return next((one for one in files if one.is_file()), None)


def _row(raw: Mapping[str, Any], where: str) -> Row:
    question = "input" if "input" in raw else "question"
    missing = [x for x in ("context", question, "answers", "length", "dataset", "all_classes") if x not in raw]
    if missing:
        raise UserError(f"{where}: no field {', '.join(missing)}; found {', '.join(raw)}")
    if not isinstance(raw["answers"], list) or not raw["answers"]:
        raise UserError(f'{where}: field "answers" must be a list of texts that is not empty')
    return Row(
        id=str(raw.get("_id", "")),
        dataset=raw["dataset"],
        input=raw[question],
        context=raw["context"],
        answers=tuple(raw["answers"]),
        length=int(raw["length"]),
        language=raw.get("language", ""),
        all_classes=tuple(raw["all_classes"] or ()),
    )
