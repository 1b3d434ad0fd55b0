"""What the page shows of a run when asked: its seeds, its configuration, and the command that trains it again."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mixassay.record import RunRecord
from mixassay.runners import render
from mixassay.runners.observations import configurations
from mixassay.runners.report import Table
from mixassay.runners.runs import Runs
from mixassay.spec import plain
from mixassay.sweep import Cell, Sweep


def page_data(table: Table, sweep: Sweep, words: Sequence[str]) -> dict[str, Any]:
    """Configurations with their seeds, and for each number of the table the seeds' values."""
    order = {entry.runs.cell.cell: n for n, (_, _, entry) in enumerate(configurations(table))}
    first: dict[int, int] = {}
    entries = []
    for n, ((row, column), entry) in enumerate(table.entries.items()):
        values = {seed: render.number(table, value) for seed, value in entry.values.items()}
        cell = order[entry.runs.cell.cell]
        first.setdefault(cell, n)
        entries.append({"name": ", ".join([" ".join(row), *column]), "cell": cell, "values": values})
    configs = [configuration(entry.runs) for _, _, entry in configurations(table)]
    shared = {path: text for path, text in configs[0].items() if all(c.get(path) == text for c in configs)}
    cells = [
        {
            "entry": first[n],
            "runs": [[seed, outcome(entry.runs, seed)] for seed in entry.runs.seeds],
            "config": [[path, text] for path, text in config.items() if path not in shared],
            "command": command(sweep, entry.runs.cell, words),
            "code": made_by(entry.runs),
        }
        for n, ((_, _, entry), config) in enumerate(zip(configurations(table), configs, strict=True))
    ]
    return {"entries": entries, "cells": cells, "shared": list(shared.items())}


def configuration(runs: Runs) -> dict[str, str]:
    """Every value of the configuration by its path, as the runs had it: what was tuned included."""
    config = runs.records[0].config if runs.records else runs.cell.sections.config()

    def below(value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                yield from below(inner, f"{path}.{key}" if path else key)
        else:
            yield path, plain(value)

    return dict(below(config, ""))


def outcome(runs: Runs, seed: int) -> str:
    """How the run of a seed ended."""
    record = next((record for record in runs.records if record.seed == seed), None)
    if record is None:
        return "missing"
    parts: list[str] = [record.status]
    if record.stopped is not None:
        parts.append(f"step {record.stopped.step} ({record.stopped.reason})")
    parts.append(f"{record.time.seconds:.3g} s")
    return ", ".join([*parts, *([f"{record.error.type}: {record.error.message}"] if record.error else [])])


def made_by(runs: Runs) -> str:
    def one(record: RunRecord) -> str:
        code = record.code
        commit = code.commit[:12] if code.commit != "none" else f"version {code.version}"
        return f"code {commit}{' (dirty)' if code.dirty else ''}, data {record.data}, {record.env.get('class')}"

    return "; ".join(dict.fromkeys(map(one, runs.records)))


def command(sweep: Sweep, cell: Cell, words: Sequence[str]) -> str:
    """The line that trains this configuration alone: `mixassay run quickstart --only mixer=attention --seeds 0-4`."""
    only = ",".join(f"{path}={wanted(sweep, path, value)}" for path, value in cell.axes.items())
    numbers = list(sweep.seeds)
    run = numbers == list(range(numbers[0], numbers[-1] + 1))
    seeds = f"{numbers[0]}-{numbers[-1]}" if run else plain(numbers)
    return shlex.join(["mixassay", "run", *words, *(["--only", only] if only else []), "--seeds", seeds])


def wanted(sweep: Sweep, path: str, value: Any) -> str:
    """A value such that no other cell has it too: a mere name also matches the same name with arguments."""
    if not isinstance(value, str):
        return plain(value)
    others = [cell.axes.get(path) for cell in sweep.cells()]
    ambiguous = any(isinstance(other, Mapping) and other.get("name") == value for other in others)
    return f"{{name: {value}}}" if ambiguous else value
