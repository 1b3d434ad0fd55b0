"""Stored runs as one table for other programs, CSV or Parquet: a row for each run.

Columns are named by where a value stands in the record: `test/accuracy`, `config.train.lr`, `env.device`. Lists and
mappings below that are JSON. The column `record` holds the whole line, so nothing is lost.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners.export import csv_text
from mixassay.runners.extras import need

OPENED = {"config": 2, "code": 1, "env": 1, "time": 1, "stopped": 1, "error": 1, "language": 1}
"""Mappings that are spread over columns, and how deep."""

LEFT_OUT = ("eval", "curve")
"""Found in `record` only."""


def check(path: Path) -> None:
    """Raise `UserError` for a file that cannot be made."""
    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out: {path} should end in .csv or .parquet")
    if path.suffix == ".parquet":
        need("pyarrow.parquet", "export", "Parquet")


def write(records: Sequence[RunRecord], path: Path) -> None:
    """Records as a table; the file is there whole or not at all."""
    rows = [row(record) for record in records]
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            partial.write_text(csv_text(rows))
        else:
            _write_parquet(rows, partial)
        os.replace(partial, path)
    except OSError as problem:
        raise UserError(f"cannot write to {path}: {problem.strerror or problem}") from problem
    finally:
        partial.unlink(missing_ok=True)


def row(record: RunRecord) -> dict[str, Any]:
    found: dict[str, Any] = {}
    data = record.model_dump(mode="json")
    for name, value in data.items():
        if name == "metrics":
            found |= value
        elif name not in LEFT_OUT:
            found |= spread(name, value, OPENED.get(name, 0))
    return found | {"record": record.line().decode().rstrip("\n")}


def spread(name: str, value: Any, depth: int) -> dict[str, Any]:
    """`{"config.train.lr": 0.01}` of `{"train": {"lr": 0.01}}`; what lies deeper, and every list, as JSON."""
    if isinstance(value, dict) and depth:
        return {k: v for key, inner in value.items() for k, v in spread(f"{name}.{key}", inner, depth - 1).items()}
    return {name: json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else value}


def _write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    pyarrow, parquet = need("pyarrow", "export", "Parquet"), need("pyarrow.parquet", "export", "Parquet")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: uniform([row.get(name) for row in rows]) for name in names}
    parquet.write_table(pyarrow.table(columns), path, compression="zstd")


def uniform(values: list[Any]) -> list[Any]:
    """Values of one type, or all of them as JSON: an argument may be a number in one mixer and a word in another."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or len(kinds) == 1:
        return [float(v) if float in kinds and v is not None else v for v in values]
    return [None if value is None else json.dumps(value) for value in values]
