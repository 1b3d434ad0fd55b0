"""A sweep file: one YAML file that says which runs make a table. Reading it imports neither torch nor plug-ins.

    sweep = Sweep.load("configs/quickstart.yaml", overrides=["train.steps=100"])
    for cell in sweep.cells():
        runs = sweep.tuning(cell)                      # every candidate of `select`, on the tuning seeds
        runs = sweep.reported(cell, {"train.lr": 1e-3})  # what the table shows, on the reported seeds

A cell is what the table compares: one point of grid x zip, after `when` and `exclude`. Everything is checked for every
cell when the file is loaded, except what only the code of a task or mixer knows: see `check.py`.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mixassay.errors import UserError
from mixassay.fields import SECTIONS, default, known_paths, shown, validate
from mixassay.grammar import Grammar, Rule, mapping, parse_seeds, parse_sweep, sequence
from mixassay.layers import NAMED, override, place_all, read_extended, spell_out
from mixassay.registry import suggest
from mixassay.settings import Report, Run, Selection
from mixassay.source import Node, Problems, assignment
from mixassay.spec import Args, MixerSpec, RunSpec, Sections, mixer_labels, plain, problems

VERSION = 1
"""Version of the grammar, which every file states."""

KEYS = ("version", "name", "plugins", "extends", *SECTIONS, "sweep", "seeds", "report", "run")


@dataclass(frozen=True)
class Cell:
    """What one place of the table is made of.

    `sections` hold the first candidate of what `select` tunes; `cell` is the hash that all runs of this cell share.
    """

    sections: Sections
    axes: Args
    cell: str
    source: Node = field(repr=False, compare=False)

    def __str__(self) -> str:
        return ", ".join(f"{path}={plain(value)}" for path, value in self.axes.items()) or "the only cell"


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
    pairs = [assignment(part, found) for part in re.split(r",(?=[\w.]+=)", text)]
    found.raise_any()
    return {path: node.plain() for path, node in pairs}


class Reading:
    """One file on its way to a `Sweep`: every step adds what it finds wrong to `found`."""

    def __init__(self, root: Node, found: Problems) -> None:
        self.root, self.found = root, found
        self.valid: dict[tuple[str, str], BaseModel] = {}

    def sweep(self, path: Path) -> Sweep:
        parts = self.parts = mapping(self.root, "", self.found, known=KEYS)
        name = self.head()
        seeds = parse_seeds(parts["seeds"], "seeds", self.found) if "seeds" in parts else (0,)
        report = validate(Report, parts.get("report", Node({}, self.root.at)), "report", self.found)
        run = validate(Run, parts.get("run", Node({}, self.root.at)), "run", self.found)
        plugins = self.plugins()
        grammar = parse_sweep(parts.get("sweep", Node({}, self.root.at)), self.found)
        self.separate(seeds, grammar)
        cells = self.expand(grammar)
        if report is not None and not self.found:
            self.tabulate(report, cells)
        self.found.raise_any()
        assert report is not None
        assert run is not None
        return Sweep(name, path, seeds, report, run, grammar.select, plugins, self.root, tuple(cells), grammar.tuned)

    def head(self) -> str:
        """Check `version` and `name`; return the name."""
        version, name = (self.parts.get(key) for key in ("version", "name"))
        if version is None or version.value != VERSION:
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
            is_file = str(node.value).endswith(".py")
            beside = Path(node.at.file).parent if node.at.line else Path()
            found.append(str(beside / node.value) if is_file else str(node.value))
        return tuple(found)

    def separate(self, seeds: Sequence[int], grammar: Grammar) -> None:
        """Tuning seeds must not meet the reported ones, or the choice has seen what it is judged by."""
        shared = sorted(set(seeds) & set(grammar.select.seeds)) if grammar.select else []
        if shared:
            at = self.root.nearest("sweep.select.seeds").at
            names = ", ".join(map(str, shared))
            self.found.add(at, f"seeds {names} are both tuned on and reported; give sweep.select other seeds")

    def expand(self, grammar: Grammar) -> list[Cell]:
        whole = not self.found  # else parts are missing, and with them the right to miss anything
        base = spell_out(Node({k: v for k, v in self.parts.items() if k in SECTIONS}, self.root.at))
        for name in SECTIONS:
            if base.child(name) is not None:
                self.section(name, base, partial=True)
        points, trees = [], []
        matched: set[int] = set()
        for choice in itertools.product(*grammar.dimensions):
            axes = {path: node for alternative in choice for path, node in alternative.items()}
            tree = place_all(base, axes)
            for rule in grammar.when:
                if applies(rule, tree):
                    matched.add(id(rule))
                    tree = place_all(tree, rule.sets)
            trees.append(tree)
            out = [rule for rule in grammar.exclude if applies(rule, tree)]
            matched.update(map(id, out))
            if not out:
                points.append((axes, tree))
        for kind, rules in (("when", grammar.when), ("exclude", grammar.exclude)):
            for rule in rules:
                if whole and id(rule) not in matched:
                    self.found.add(rule.at, f"{kind} matches no cell: {unmatched(rule.conditions, trees)}")
        if not points:
            self.found.add(self.root.nearest("sweep.exclude").at, "every cell is excluded")
        cells = [cell for axes, tree in points if (cell := self.cell(axes, tree, grammar, whole))]
        if whole:
            self.distinct(cells)
            self.overrides_count([tree for _, tree in points])
        return cells

    def cell(self, axes: dict[str, Node], tree: Node, grammar: Grammar, whole: bool) -> Cell | None:
        """The cell at a point, checked with every candidate of `select`."""
        first = None
        for choice in choices(grammar.tuned):
            full = place_all(tree, choice)
            sections = self.sections(full, partial=not whole)
            if sections is not None and whole:
                for path, message in problems(sections):
                    self.found.add(full.nearest(path).at, message)
            if first is None and sections is not None:
                named = {path: node.plain() for path, node in axes.items()}
                first = Cell(sections, named, sections.fingerprint(without=grammar.tuned), full)
        return first

    def sections(self, tree: Node, partial: bool) -> Sections | None:
        parts: dict[str, Any] = {name: self.section(name, tree, partial) for name in SECTIONS}
        return None if None in parts.values() else Sections(**parts)

    def section(self, name: str, tree: Node, partial: bool) -> BaseModel | None:
        node = tree.child(name) or Node({}, tree.at)
        key = name, json.dumps(node.plain())
        if key not in self.valid:
            model = validate(SECTIONS[name], node, name, self.found, partial=partial)
            if model is None:
                return None
            self.valid[key] = model
        return self.valid[key]

    def distinct(self, cells: Sequence[Cell]) -> None:
        """Two cells that are one and the same would be one run counted as two."""
        seen: dict[str, Cell] = {}
        for cell in cells:
            twin = seen.setdefault(cell.cell, cell)
            if twin is not cell:
                at = next((n.at for p, n in cell.source.leaves() if twin.source.find(p) is not n), self.root.at)
                self.found.add(at, f"two cells are the same configuration: ({twin}) and ({cell})")

    def overrides_count(self, trees: Sequence[Node]) -> None:
        """An override that no cell shows is a misunderstanding."""
        used = {node.at for tree in trees for _, node in tree.leaves()}
        for name in SECTIONS:
            for path, node in self.parts.get(name, Node({}, self.root.at)).leaves(name):
                if node.at.line == 0 and node.at not in used:
                    swept = f"sweep.grid.{path}=[{shown(node.plain())}]"
                    self.found.add(node.at, f"has no effect: the sweep sets {path}; override {swept}, or use --only")

    def tabulate(self, report: Report, cells: Sequence[Cell]) -> None:
        """Rows and columns must exist, and no two cells may share a place in the table."""
        axes = list(dict.fromkeys(path for cell in cells for path in cell.axes))
        shows = [report.rows, *(report.columns if report.columns is not None else axes)]
        configs = [flat(cell.sections) for cell in cells]
        known = {path for config in configs for path in config} | {*NAMED, *known_paths(), *axes}
        for i, path in enumerate(shows):
            if path not in known:
                at = self.root.nearest("report.rows" if i == 0 else f"report.columns.{i - 1}").at
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


def choices(axes: Mapping[str, Sequence[Node]]) -> Iterator[dict[str, Node]]:
    """Every combination of one value for each path."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def applies(rule: Rule, tree: Node) -> bool:
    return all(matches(tree, path, value) for path, value in rule.conditions.items())


def matches(tree: Node, path: str, wanted: Any) -> bool:
    """Whether a cell has this value at a path, or one of these. A word matches a task or mixer of that name."""
    actual = actual_value(tree, path)
    if isinstance(wanted, list) and not isinstance(actual, list):
        return any(matches(tree, path, one) for one in wanted)
    if isinstance(actual, dict) and isinstance(wanted, str):
        return bool(actual.get("name") == wanted)
    return bool(actual == wanted and (type(actual) is bool) == (type(wanted) is bool))


def actual_value(tree: Node, path: str) -> Any:
    node = tree.find(path)
    return node.plain() if node is not None else default(path)


def unmatched(wanted: Mapping[str, Any], trees: Sequence[Node]) -> str:
    """Why no cell fits the conditions."""
    for path, value in wanted.items():
        if not any(matches(tree, path, value) for tree in trees):
            there = [actual_value(tree, path) for tree in trees]
            names = [one["name"] if isinstance(one, dict) and "name" in one else one for one in there]
            words = list(dict.fromkeys(plain(one) for one in names))
            return f"none has {path}={plain(value)}.{suggest(plain(value), words)}"
    return "none has all of these values together"


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
