"""A table as people read it: for the terminal, in Markdown and in LaTeX (booktabs), from one grid of texts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mixassay.record import RunRecord
from mixassay.runners import stats
from mixassay.runners.labels import short
from mixassay.runners.report import Entry, Table
from mixassay.spec import plain

if TYPE_CHECKING:
    from rich.console import Group


class Cell(NamedTuple):
    """One cell of a grid: the number or name, what must be said with it, and what may stay out for want of space."""

    text: str
    mark: str = ""
    small: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """Texts in rows. `left` columns are names, the others numbers; `bold` holds (row, column) places."""

    title: str
    heads: tuple[tuple[str, ...], ...]  # each a few lines
    rows: tuple[tuple[Cell, ...], ...]
    left: int
    bold: frozenset[tuple[int, int]]
    caption: tuple[str, ...]
    warnings: tuple[str, ...]


BOLD = "Bold: better than every other complete row, by the 95 % interval (Welch) of the difference."


def grid(table: Table) -> Grid:
    """The table as texts: one column of numbers gets n, min and solved as columns, several get them as small print."""
    wide = len(table.columns) > 1
    heads: list[tuple[str, ...]] = [(short(path),) for path in table.row_heads]
    left = len(heads)
    heads += [column or (table.metric,) for column in table.columns]
    if not wide:
        heads += [("n",), (table.worst,), *([("solved",)] if table.points else [])]
    told = facts(table)
    heads += told
    rows, bold = [], set()
    for i, row in enumerate(table.rows):
        entries = [table.entries.get((row, column)) for column in table.columns]
        cells = [Cell(name) for name in row]
        for j, entry in enumerate(entries):
            cells.append(entry_cell(table, entry, small_print=wide))
            if entry is not None and is_best(table, entry, table.columns[j]):
                bold.add((i, left + j))
        known = [entry for entry in entries if entry is not None]
        if not wide:
            cells += [Cell(text) for text in (str(len(known[0].values)), *extremes(table, known[0]))]
        cells += [Cell(_join(known, fact)) for fact in told.values()]
        rows.append(tuple(cells))
    caption = (*table.caption, *([BOLD] if bold else []))
    return Grid(table.title, tuple(heads), tuple(rows), left, frozenset(bold), caption, table.warnings)


def number(table: Table, value: float) -> str:
    """A value in the table's unit: points with one decimal, or three decimals."""
    return f"{100 * value:.1f}" if table.points else f"{value:.3f}"


def mean_std(table: Table, moments: stats.Moments | None) -> str:
    if moments is None:
        return "–"
    return number(table, moments.mean) + (f" ± {number(table, moments.std)}" if moments.std is not None else "")


def entry_cell(table: Table, entry: Entry | None, small_print: bool) -> Cell:
    if entry is None:
        return Cell("")
    text, mark = mean_std(table, entry.moments) + ("†" if entry.runs.older and table.partly_older else ""), ""
    small: tuple[str, ...] = ()
    if not entry.complete:
        ended = [f"{count} {status}" for status, count in entry.ended.items()]
        mark = f"({', '.join([f'{len(entry.values)}/{len(entry.runs.seeds)}', *ended])})"
    elif len(entry.values) == 1:
        mark = "(n=1)"
    if small_print and entry.values:
        small = tuple(f"{w} {v}" for w, v in zip((table.worst, "solved"), extremes(table, entry), strict=False))
    return Cell(text, mark, small)


def extremes(table: Table, entry: Entry) -> list[str]:
    """The worst seed and, for an accuracy, how many of the seeds with an outcome solved the task."""
    values = list(entry.values.values())
    worst = min if table.higher_is_better else max
    found = [number(table, worst(values)) if values else "–"]
    if table.points:
        found.append(f"{stats.solved(values, table.solved_at)}/{entry.settled}" if entry.settled else "–")
    return found


def is_best(table: Table, entry: Entry, column: tuple[str, ...]) -> bool:
    """Best of a column of complete cells, by more than the 95 % interval of the difference to each other row."""
    rivals = [table.entries[row, column] for row in table.rows if (row, column) in table.entries]
    known = [rival.moments for rival in rivals if rival is not entry and rival.complete]
    mine = entry.moments
    if mine is None or not entry.complete or not known:
        return False
    sign = 1 if table.higher_is_better else -1
    differences = [stats.difference(mine, other) for other in known if other is not None]
    return all(sign * d.value > 0 and d.clear for d in differences)


def facts(table: Table) -> dict[tuple[str, ...], Callable[[RunRecord], str]]:
    """What a row costs: heading -> text of one run."""
    used = [record for entry in table.entries.values() for record in entry.runs.ok]
    found: dict[tuple[str, ...], Callable[[RunRecord], str]] = {}
    lengths = {max(map(int, record.state_bytes)) for record in used if record.state_bytes}
    if lengths:
        at = f"at T={min(lengths)}" if len(lengths) == 1 else "at the longest T"
        found["state bytes", at] = _state
    if used:
        found[("parameters",)] = lambda r: f"{r.params:,}" if r.params else ""
        found[("s/run",)] = lambda r: f"{r.time.seconds:.3g}"
    for path in table.tuned:
        found[(short(path),)] = lambda r, path=path: plain(r.tuned[path]) if path in r.tuned else ""  # type: ignore[misc]
    return found


def _state(record: RunRecord) -> str:
    """The bytes of the state at the longest T, and how many of them hold something if not all do."""
    if not record.state_bytes:
        return ""
    T = max(record.state_bytes, key=int)
    live = f" ({record.live_state_bytes[T]:,} live)" if T in record.live_state_bytes else ""
    return f"{record.state_bytes[T]:,}{live}"


def _join(entries: Sequence[Entry], fact: Callable[[RunRecord], str]) -> str:
    """A fact of a row: once if it is the same for all its configurations, else one after the other."""
    texts = [fact(middle(entry.runs.ok)) if entry.runs.ok else "–" for entry in entries if entry.at is None]
    return " / ".join(texts[:1] if len(set(texts)) == 1 else texts)


def middle(records: Sequence[RunRecord]) -> RunRecord:
    """The run of median time."""
    return sorted(records, key=lambda record: record.time.seconds)[len(records) // 2]


def rich(grid: Grid, width: int = 80) -> "Group":
    """For the terminal: `console.print(rich(grid, console.width))`. What is too wide continues in another table."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    def text(i: int, j: int) -> Text:
        cell = grid.rows[i][j]
        shown = Text(cell.text, style="bold" if (i, j) in grid.bold else "")
        for line in _lines(cell)[1:]:
            shown.append(f"\n{line}", style="not bold dim")
        return shown

    tables = []
    for columns in _parts(grid, width):
        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
        for j in columns:  # names go over several lines where a number would not fit
            name = j < grid.left
            head = Text("\n".join(grid.heads[j]))  # no markup: "samples=[recall]" is a head, too
            table.add_column(head, justify="left" if name else "right", no_wrap=not name, overflow="fold")
        for i in range(len(grid.rows)):
            table.add_row(*(text(i, j) for j in columns))
        tables.append(table)
    notes = [Text(line, style="dim") for line in grid.caption]
    warnings = [Text(f"warning: {line}", style="yellow") for line in grid.warnings]
    return Group(Text(grid.title, style="italic"), *tables, *notes, *warnings)


def _lines(cell: Cell) -> list[str]:
    return [cell.text, *filter(None, cell.mark.strip("()").split(", ")), *cell.small]


def _parts(grid: Grid, width: int) -> list[list[int]]:
    """Columns in groups that fit, each with the names of the rows."""
    names = list(range(grid.left))
    widths = [
        2 + max(len(line) for lines in (head, *(_lines(row[j]) for row in grid.rows)) for line in lines)
        for j, head in enumerate(grid.heads)
    ]
    parts = [names]
    for j in range(grid.left, len(widths)):
        if sum(widths[k] for k in parts[-1]) + widths[j] > width - 2 and parts[-1] != names:
            parts.append(names)
        parts[-1] = [*parts[-1], j]
    return parts


def markdown(grid: Grid) -> str:
    def text(cell: Cell, bold: bool = False) -> str:
        first = f"**{cell.text}**" if bold else cell.text
        return "<br>".join([f"{first} {cell.mark}".rstrip(), *cell.small]).replace("|", "\\|")

    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [f"**{grid.title}**", "", row(text(Cell(" ".join(head))) for head in grid.heads)]
    lines.append("|" + "|".join("---" if j < grid.left else "---:" for j in range(len(grid.heads))) + "|")
    lines += [row(text(c, (i, j) in grid.bold) for j, c in enumerate(cells)) for i, cells in enumerate(grid.rows)]
    lines += ["", *(f"- {line}" for line in (*grid.caption, *(f"**Warning:** {line}" for line in grid.warnings)))]
    return "\n".join(lines) + "\n"


def latex(grid: Grid) -> str:
    """A booktabs table; the small print of cells stays out."""

    def text(cell: Cell, bold: bool) -> str:
        first = rf"\textbf{{{_tex(cell.text)}}}" if bold else _tex(cell.text)
        return f"{first} {_tex(cell.mark)}".rstrip()

    def row(cells: Iterable[str]) -> str:
        return " & ".join(cells) + r" \\"

    notes = " ".join(_tex(line) for line in (*grid.caption, *(f"Warning: {line}." for line in grid.warnings)))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(grid.title)}. {notes}}}",
        rf"\begin{{tabular}}{{{'l' * grid.left}{'r' * (len(grid.heads) - grid.left)}}}",
        r"\toprule",
        row(_tex(" ".join(head)) for head in grid.heads),
        r"\midrule",
        *(row(text(c, (i, j) in grid.bold) for j, c in enumerate(cells)) for i, cells in enumerate(grid.rows)),
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
