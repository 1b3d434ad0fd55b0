"""A table written down: for the terminal, Markdown, LaTeX (booktabs), CSV and JSON.

The first three show the same grid of texts; CSV and JSON are long form, with every seed's own value at full
precision.
"""

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mixassay.record import RunRecord
from mixassay.runners import stats
from mixassay.runners.labels import short, show
from mixassay.runners.report import Entry, Table

if TYPE_CHECKING:
    from rich.console import Group

Lines = tuple[str, ...]
"""One cell of a grid: what must be read first, and what may be left out where space is short."""


@dataclass(frozen=True)
class Grid:
    """Texts in rows. `left` columns are names, the others numbers; `bold` holds (row, column) places."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Lines, ...], ...]
    left: int
    bold: frozenset[tuple[int, int]]
    caption: tuple[str, ...]
    warnings: tuple[str, ...]


def grid(table: Table) -> Grid:
    """The table as texts: one column of numbers gets n, min and solved as columns, several get them as small print."""
    wide = len(table.columns) > 1
    worst = "min" if table.higher_is_better else "max"
    heads = [*(short(path) for path in table.row_heads)]
    left = len(heads)
    heads += [", ".join(column) or table.metric for column in table.columns]
    if not wide:
        heads += ["n", worst, *(["solved"] if table.points else [])]
    facts = _facts(table)
    heads += facts
    rows, bold = [], set()
    for i, row in enumerate(table.rows):
        entries = [table.entries.get((row, column)) for column in table.columns]
        cells: list[Lines] = [(name,) for name in row]
        for j, entry in enumerate(entries):
            cells.append(_cell(table, entry, small_print=wide))
            if entry is not None and _is_best(table, entry, table.columns[j]):
                bold.add((i, left + j))
        if not wide:
            cells += _columns(table, entries[0])
        cells += [(_join([entry for entry in entries if entry is not None], fact),) for fact in facts.values()]
        rows.append(tuple(cells))
    return Grid(table.title, tuple(heads), tuple(rows), left, frozenset(bold), table.caption, table.warnings)


def number(table: Table, value: float) -> str:
    """A value in the table's unit: points with one decimal, or three decimals."""
    return f"{100 * value:.1f}" if table.points else f"{value:.3f}"


def mean_std(table: Table, moments: stats.Moments | None) -> str:
    if moments is None:
        return "–"
    return number(table, moments.mean) + (f" ± {number(table, moments.std)}" if moments.std is not None else "")


def _cell(table: Table, entry: Entry | None, small_print: bool) -> Lines:
    if entry is None:
        return ("",)
    first = mean_std(table, entry.moments) + ("†" if entry.runs.older else "")
    if not entry.complete:
        ended = [f"{count} {status}" for status, count in entry.ended.items()]
        first += f" ({', '.join([f'{len(entry.values)}/{len(entry.runs.seeds)}', *ended])})"
    elif len(entry.values) == 1:
        first += " (n=1)"
    if not small_print or not entry.values:
        return (first,)
    worst, solved = (line[0] for line in [*_columns(table, entry), ("",)][1:3])
    return (first, f"{'min' if table.higher_is_better else 'max'} {worst}" + (f", solved {solved}" if solved else ""))


def _columns(table: Table, entry: Entry | None) -> list[Lines]:
    """n, min, solved"""
    values = list(entry.values.values()) if entry is not None else []
    found = [str(len(values)), number(table, (min if table.higher_is_better else max)(values)) if values else "–"]
    if table.points:
        settled = entry.settled if entry is not None else 0
        found.append(f"{stats.solved(values, table.solved_at)}/{settled}" if settled else "–")
    return [(text,) for text in found]


def _is_best(table: Table, entry: Entry, column: tuple[str, ...]) -> bool:
    """Best of a column of complete cells, by more than the 95 % interval of the difference to each other row."""
    rivals = [table.entries[row, column] for row in table.rows if (row, column) in table.entries]
    known = [rival.moments for rival in rivals if rival is not entry and rival.complete]
    mine = entry.moments
    if mine is None or not entry.complete or not known:
        return False
    sign = 1 if table.higher_is_better else -1
    differences = [stats.difference(mine, other) for other in known if other is not None]
    return all(sign * d.value > 0 and d.clear for d in differences)


def _facts(table: Table) -> dict[str, Callable[[RunRecord], str]]:
    """What a row costs: heading -> text of one run."""
    used = [record for entry in table.entries.values() for record in entry.runs.ok]
    facts: dict[str, Callable[[RunRecord], str]] = {}
    lengths = {max(map(int, record.state_bytes)) for record in used if record.state_bytes}
    if lengths:
        at = f" at T={min(lengths)}" if len(lengths) == 1 else ", longest T"
        facts[f"state bytes{at}"] = lambda r: f"{r.state_bytes[max(r.state_bytes, key=int)]:,}" if r.state_bytes else ""
    if used:
        facts["parameters"] = lambda r: f"{r.params:,}" if r.params else ""
        facts["s/run"] = lambda r: f"{r.time.seconds:.3g}"
    for path in table.tuned:
        facts[short(path)] = lambda r, path=path: show(r.tuned[path]) if path in r.tuned else ""  # type: ignore[misc]
    return facts


def _join(entries: Sequence[Entry], fact: Callable[[RunRecord], str]) -> str:
    """A fact of a row, once if it is the same in all its cells, else in the order of the columns."""
    texts = [text for entry in entries if entry.runs.ok and (text := fact(_middle(entry.runs.ok)))]
    return " / ".join(texts[:1] if len(set(texts)) == 1 else dict.fromkeys(texts))


def _middle(records: Sequence[RunRecord]) -> RunRecord:
    """The run of median time."""
    return sorted(records, key=lambda record: record.time.seconds)[len(records) // 2]


def rich(grid: Grid) -> "Group":
    """For the terminal: `console.print(rich(grid))`."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=grid.title, title_justify="left")
    for j, head in enumerate(grid.heads):
        shown.add_column(Text(head), justify="left" if j < grid.left else "right")
    for i, row in enumerate(grid.rows):
        cells = [Text("\n".join(cell), style="bold" if (i, j) in grid.bold else "") for j, cell in enumerate(row)]
        shown.add_row(*cells)
    notes = [Text(line, style="dim") for line in grid.caption]
    return Group(shown, *notes, *(Text(f"warning: {line}", style="yellow") for line in grid.warnings))


def markdown(grid: Grid) -> str:
    def text(cell: Lines, bold: bool) -> str:
        first, *rest = (line.replace("|", "\\|") for line in cell)
        return "<br>".join([f"**{first}**" if bold else first, *rest])

    lines = [f"**{grid.title}**", ""]
    lines.append("| " + " | ".join(text((head,), False) for head in grid.heads) + " |")
    lines.append("|" + "|".join("---" if j < grid.left else "---:" for j in range(len(grid.heads))) + "|")
    for i, row in enumerate(grid.rows):
        lines.append("| " + " | ".join(text(cell, (i, j) in grid.bold) for j, cell in enumerate(row)) + " |")
    lines += ["", *(line + "  " for line in grid.caption), *(f"**Warning:** {line}  " for line in grid.warnings)]
    return "\n".join(line if line.endswith("  ") else line.rstrip() for line in lines) + "\n"


def latex(grid: Grid) -> str:
    """A booktabs table; the small print of cells stays out."""

    def row(cells: Sequence[str]) -> str:
        return " & ".join(cells) + r" \\"

    body = [
        row([rf"\textbf{{{_tex(c[0])}}}" if (i, j) in grid.bold else _tex(c[0]) for j, c in enumerate(cells)])
        for i, cells in enumerate(grid.rows)
    ]
    notes = " ".join(_tex(line) for line in (*grid.caption, *(f"Warning: {line}." for line in grid.warnings)))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(grid.title)}. {notes}}}",
        rf"\begin{{tabular}}{{{'l' * grid.left}{'r' * (len(grid.heads) - grid.left)}}}",
        r"\toprule",
        row([_tex(head) for head in grid.heads]),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


TEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "≥": r"$\geq$", "≤": r"$\leq$", "†": r"$^\dagger$", "–": "--", "−": "$-$", "<": "$<$", ">": "$>$",
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(TEX.get(sign, sign) for sign in text)


def long_form(table: Table) -> list[dict[str, Any]]:
    """One mapping for each number of the table: means in the metric's own unit, and the seeds' values."""
    found = []
    for (row, column), entry in table.entries.items():
        m, values = entry.moments, list(entry.values.values())
        runs = {record.seed: record for record in entry.runs.records}
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
                "cell": entry.runs.cell,
                "runs": [
                    {
                        "seed": seed,
                        "status": runs[seed].status if seed in runs else "missing",
                        "value": entry.values.get(seed),
                        "tuned": runs[seed].tuned if seed in runs else {},
                        "seconds": runs[seed].time.seconds if seed in runs else None,
                        "params": runs[seed].params if seed in runs else None,
                        "state_bytes": runs[seed].state_bytes if seed in runs else {},
                        "commit": runs[seed].code.commit if seed in runs else None,
                        "source": runs[seed].code.source if seed in runs else None,
                    }
                    for seed in entry.runs.seeds
                ],
            }
        )
    return found


def to_json(table: Table) -> str:
    data = {
        "title": table.title,
        "metric": table.metric,
        "std": "sample, ddof=1",
        "solved_at": table.solved_at,
        "caption": table.caption,
        "warnings": table.warnings,
        "cells": long_form(table),
    }
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(table: Table) -> str:
    """One line for each number and seed; a seed that never ran has status `missing` and no value."""
    out = io.StringIO()
    rows = [
        {
            **{key: value for key, value in cell.items() if key not in ("runs", "ended")},
            **{key: _flat(value) for key, value in run.items()},
        }
        for cell in long_form(table)
        for run in cell["runs"]
    ]
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value
