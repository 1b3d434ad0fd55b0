"""The grammar of a sweep file beyond the four sections: `sweep`, `seeds`, `report`, `run`.

    sweep:
      grid:    {train.batch_size: [64, 128], model.d_model: {range: [1, 3]}}     product of all paths
      zip:     {scale: [{task.seq_len: 64, task.num_kv: 4}, ...]}                the paths of a row go together
      select:  {axes: {train.lr: {logspace: [1.e-4, 1.e-2, 4]}}, by: valid/accuracy, seeds: [100, 101]}
      when:    [{if: {mixer: mamba2}, set: {model.block: mamba}}]                in order; later rules see earlier ones
      exclude: [{mixer: attention, model.d_model: 512}]

Every function reports to `problems` what it cannot use and goes on without it, so that a file's errors come together.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mixassay.fields import dotted, is_path, known_paths, shown, validate
from mixassay.registry import suggest
from mixassay.settings import Selection
from mixassay.source import Node, Place, Problems


@dataclass(frozen=True)
class Rule:
    """Where the cell has these values, these others are set (`when`), or the cell is left out (`exclude`)."""

    at: Place
    conditions: dict[str, Any]
    sets: dict[str, Node]


@dataclass(frozen=True)
class Grammar:
    """The `sweep` section. An alternative sets some paths at once; a dimension is a choice of alternatives."""

    dimensions: list[list[dict[str, Node]]]
    tuned: dict[str, list[Node]]
    select: Selection | None
    when: list[Rule]
    exclude: list[Rule]


def parse_sweep(node: Node, problems: Problems) -> Grammar:
    parts = mapping(node, "sweep", problems, known=("grid", "zip", "select", "when", "exclude"))
    dimensions: list[list[dict[str, Node]]] = []
    set_at: dict[str, Place] = {}
    for path, values in mapping(parts.get("grid"), "sweep.grid", problems).items():
        if path_is_free(path, values, set_at, problems):
            dimensions.append([{path: value} for value in axis(path, values, problems)])
    for name, rows in mapping(parts.get("zip"), "sweep.zip", problems).items():
        dimensions.append(zip_rows(name, rows, set_at, problems))
    tuned, select = parse_select(parts.get("select"), set_at, problems)
    when = rules(parts.get("when"), "when", tuned, problems)
    exclude = rules(parts.get("exclude"), "exclude", tuned, problems)
    return Grammar([d for d in dimensions if d], tuned, select, when, exclude)


def zip_rows(name: str, node: Node, set_at: dict[str, Place], problems: Problems) -> list[dict[str, Node]]:
    """The rows of one zip block, which must all set the same paths."""
    items = sequence(node, f"sweep.zip.{name}", problems)
    rows = [mapping(item, f'zip "{name}" row {i}', problems) for i, item in enumerate(items)]
    if not rows or not rows[0]:
        problems.add(node.at, f'zip "{name}" has no rows')
        return []
    first = rows[0]
    free = [path for path, value in first.items() if path_is_free(path, value, set_at, problems)]
    for i, (item, row) in enumerate(zip(items, rows, strict=True)):
        if isinstance(item.value, dict) and row.keys() != first.keys():
            keys = f"row {i} has keys [{', '.join(row)}], row 0 has [{', '.join(first)}]"
            problems.add(item.at, f'zip "{name}" {keys}')
    return [{path: row[path] for path in free} for row in rows if row.keys() == first.keys()] if free else []


def parse_select(
    node: Node | None, set_at: dict[str, Place], problems: Problems
) -> tuple[dict[str, list[Node]], Selection | None]:
    if node is None or node.value is None:
        return {}, None
    parts = mapping(node, "sweep.select", problems, known=("axes", "by", "seeds"))
    tuned: dict[str, list[Node]] = {}
    for path, values in mapping(parts.get("axes"), "sweep.select.axes", problems).items():
        if "." not in path or path.startswith("task."):
            at = values.key or values.at
            problems.add(at, f'"{path}" cannot be selected: only fields of mixer, model and train may be tuned')
        elif path_is_free(path, values, set_at, problems):
            tuned[path] = axis(path, values, problems)
    for part in ("axes", "seeds"):
        if part not in parts:
            problems.add(node.at, f'"sweep.select.{part}" is missing')
    seeds = parse_seeds(parts["seeds"], "sweep.select.seeds", problems) if "seeds" in parts else ()
    rest = {key: value for key, value in parts.items() if key == "by"}
    found = validate(Selection, replace(node, value=rest), "sweep.select", problems, given={"seeds": seeds})
    return {path: values for path, values in tuned.items() if values}, found


def rules(node: Node | None, kind: str, tuned: Iterable[str], problems: Problems) -> list[Rule]:
    """The entries of `when` or `exclude`."""
    found = []
    for i, item in enumerate(sequence(node, f"sweep.{kind}", problems)):
        what = f"sweep.{kind} {i}"
        parts = mapping(item, what, problems, known=("if", "set")) if kind == "when" else {"if": item}
        for part in ("if", "set") if kind == "when" else ():
            if part not in parts:
                problems.add(item.at, f'{what} needs "{part}"')
        conditions = mapping(parts.get("if"), f"{what} if", problems)
        sets = mapping(parts.get("set"), f"{what} set", problems)
        ok = bool(conditions)
        for path, value in [*conditions.items(), *sets.items()]:
            ok &= path_is_known(path, value, problems)
            if path in tuned:
                at = value.key or value.at
                problems.add(at, f"{kind} may not depend on or set {path}, which sweep.select tunes")
                ok = False
        if not conditions and parts.get("if") is not None:
            problems.add(item.at, f"{what} has no condition")
        if ok:
            found.append(Rule(item.at, {path: value.plain() for path, value in conditions.items()}, sets))
    return found


MOST = 10_000
"""Seeds, and values of an axis: more is a slip of the finger, and would fill the memory before anything is said."""


def parse_seeds(node: Node, what: str, problems: Problems) -> tuple[int, ...]:
    """[0, 1, 2], or "0-2". Empty where neither is found."""
    ends = re.fullmatch(r"([0-9]+)-([0-9]+)", node.value) if isinstance(node.value, str) else None
    if ends and int(ends[2]) - int(ends[1]) >= MOST:
        problems.add(node.at, f"{what} should name {MOST:,} seeds at most, got {shown(node.plain())}")
        return ()
    if ends:
        found = list(range(int(ends[1]), int(ends[2]) + 1))
    elif isinstance(node.value, list):
        found = [item.value for item in node.value if type(item.value) is int and item.value >= 0]
        for item in node.value:
            if not (type(item.value) is int and item.value >= 0):
                problems.add(item.at, f"a seed should be a whole number from 0, got {shown(item.plain())}")
    else:
        fault = f'{what} should be a list, or a range such as "0-4", got {shown(node.plain())}'
        if type(node.value) is int and node.value >= 0:
            fault += f": the seed alone is [{node.value}]" + (
                f', as many are "0-{node.value - 1}"' if node.value else ""
            )
        problems.add(node.at, fault)
        return ()
    if not found:
        problems.add(node.at, f"{what} is empty")
    if len(set(found)) < len(found):
        problems.add(node.at, f"{what} names seed {next(s for s in found if found.count(s) > 1)} twice")
    return tuple(found)


def axis(path: str, node: Node, problems: Problems) -> list[Node]:
    """The values of an axis: a list, {logspace: [from, to, n]} or {range: [from, to]}, ends included."""
    if isinstance(node.value, list) and node.value:
        return [replace(item, key=node.key) for item in node.value]
    ends = next(iter(node.value.items())) if isinstance(node.value, dict) and len(node.value) == 1 else ("", node)
    numbers = ends[1].plain()
    count = numbers[-1] if ends[0] == "logspace" else numbers[-1] - numbers[0] + 1 if is_numbers(numbers, 2) else 0
    if ends[0] in ("logspace", "range") and isinstance(numbers, list) and type(count) is int and count > MOST:
        problems.add(node.at, f"{path} should have {MOST:,} values at most, got {shown(node.plain())}")
        return []
    if ends[0] == "logspace" and is_numbers(numbers, 3) and numbers[0] > 0 < numbers[1] and is_count(numbers[2], 2):
        return [Node(value, node.at, node.key) for value in logspace(*numbers)]
    if (
        ends[0] == "range"
        and is_numbers(numbers, 2)
        and all(type(n) is int for n in numbers)
        and numbers[0] <= numbers[1]
    ):
        return [Node(value, node.at, node.key) for value in range(numbers[0], numbers[1] + 1)]
    wanted = "a list of values, {logspace: [from, to, how many]} or {range: [from, to]}"
    problems.add(node.at, f"{path} should have {wanted}, got {shown(node.plain())}")
    return []


def is_numbers(value: Any, n: int) -> bool:
    return isinstance(value, list) and len(value) == n and all(type(item) in (int, float) for item in value)


def is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def logspace(start: float, end: float, n: int) -> list[float]:
    """n numbers evenly spaced in the logarithm, to six digits: the same on every platform, and readable."""
    return [float(f"{start * (end / start) ** (i / (n - 1)):.6g}") for i in range(n)]


def path_is_free(path: str, node: Node, set_at: dict[str, Place], problems: Problems) -> bool:
    """Whether a known path is swept here for the first time."""
    if path in set_at:
        problems.add(node.key or node.at, f'"{path}" is swept twice (first at {set_at[path]})')
        return False
    set_at[path] = node.key or node.at
    return path_is_known(path, node, problems)


def path_is_known(path: str, node: Node, problems: Problems) -> bool:
    if not is_path(path):
        problems.add(node.key or node.at, f'sweep path "{path}" is not a config field.{suggest(path, known_paths())}')
    return is_path(path)


def mapping(node: Node | None, what: str, problems: Problems, known: Sequence[str] | None = None) -> dict[str, Node]:
    """The items of a mapping, without those whose keys are not among the known ones."""
    if node is None or node.value is None:
        return {}
    if not isinstance(node.value, dict):
        problems.add(node.at, f"{what} should be a mapping, got {shown(node.plain())}")
        return {}
    for key, value in node.value.items():
        if known is not None and key not in known:
            problems.add(value.key or value.at, f'unknown key "{dotted(what, key)}".{suggest(key, list(known))}')
    return {key: value for key, value in node.value.items() if known is None or key in known}


def sequence(node: Node | None, what: str, problems: Problems) -> list[Node]:
    if node is None or node.value is None:
        return []
    if isinstance(node.value, list):
        return node.value
    problems.add(node.at, f"{what} should be a list, got {shown(node.plain())}")
    return []
