"""A table and its figures as one HTML file that needs nothing else: no network, no server, no library.

The numbers stand in the file as text; `page.js` sorts and filters them and shows a run's seeds, configuration and
command. The same table gives the same bytes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mixassay.runners import palette, render
from mixassay.runners.axes import Axis, accuracy_axis, linear_axis
from mixassay.runners.figures import figures
from mixassay.runners.labels import short, spans
from mixassay.runners.marks import Figure, Panel
from mixassay.runners.observations import configurations, shown
from mixassay.runners.page import svg
from mixassay.runners.page.card import page_data
from mixassay.runners.report import Entry, Label, Table
from mixassay.sweep import Sweep

HERE = Path(__file__).parent

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What a browser may load for the page: nothing."""


def html(table: Table, sweep: Sweep, words: Sequence[str], against: Sequence[render.Grid] = ()) -> str:
    """The whole page. `words` are the arguments that `mixassay run` needs for this sweep: file, overrides, options."""
    drawn = figures(table)
    cells = {entry.runs.cell.cell: n for n, (_, _, entry) in enumerate(configurations(table))}
    style = colours() + "\n" + (HERE / "page.css").read_text()
    script = (HERE / "page.js").read_text()
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(table.title)}</title><style>{style}</style></head><body>",
        svg.symbols(),
        *header(table),
        *numbers(table, cells),
        *(section for figure in drawn for section in drawing(figure, cells)),
        *(f"<h2>{escape(grid.title)}</h2>{grid_table(grid)}{notes(grid.caption, grid.warnings)}" for grid in against),
        f'<script type="application/json" id="data">{embedded(page_data(table, sweep, words))}</script>',
        f"<script>{script}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def colours() -> str:
    """The palette as variables of the page, each with its light and its dark value."""
    pairs = [("ground", palette.PAPER, palette.NIGHT)]
    pairs += [(f"c{n}", *pair) for n, pair in enumerate(zip(palette.LIGHT, palette.DARK, strict=True))]
    return f":root {{ {' '.join(f'--{name}: light-dark({light}, {dark});' for name, light, dark in pairs)} }}"


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element whatever its texts are."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# -- the table ---------------------------------------------------------------------------------------------------------


def header(table: Table) -> Iterator[str]:
    entries = [entry for _, _, entry in configurations(table)]
    seeds = sorted({seed for entry in entries for seed in entry.runs.seeds})
    said = f"{table.metric}, {len(entries)} configurations, seeds {spans(seeds)}"
    button = '<button id="theme" type="button">light / dark</button>'
    yield f"<header><h1>{escape(table.title)}</h1><p>{escape(said)}</p>{button}</header>"
    if table.warnings:
        yield f'<ul class="warnings">{"".join(f"<li>{escape(line)}</li>" for line in table.warnings)}</ul>'


def numbers(table: Table, cells: Mapping[str, int]) -> Iterator[str]:
    """The table itself if it has several columns, then one row for each of its numbers, to sort and filter."""
    grid = render.grid(table)
    if len(table.columns) > 1:
        yield grid_table(grid)
    yield '<div class="tools"><label for="filter">Filter</label><input id="filter" type="search"'
    yield ' placeholder="words that a row has, or -words that it has not" autocomplete="off">'
    yield '<output id="count" for="filter"></output>'
    yield '<span class="hint">Hover over a row or a mark for its seeds; click a row to keep them.</span></div>'
    yield '<div class="scroll"><table id="runs"><thead><tr>'
    names = [*map(short, table.row_heads), *column_names(table)]
    yield "".join(f'<th class="name" scope="col"><button type="button">{escape(name)}</button></th>' for name in names)
    told = render.facts(table)
    solved = ["solved"] if table.points else []
    heads = [table.metric, "", "n", table.worst, *solved, *(" ".join(head) for head in told)]
    for head in heads:
        yield f'<th scope="col"><button type="button">{escape(head)}</button></th>' if head else "<th>seeds</th>"
    yield "</tr></thead><tbody>"
    axis = strip_axis(table)
    for n, ((row, column), entry) in enumerate(table.entries.items()):
        place, number = table.rows.index(row), cells[entry.runs.cell.cell]
        record = render.middle(entry.runs.ok) if entry.runs.ok else None
        columns = column_values(table, column)
        text = " ".join([*row, *column])
        yield f'<tr tabindex="0" data-entry="{n}" data-cell="{number}" data-row="{place}" data-text="{escape(text)}">'
        yield f'<td class="name">{svg.sample(place)} {escape(" ".join(row))}</td>'
        yield "".join(f'<td class="name">{escape(value)}</td>' for value in columns)
        yield from numbers_of(
            table, entry, column, f"<td>{svg.strip(shown(table, entry.values), axis, place, number)}</td>"
        )
        yield "".join(f"<td>{escape(fact(record)) if record else '–'}</td>" for fact in told.values())
        yield "</tr>"
    yield f"</tbody></table></div>{notes(grid.caption, ())}"


def column_names(table: Table) -> list[str]:
    """The names in the columns' labels, `num_kv` of `num_kv=4`; evaluation cells share one column."""
    first = table.columns[0]
    names = [part.split("=")[0] for part in first]
    return [*names[:-1], "evaluated at"] if by_eval(table) else names


def column_values(table: Table, column: Label) -> list[str]:
    values = [part.partition("=")[2] for part in column]
    return [*values[:-1], column[-1]] if by_eval(table) else values


def by_eval(table: Table) -> bool:
    return any(entry.at is not None for entry in table.entries.values())


def numbers_of(table: Table, entry: Entry, column: Label, strip: str) -> Iterator[str]:
    cell, m = render.entry_cell(table, entry, small_print=False), entry.moments
    text = escape(cell.text)
    if render.is_best(table, entry, column):
        text = f"<strong>{text}</strong>"
    mark = f' <span class="mark">{escape(cell.mark)}</span>' if cell.mark else ""
    yield f'<td data-sort="{m.mean if m else ""}">{text}{mark}</td>{strip}<td>{len(entry.values)}</td>'
    yield "".join(f"<td>{escape(value)}</td>" for value in render.extremes(table, entry))


def strip_axis(table: Table) -> Axis:
    there = [value for entry in table.entries.values() for value in entry.values.values()]
    return accuracy_axis("") if table.points else linear_axis("", 0.0, max(there, default=1.0))


def grid_table(grid: render.Grid) -> str:
    def cell(i: int, j: int) -> str:
        texts = grid.rows[i][j]
        text = f"<strong>{escape(texts.text)}</strong>" if (i, j) in grid.bold else escape(texts.text)
        small = "".join(f"<small>{escape(line)}</small>" for line in (texts.mark, *texts.small) if line)
        return f"<td{kind(j)}>{text}{small}</td>"

    def kind(j: int) -> str:
        return ' class="name"' if j < grid.left else ""

    heads = (f'<th{kind(j)} scope="col">{"<br>".join(map(escape, head))}</th>' for j, head in enumerate(grid.heads))
    rows = ("".join(cell(i, j) for j in range(len(grid.heads))) for i in range(len(grid.rows)))
    lines = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{"".join(heads)}</tr></thead><tbody>{lines}</tbody></table></div>'


def notes(caption: Sequence[str], warnings: Sequence[str]) -> str:
    lines = [escape(line) for line in caption] + [f"<strong>Warning:</strong> {escape(line)}" for line in warnings]
    return f'<ul class="notes">{"".join(f"<li>{line}</li>" for line in lines)}</ul>' if lines else ""


# -- figures -----------------------------------------------------------------------------------------------------------


def drawing(figure: Figure, cells: Mapping[str, int]) -> Iterator[str]:
    yield f"<section><h2>{escape(figure.title)}</h2>"
    if any(isinstance(panel, Panel) and not panel.bars for panel in figure.panels) and figure.kind != "curves":
        names = (f'<li data-row="{n}">{svg.sample(n)} {escape(name)}</li>' for n, name in enumerate(figure.names))
        yield f'<ul class="legend">{"".join(names)}</ul>'
    yield '<div class="panels">'
    for panel in svg.panels(figure, cells):
        yield f"<figure>{panel}</figure>"
    yield f"</div>{notes(figure.notes, ())}</section>"
