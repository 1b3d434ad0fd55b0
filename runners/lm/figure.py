"""The loss of language models by position: does a model still gain from what lies far back?"""

from typing import Any

from mixassay.record import Positions, RunRecord
from mixassay.runners.axes import linear_axis
from mixassay.runners.labels import heads, pairs
from mixassay.runners.marks import Curve, Panel, Series
from mixassay.runners.observations import configurations
from mixassay.runners.report import Table

Found = list[tuple[int, str, RunRecord, Positions]]
"""(row of the table, its name, record, what it says)"""


def by_position(table: Table) -> tuple[list[Panel], list[str]]:
    """A panel for each evaluation cell whose rows are scored throughout, one line for each seed."""
    split, cells, labels = table.metric.split("/")[0], dict[str, Found](), dict[str, dict[str, Any]]()
    for row, _, entry in configurations(table):
        for record in entry.runs.ok:
            for said in record.language.positions if record.language else ():
                if said.split == split:
                    labels[pairs(said.cell)] = said.cell
                    cells.setdefault(pairs(said.cell), []).append((table.rows.index(row), " ".join(row), record, said))
    windows = sorted({said.window for found in cells.values() for *_, said in found})
    note = f"{split} loss in nats a token, running mean over {' or '.join(map(str, windows))} positions; a line a seed."
    titles = heads(list(labels.values()))
    return [panel(f"{split}/loss", *each) for each in zip(titles, cells.values(), strict=True)], [note] if cells else []


def panel(label: str, title: str, found: Found) -> Panel:
    rows = dict.fromkeys((row, name) for row, name, _, _ in found)
    curves = {
        key: tuple(curve(record, said) for row, name, record, said in found if (row, name) == key) for key in rows
    }
    losses = [y for each in curves.values() for c in each for _, y in c.points]
    last = max(said.at[-1] for *_, said in found)
    return Panel(
        title,
        linear_axis("position", 0.0, float(last)),
        linear_axis(label, min(losses), max(losses)),
        tuple(Series(name, row, curves=curves[row, name]) for row, name in rows),
    )


def curve(record: RunRecord, said: Positions) -> Curve:
    points = tuple((float(at), loss) for at, loss in zip(said.at, said.loss, strict=True) if loss is not None)
    return Curve(points, record.cell, record.seed, ended=True)
