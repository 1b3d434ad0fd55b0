"""A table as programs read it: CSV and JSON in long form, with every seed's own value at full precision."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mixassay.runners import stats
from mixassay.runners.report import Entry, Table


def long_form(table: Table) -> list[dict[str, Any]]:
    """One mapping for each number of the table: means in the metric's own unit, and the seeds' values."""
    found = []
    for (row, column), entry in table.entries.items():
        m, values = entry.moments, list(entry.values.values())
        found.append(
            {
                **dict(zip(table.row_heads, row, strict=True)),
                "column": ", ".join(column),
                "metric": table.metric,
                "n": len(values),
                "seeds": len(entry.runs.seeds),
                "mean": m.mean if m else None,
                "std": m.std if m else None,
                "min": min(values, default=None),
                "max": max(values, default=None),
                "solved": stats.solved(values, table.solved_at) if table.points else None,
                "ended": entry.ended,
                "older_code": entry.runs.older,
                "cell": entry.runs.cell.cell,
                "runs": [_run(entry, seed) for seed in entry.runs.seeds],
            }
        )
    return found


def _run(entry: Entry, seed: int) -> dict[str, Any]:
    record = next((record for record in entry.runs.records if record.seed == seed), None)
    if record is None:
        return {"seed": seed, "status": "missing", "value": None}
    return {
        "seed": seed,
        "status": record.status,
        "value": entry.values.get(seed),
        "tuned": record.tuned,
        "seconds": record.time.seconds,
        "params": record.params,
        "state_bytes": record.state_bytes,
        "live_state_bytes": record.live_state_bytes,
        "commit": record.code.commit,
        "source": record.code.source,
    }


def to_json(table: Table, against: Sequence[Mapping[str, Any]] | None = None) -> str:
    """`against` is `published.long_form`."""
    data = {
        "title": table.title,
        "metric": table.metric,
        "std": "sample, ddof=1",
        "solved_at": table.solved_at,
        "caption": table.caption,
        "warnings": table.warnings,
        "cells": long_form(table),
        **({"against": against} if against is not None else {}),
    }
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(table: Table) -> str:
    """One line for each number and seed; a seed that never ran has status `missing` and no value."""
    return csv_text(
        {
            **{key: value for key, value in cell.items() if key not in ("runs", "ended")},
            **{key: _flat(value) for key, value in run.items()},
        }
        for cell in long_form(table)
        for run in cell["runs"]
    )


def csv_text(lines: Iterable[Mapping[str, Any]]) -> str:
    """Mappings as CSV: a column for every key that any of them has, in the order of appearance."""
    rows, out = list(lines), io.StringIO()
    fields = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(out, fieldnames=list(fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
