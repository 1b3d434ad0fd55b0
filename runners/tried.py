"""What every setting that `select` chose among was worth, as far as runs of it are stored."""

from collections.abc import Iterable, Mapping, Sequence

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import stats
from mixassay.runners.labels import pairs
from mixassay.runners.render import Cell, Grid, mean_std
from mixassay.runners.report import Table
from mixassay.spec import Args
from mixassay.sweep import Cell as Configuration
from mixassay.sweep import Sweep

CAPTION = (
    "{metric} of all runs that are stored of these settings, tuning and reported, of every version of the code: mean ± "
    "sample std (number of runs). Bold: the setting of the table above. The runs that chose are among these, so the "
    "best of a row looks better than it is."
)


def grid(sweep: Sweep, table: Table, records: Iterable[RunRecord]) -> Grid:
    """A row for each configuration of the table, a column for each setting. Raises `UserError` where none was tuned."""
    if sweep.select is None:
        raise UserError(f"{sweep.path}: --tried shows what `sweep.select` chose among, and this file has none")
    settings, by_cell = sweep.candidates(), dict[str, list[RunRecord]]()
    for record in records:
        by_cell.setdefault(record.cell, []).append(record)
    entries = [(row, column, e.runs) for (row, column), e in table.entries.items() if e.at is None]
    columns = [" ".join(head for head in column if head != "mean") for _, column, _ in entries]
    left = len(table.row_heads) + any(columns)
    rows: list[tuple[Cell, ...]] = []
    bold = set()
    for (row, _, runs), column in zip(entries, columns, strict=True):
        if runs.records and runs.records[0].tuned in settings:
            bold.add((len(rows), left + settings.index(runs.records[0].tuned)))
        names = map(Cell, (*row, column)[:left])
        rows.append((*names, *(worth(table, runs_of(runs.cell, setting, by_cell)) for setting in settings)))
    return Grid(
        title=f"{table.title}: every setting that was tried",
        heads=(*((head,) for head in (*table.row_heads, "")[:left]), *((pairs(setting),) for setting in settings)),
        rows=tuple(rows),
        left=left,
        bold=frozenset(bold),
        caption=(CAPTION.format(metric=table.metric),),
        warnings=(),
    )


def runs_of(cell: Configuration, setting: Args, by_cell: Mapping[str, Sequence[RunRecord]]) -> list[RunRecord]:
    """Those that `select` made with a setting, and those of sweeps in which it is written down."""
    tuned = [record for record in by_cell.get(cell.cell, ()) if record.tuned == setting]
    return tuned + [r for r in by_cell.get(cell.sections.having(setting).fingerprint(), ()) if not r.tuned]


def worth(table: Table, records: Sequence[RunRecord]) -> Cell:
    values = [v for r in records if r.status == "ok" and (v := r.metrics.get(table.metric)) is not None]
    diverged = sum(record.status == "diverged" for record in records)
    text = f"{mean_std(table, stats.moments(values))} ({len(values)})" if values else ""
    return Cell(", ".join(part for part in (text, f"{diverged} diverged" if diverged else "") if part))
