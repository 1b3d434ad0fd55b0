"""A sweep as it will really run, every value with the place that wrote it."""

from collections.abc import Iterator
from typing import Any

from mixassay.fields import SECTIONS
from mixassay.source import Node
from mixassay.spec import Args, plain
from mixassay.sweep import Cell, Sweep

COLUMN = 52
"""Where the origins stand, when the values leave room."""


def resolved_text(sweep: Sweep) -> str:
    """The resolved configuration as YAML, each value followed by its origin: a place, "default", or an override.

    A field that differs between cells shows its values one after another, `64 | 128`.
    """
    cells = sweep.cells()
    tuning, reported = (len(cells) * n for n in (len(sweep.candidates()) * seeds_spent(sweep), len(sweep.seeds)))
    lines = [f"# {len(cells)} cells, {tuning} tuning + {reported} reported runs"]
    lines += [line("name", plain(sweep.name), origin(sweep.source, "name"))]
    for section in SECTIONS:
        lines += section_lines(section, sweep, cells)
    lines += [line("seeds", plain(list(sweep.seeds)), origin(sweep.source, "seeds"))]
    if sweep.select is not None:
        lines += settings_lines("select", sweep.select.model_dump(mode="json"), sweep.source, "sweep.select")
    for name, settings in (("report", sweep.report), ("run", sweep.run)):
        lines += settings_lines(name, settings.model_dump(mode="json"), sweep.source, name)
    return "\n".join(lines) + "\n"


def seeds_spent(sweep: Sweep) -> int:
    return len(sweep.select.seeds) if sweep.select is not None else 0


def section_lines(section: str, sweep: Sweep, cells: list[Cell]) -> Iterator[str]:
    """A section of all cells at once."""
    values: dict[str, dict[str, str]] = {}  # path -> value -> where it was first written
    for cell in cells:
        for path, value in leaves(cell.sections.config()[section], section):
            shown = plain(value)
            values.setdefault(path, {}).setdefault(shown, origin(cell.source, path))
    for path, candidates in sweep.tuned.items():
        if path.startswith(f"{section}."):
            at = sweep.source.nearest("sweep.select.axes").value[path].at
            values[path] = {plain(value): f"selected, {at}" for value in candidates}
    yield f"{section}:"
    yield from nested(values, section)


def settings_lines(name: str, settings: Args, source: Node, path: str) -> Iterator[str]:
    values = {p: {plain(value): origin(source, p)} for p, value in leaves(settings, path)}
    yield f"{name}:"
    yield from nested(values, path)


def nested(values: dict[str, dict[str, str]], prefix: str) -> Iterator[str]:
    """`a.b.c` as `c` below `b`, with a line for each value."""
    above: list[str] = []
    for path in values:
        *parents, last = path.removeprefix(f"{prefix}.").split(".")
        if parents != above:
            yield from ("  " * (i + 1) + f"{part}:" for i, part in enumerate(parents))
            above = parents
        shown = " | ".join(values[path])
        places = list(dict.fromkeys(values[path].values()))
        yield line("  " * (len(parents) + 1) + last, shown, ", ".join(places[:2]) + (", ..." if places[2:] else ""))


def leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}.{key}")
    else:
        yield prefix, value


def origin(source: Node, path: str) -> str:
    node = source.find(path)
    return str(node.at) if node is not None else "default"


def line(key: str, value: str, comment: str) -> str:
    return f"{key}: {value}".ljust(COLUMN) + f"  # {comment}"
