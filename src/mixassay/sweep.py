"""A sweep file: one YAML file that says which runs make a table. Reading it imports neither torch nor plug-ins.

    sweep = Sweep.load("configs/quickstart.yaml", overrides=["train.steps=100"])
    for cell in sweep.cells():
        runs = sweep.tuning(cell)                      # every candidate of `select`, on the tuning seeds
        runs = sweep.reported(cell, {"train.lr": 1e-3})  # what the table shows, on the reported seeds

A cell is what the table compares: one point of grid x zip, after `when` and `exclude`. Everything is checked for every
cell when the file is loaded, except what only the code of a task or mixer knows: see `check.py`.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.expand import Cell as Cell
from mixassay.expand import Expansion, choices, matches, unmatched
from mixassay.fields import SECTIONS, is_path, known_paths, shown, validate
from mixassay.grammar import Grammar, mapping, parse_seeds, parse_sweep, sequence
from mixassay.layers import NAMED, override, place_all, read_extended, spell_out
from mixassay.registry import suggest
from mixassay.settings import Report, Run, Selection
from mixassay.source import Node, Problems, assignment
from mixassay.spec import Args, MixerSpec, RunSpec, Sections, mixer_labels

VERSION = 1
"""Version of the grammar, which every file states."""

KEYS = ("version", "name", "plugins", "extends", *SECTIONS, "sweep", "seeds", "report", "run")


@dataclass(frozen=True)
class Sweep:
    """A loaded sweep file. `plugins` are paths of Python files, or names of modules."""

    name: str
    path: Path
    seeds: tuple[int, ...]
    report: Report
    run: Run
    select: Selection | None
    plugins: tuple[str, ...]
    source: Node = field(repr=False)
    all_cells: tuple[Cell, ...] = field(repr=False)
    tuned_nodes: dict[str, list[Node]] = field(repr=False)

    @classmethod
    def load(cls, path: Path | str, overrides: Iterable[str] = ()) -> "Sweep":
        """The sweep in a file, with `key=value` overrides. Raises `UserError` with one line for every fault found."""
        found = Problems()
        root = override(read_extended(Path(path), found), overrides, found)
        return Reading(root, found).sweep(Path(path))

    def cells(self) -> list[Cell]:
        return list(self.all_cells)

    @property
    def tuned(self) -> dict[str, list[Any]]:
        """The values that `select` tries at each path."""
        return {path: [node.plain() for node in nodes] for path, nodes in self.tuned_nodes.items()}

    def candidates(self) -> list[Args]:
        """What `select` chooses among: path -> value. [{}] when nothing is tuned."""
        return [{path: node.plain() for path, node in choice.items()} for choice in choices(self.tuned_nodes)]

    def variants(self, cell: Cell) -> Iterator[tuple[Sections, Node]]:
        """The cell's sections with each candidate in its place, and where all their values were written."""
        for choice in choices(self.tuned_nodes):
            values = {path: node.plain() for path, node in choice.items()}
            yield (cell.sections.having(values) if values else cell.sections), place_all(cell.source, choice)

    def tuning(self, cell: Cell) -> list[RunSpec]:
        """The runs that choose among the candidates."""
        if self.select is None:
            return []
        return [self._run(cell, c, seed, "tune") for c in self.candidates() for seed in self.select.seeds]

    def reported(self, cell: Cell, tuned: Mapping[str, Any] | None = None) -> list[RunSpec]:
        """The runs of the table, with what was chosen: a value for each tuned path."""
        tuned = tuned or {}
        if set(tuned) != set(self.tuned):
            raise UserError(f"{self.path}: needs chosen values of [{', '.join(self.tuned)}], got [{', '.join(tuned)}]")
        return [self._run(cell, tuned, seed, "report") for seed in self.seeds]

    def only(self, conditions: Mapping[str, Any]) -> "Sweep":
        """The sweep with those cells alone that have these values: {"mixer": "gla", "task.num_kv": 64}."""
        for path in conditions:
            if not is_path(path):
                raise UserError(f'--only: "{path}" is not a config field.{suggest(path, known_paths())}')
        cells = tuple(c for c in self.all_cells if all(matches(c.source, p, v) for p, v in conditions.items()))
        if not cells:
            raise UserError(f"--only: {unmatched(conditions, [cell.source for cell in self.all_cells])}")
        return replace(self, all_cells=cells)

    def _run(self, cell: Cell, tuned: Mapping[str, Any], seed: int, role: Any) -> RunSpec:
        sections = cell.sections.having(tuned) if tuned else cell.sections
        parts: dict[str, Any] = {name: getattr(sections, name) for name in SECTIONS}
        return RunSpec(suite=self.name, seed=seed, role=role, tuned=dict(tuned), axes=cell.axes, **parts)


def conditions(text: str) -> Args:
    """`mixer=gla,task.num_kv=[4, 8]` as values by path. A list matches any of its members."""
    found = Problems()
    values: Args = {}
    for part in re.split(r",(?=[\w.]+=)", text):
        path, node = assignment(part, found, "--only")
        if path in values:
            raise UserError(f"--only names {path} twice; any of several values is {path}=[A, B]")
        values[path] = node.plain()
    found.raise_any()
    return values


class Reading:
    """One file on its way to a `Sweep`: every step adds what it finds wrong to `found`."""

    def __init__(self, root: Node, found: Problems) -> None:
        self.root, self.found = root, found

    def sweep(self, path: Path) -> Sweep:
        parts = self.parts = mapping(self.root, "", self.found, known=KEYS)
        name = self.head()
        seeds = parse_seeds(parts["seeds"], "seeds", self.found) if "seeds" in parts else (0,)
        report = validate(Report, parts.get("report", Node({}, self.root.at)), "report", self.found)
        run = validate(Run, parts.get("run", Node({}, self.root.at)), "run", self.found)
        plugins = self.plugins()
        grammar = parse_sweep(parts.get("sweep", Node({}, self.root.at)), self.found)
        self.separate(seeds, grammar)
        base = spell_out(Node({name: node for name, node in parts.items() if name in SECTIONS}, self.root.at))
        cells = Expansion(base, grammar, self.found).cells()
        if report is not None and not self.found:
            self.overrides_count(cells)
            self.tabulate(report, cells, grammar.tuned)
        self.found.raise_any()
        assert report is not None
        assert run is not None
        return Sweep(name, path, seeds, report, run, grammar.select, plugins, self.root, tuple(cells), grammar.tuned)

    def head(self) -> str:
        """Check `version` and `name`; return the name."""
        version, name = (self.parts.get(key) for key in ("version", "name"))
        if version is None or type(version.value) is not int or version.value != VERSION:
            at = version.at if version else self.root.at
            got = f", got {shown(version.plain())}" if version else ""
            self.found.add(at, f"version should be {VERSION}{got}")
        if name is None:
            self.found.add(self.root.at, '"name" is missing: the name of the folder under results/')
        elif not (isinstance(name.value, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name.value)):
            wanted = "letters, digits, dot, dash and underscore: it names a folder"
            self.found.add(name.at, f"name should be made of {wanted}, got {shown(name.plain())}")
        return str(name.value) if name else ""

    def plugins(self) -> tuple[str, ...]:
        """Python files by their path, which is relative to the file that wrote it; modules by their name."""
        found = []
        for node in sequence(self.parts.get("plugins"), "plugins", self.found):
            if not isinstance(node.value, str):
                self.found.add(
                    node.at, f"a plug-in is a Python file or the name of a module, got {shown(node.plain())}"
                )
                continue
            beside = Path(node.at.file).parent if node.at.line else Path()
            found.append(str(beside / node.value) if node.value.endswith(".py") else node.value)
        return tuple(found)

    def separate(self, seeds: Sequence[int], grammar: Grammar) -> None:
        """Tuning seeds must not meet the reported ones, or the choice has seen what it is judged by."""
        shared = sorted(set(seeds) & set(grammar.select.seeds)) if grammar.select else []
        if shared:
            at = self.root.nearest("sweep.select.seeds").at
            names = ", ".join(map(str, shared))
            self.found.add(at, f"seeds {names} are both tuned on and reported; give sweep.select other seeds")

    def overrides_count(self, cells: Sequence[Cell]) -> None:
        """An override that no cell shows is a misunderstanding."""
        used = {node.at for cell in cells for _, node in cell.source.leaves()}
        for name in SECTIONS:
            for path, node in self.parts.get(name, Node({}, self.root.at)).leaves(name):
                if node.at.line == 0 and node.at not in used:
                    swept = ("sweep.grid", "sweep.select.axes")
                    axes = [at for at in swept if path in (self.root.nearest(at).value or ())]
                    instead = f"override {axes[0]}.{path}=[{shown(node.plain())}]" if axes else "use --only"
                    self.found.add(node.at, f"has no effect: the sweep sets {path}; {instead}")

    def tabulate(self, report: Report, cells: Sequence[Cell], tuned: Collection[str]) -> None:
        """Rows and columns must exist and be given, not tuned; and no two cells may share a place in the table."""
        axes = list(dict.fromkeys(path for cell in cells for path in cell.axes))
        shows = [report.rows, *(report.columns if report.columns is not None else axes)]
        configs = [flat(cell.sections) for cell in cells]
        known = {path for config in configs for path in config} | {*NAMED, *known_paths(), *axes}
        for i, path in enumerate(shows):
            at = self.root.nearest("report.rows" if i == 0 else f"report.columns.{i - 1}").at
            if path in tuned:
                self.found.add(at, f'report: "{path}" is what sweep.select tunes, and no row or column of the table')
            elif path not in known:
                self.found.add(at, f'report: no cell has "{path}".{suggest(path, sorted(known))}')
        seen: dict[str, Cell] = {}
        hide = [path.removeprefix("mixer.") for path in shows if path.startswith("mixer.")]
        labels = mixer_labels([MixerSpec.model_validate(cell.sections.mixer) for cell in cells], hide)
        for cell, config, label in zip(cells, configs, labels, strict=True):
            spot = json.dumps([label if path == "mixer" else config.get(path) for path in shows])
            twin = seen.setdefault(spot, cell)
            if twin is not cell:
                apart = [path for path in axes if twin.axes.get(path) != cell.axes.get(path)]
                at = self.root.nearest("report.columns").at
                message = f"report: ({twin}) and ({cell}) would share one place in the table"
                self.found.add(at, f"{message}; add {' or '.join(apart)} to report.columns")
                break


def flat(sections: Sections) -> Args:
    """Every value of the sections by its dotted path."""

    def below(value: Any, prefix: str) -> Iterable[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield f"{prefix}.{key}", inner
                yield from below(inner, f"{prefix}.{key}")

    found = {path: value for name, part in sections.config().items() for path, value in below(part, name)}
    cells = (*sections.task.train_cells, *sections.task.eval_cells)
    return {f"task.{key}": None for cell in cells for key in cell} | found
