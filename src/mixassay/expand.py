"""From the grammar to the cells: every point of grid x zip, after `when` and `exclude`, validated as a whole."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from mixassay.fields import SECTIONS, default, validate
from mixassay.grammar import Grammar, Rule
from mixassay.layers import place_all
from mixassay.registry import suggest
from mixassay.source import Node, Problems
from mixassay.spec import Args, Sections, plain, problems


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


class Expansion:
    """The cells of a grammar over the base sections. What is wrong with any goes to `found`."""

    def __init__(self, base: Node, grammar: Grammar, found: Problems) -> None:
        self.base, self.grammar, self.found = base, grammar, found
        self.whole = not found  # else parts were dropped, and nothing may be said to be missing
        self.valid: dict[tuple[str, str], BaseModel] = {}

    def cells(self) -> list[Cell]:
        grammar = self.grammar
        for name in SECTIONS:
            if self.base.child(name) is not None:
                self.section(name, self.base, partial=True)
        points, trees = [], []
        matched: set[int] = set()
        for choice in itertools.product(*grammar.dimensions):
            axes = {path: node for alternative in choice for path, node in alternative.items()}
            tree = place_all(self.base, axes)
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
                if self.whole and id(rule) not in matched:
                    self.found.add(rule.at, f"{kind} matches no cell: {unmatched(rule.conditions, trees)}")
        if not points:
            self.found.add(grammar.exclude[0].at, "every cell is excluded")
        cells = [cell for axes, tree in points if (cell := self.cell(axes, tree))]
        if self.whole:
            self.distinct(cells)
        return cells

    def cell(self, axes: dict[str, Node], tree: Node) -> Cell | None:
        """The cell at a point, checked with every candidate of `select`."""
        first = None
        for choice in choices(self.grammar.tuned):
            full = place_all(tree, choice)
            sections = self.sections(full, partial=not self.whole)
            if sections is not None and self.whole:
                for path, message in problems(sections):
                    self.found.add(full.nearest(path).at, message)
            if first is None and sections is not None:
                named = {path: node.plain() for path, node in axes.items()}
                first = Cell(sections, named, sections.fingerprint(without=self.grammar.tuned), full)
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
                at = next((n.at for p, n in cell.source.leaves() if twin.source.find(p) is not n), self.base.at)
                self.found.add(at, f"two cells are the same configuration: ({twin}) and ({cell})")


def choices(axes: Mapping[str, Sequence[Node]]) -> Iterator[dict[str, Node]]:
    """Every combination of one value for each path."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def applies(rule: Rule, tree: Node) -> bool:
    return all(matches(tree, path, value) for path, value in rule.conditions.items())


def matches(tree: Node, path: str, wanted: Any) -> bool:
    return is_wanted(actual_value(tree, path), wanted)


def is_wanted(actual: Any, wanted: Any) -> bool:
    """Whether it is this value, or one of these. A word matches a task or mixer of that name."""
    if isinstance(wanted, list) and not isinstance(actual, list):
        return any(is_wanted(actual, one) for one in wanted)
    if isinstance(actual, dict) and isinstance(wanted, str):
        return bool(actual.get("name") == wanted)
    return bool(actual == wanted and (type(actual) is bool) == (type(wanted) is bool))


def actual_value(tree: Node, path: str) -> Any:
    node = tree.find(path)
    return node.plain() if node is not None else default(path)


def unmatched(wanted: Mapping[str, Any], trees: Sequence[Node]) -> str:
    """Why no cell fits the conditions."""
    return none_of({path: [actual_value(tree, path) for tree in trees] for path in wanted}, wanted)


def none_of(values: Mapping[str, Sequence[Any]], wanted: Mapping[str, Any]) -> str:
    """The same, from what there is at each path."""
    for path, value in wanted.items():
        there = values[path]
        if not any(is_wanted(one, value) for one in there):
            names = [one["name"] if isinstance(one, dict) and "name" in one else one for one in there]
            words = list(dict.fromkeys(plain(one) for one in names))
            return f"none has {path}={plain(value)}.{suggest(plain(value), words)}"
    return "none has all of these values together"
