"""Two sets of records to verdicts: what changed between them, what did not, and what cannot be told. Pure, no torch.

Cells pair by the hash of their configuration. A cell that was tried twice is judged by `evidence.py`; p is adjusted by
Holm's rule over all cells that were compared, and a change must also be as large as the margin:

    regressed, improved   adjusted p <= 0.05 and |delta| >= margin
    suspect               so without the adjustment: `--confirm` decides by fresh seeds alone
    equivalent            the change is bounded by the margin
    no evidence           none of these; a change as large as `smallest` would have been seen
    identical             every shared seed ended with the same numbers and weights
    failed                seeds that ended well before end badly now
    single seed           fewer than three seeds on a side: numbers, no verdict
    missing, new          on one side only
    not comparable        other data, no such metric, or another kind of machine

A mixer's verdict is the gravest of its cells', and of all its cells together: a shift that none of them shows can be
plain in their sum.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mixassay.record import SETTLED, RunRecord
from mixassay.runners import evidence
from mixassay.runners.evidence import Evidence
from mixassay.runners.labels import short
from mixassay.runners.sides import Side, by_cell, kind, pair
from mixassay.settings import Compare
from mixassay.spec import MixerSpec, mixer_labels, plain

Verdict = Literal[
    "regressed", "failed", "missing", "improved", "suspect", "not comparable",
    "single seed", "no evidence", "new", "equivalent", "identical",
]  # fmt: skip
"""The gravest first."""

VERDICTS: tuple[Verdict, ...] = Verdict.__args__  # type: ignore[attr-defined]

FEW = 3
"""Seeds that a test needs on each side."""

FRESH = 5
"""Seeds of a suspect's second trial."""


@dataclass(frozen=True)
class Rule:
    """What is compared, and which change matters."""

    metric: Literal["test/accuracy", "valid/accuracy"] = "test/accuracy"
    margin: float = Compare().margin
    solved_at: float = Compare().solved_at
    across_env: bool = False


@dataclass(frozen=True)
class Change:
    """One cell before and after. `fresh` is the same cell on the fresh seeds that decided about it, if any did."""

    cell: str
    suite: str
    mixer: str
    place: Mapping[str, str]  # what else is swept: path -> value
    base: Side | None
    head: Side | None
    verdict: Verdict
    notes: tuple[str, ...] = ()
    evidence: Evidence | None = None
    p_adjusted: float | None = None
    fresh: "Change | None" = None

    @property
    def delta(self) -> float | None:
        b, h = (side.moments if side else None for side in (self.base, self.head))
        return h.mean - b.mean if b and h else None

    @property
    def p(self) -> float | None:
        return float(self.evidence.p) if self.evidence else None

    @property
    def compared(self) -> bool:
        """Whether it is one of the cells that a false alarm could come from."""
        return self.evidence is not None or self.verdict == "identical"


@dataclass(frozen=True)
class Mixer:
    """All cells of a mixer. `delta` is the median of those that were compared, `p` of them together."""

    suite: str
    name: str
    cells: tuple[Change, ...]
    verdict: Verdict
    delta: float | None = None
    p: float | None = None
    p_adjusted: float | None = None


@dataclass(frozen=True)
class Diff:
    rule: Rule
    changes: tuple[Change, ...]
    mixers: tuple[Mixer, ...]
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[Verdict, int]:
        """Verdict -> cells."""
        found = Counter(change.verdict for change in self.changes)
        return {verdict: found[verdict] for verdict in VERDICTS if found[verdict]}

    @property
    def suspects(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "suspect"]

    @property
    def verdicts(self) -> set[Verdict]:
        """All that were given, to a cell or a mixer."""
        found: set[Verdict] = {change.verdict for change in self.changes}
        found.update(mixer.verdict for mixer in self.mixers)
        return found


def compare(base: Iterable[RunRecord], head: Iterable[RunRecord], rule: Rule) -> Diff:
    """The reported runs of two sets, cell by cell."""
    before, after = by_cell(base), by_cell(head)
    sides = {cell: pair(before.get(cell, []), after.get(cell, []), rule.metric) for cell in {**before, **after}}
    changes = [look(change, rule) for change in named(sides)]
    return gathered(decide_all(changes, rule.margin), rule)


def confirmed(diff: Diff, fresh: Mapping[str, tuple[Sequence[RunRecord], Sequence[RunRecord]]]) -> Diff:
    """The diff with its suspects decided by fresh runs alone: cell -> runs of base, of head.

    The same test, adjusted over the suspects; the change must go the same way. A suspect without fresh runs remains.
    """
    tried = {}
    for change in diff.suspects:
        base, head = pair(*fresh.get(change.cell, ((), ())), diff.rule.metric)
        tried[change.cell] = look(replace(change, base=base, head=head, notes=(), evidence=None), diff.rule)
    decided = decide_all([again for again in tried.values() if again.compared], diff.rule.margin)
    tried |= {again.cell: again for again in decided}
    changes = [upheld(change, tried[change.cell]) if change.cell in tried else change for change in diff.changes]
    return gathered(changes, diff.rule)


def upheld(change: Change, again: Change) -> Change:
    """A suspect after its second trial."""
    if not again.compared and again.verdict != "failed":
        return replace(change, notes=(*change.notes, "fresh runs gave no test", *again.notes))
    way = (change.delta or 0) * (again.delta or 0) > 0
    if again.verdict == "suspect" or (again.verdict in ("regressed", "improved") and not way):
        return replace(change, verdict="no evidence", fresh=again)
    return replace(change, verdict="equivalent" if again.verdict == "identical" else again.verdict, fresh=again)


# -- names -------------------------------------------------------------------------------------------------------------


def named(sides: Mapping[str, tuple[Side | None, Side | None]]) -> list[Change]:
    """Pairs under their names, suite by suite, mixer by mixer."""
    found = []
    suites: dict[str, list[str]] = {}
    records = {cell: (head or base).any for cell, (base, head) in sides.items() if head or base}  # type: ignore[union-attr]
    for cell, record in records.items():
        suites.setdefault(record.suite, []).append(cell)
    for suite, cells in sorted(suites.items()):
        labels = mixer_labels([MixerSpec.model_validate(records[cell].config["mixer"]) for cell in cells])
        axes = [{path: v for path, v in records[cell].axes.items() if path.split(".")[0] != "mixer"} for cell in cells]
        paths = [path for path in dict.fromkeys(path for swept in axes for path in swept)]
        varying = [path for path in paths if len({plain(swept.get(path)) for swept in axes}) > 1]
        order = {label: i for i, label in enumerate(dict.fromkeys(labels))}
        rows = sorted(
            zip(cells, labels, axes, strict=True),
            key=lambda row: (order[row[1]], [sorting(row[2].get(path)) for path in varying]),
        )
        for cell, label, swept in rows:
            place = {path: plain(swept[path]) for path in varying if path in swept}
            found.append(Change(cell, suite, label, place, *sides[cell], verdict="no evidence"))
    return found


def sorting(value: Any) -> tuple[bool, float, str]:
    number = isinstance(value, (int, float))
    return not number, value if number else 0.0, plain(value)


# -- what they say -----------------------------------------------------------------------------------------------------


def look(change: Change, rule: Rule) -> Change:
    """The verdict that needs no test, or the evidence for one."""
    base, head = change.base, change.head
    if base is None or head is None:
        return replace(change, verdict="missing" if head is None else "new")
    if (reason := incomparable(base, head, rule)) is not None:
        return replace(change, verdict="not comparable", notes=(reason,))
    notes = tuple(remarks(base, head))
    if identical(base, head):
        return replace(change, verdict="identical", notes=notes)
    lost = [seed for seed in base.values if seed in head.runs and seed not in head.values]
    verdict: Verdict = "failed" if lost else "no evidence"
    if min(len(base.values), len(head.values)) < FEW:
        return replace(change, verdict="failed" if lost else "single seed", notes=notes)
    return replace(change, verdict=verdict, notes=notes, evidence=weigh(base, head))


def incomparable(base: Side, head: Side, rule: Rule) -> str | None:
    b, h = base.any, head.any
    if b.data != h.data:
        return f"data {b.data} → {h.data}"
    if kind(b) != kind(h) and not rule.across_env:
        return f"{kind(b)} → {kind(h)}; --across-env compares"
    for what, side in (("before", base), ("after", head)):
        if not side.values and any(record.status == "ok" for record in side.runs.values()):
            return f"no {rule.metric} {what}"
    return None


def remarks(base: Side, head: Side) -> Iterable[str]:
    """What must be said beside the numbers."""
    b, h = base.any.tuned, head.any.tuned
    if b != h:
        paths = [path for path in {**b, **h} if b.get(path) != h.get(path)]
        yield ", ".join(f"{short(path)} {plain(b.get(path))} → {plain(h.get(path))}" for path in paths)
    for when, side, other in (("before", base, head), ("after", head, base)):
        ended = Counter(record.status for seed, record in side.runs.items() if seed not in side.values)
        told = [f"{count} {status}" for status, count in sorted(ended.items())]
        absent = sum(seed not in side.runs for seed in other.runs)
        told += [f"{absent} not run"] if absent else []
        if told:
            yield f"{when}: {', '.join(told)}"


def identical(base: Side, head: Side) -> bool:
    """Bit for bit, in all that was measured, for every seed that ran on both sides."""
    shared = [(base.runs[seed], head.runs[seed]) for seed in base.runs if seed in head.runs]
    return bool(shared) and all(
        (x.status, x.metrics, x.eval, x.weights) == (y.status, y.metrics, y.eval, y.weights) and x.status in SETTLED
        for x, y in shared
    )


def weigh(base: Side, head: Side) -> Evidence:
    shared = [seed for seed in base.values if seed in head.values]
    (b, bf), (h, hf) = base.arrays(list(base.values)), head.arrays(list(head.values))
    welch = evidence.welch(b, h, bf, hf)
    if len(shared) < FEW:
        return Evidence(welch, None)
    (b, bf), (h, hf) = base.arrays(shared), head.arrays(shared)
    return Evidence(welch, evidence.paired(b, h, bf, hf))


def decide_all(changes: Sequence[Change], margin: float) -> list[Change]:
    """The verdicts of a family of tests."""
    family = [change for change in changes if change.compared]
    p = np.array([change.p if change.p is not None else 1.0 for change in family])
    adjusted = {change.cell: float(p) for change, p in zip(family, evidence.holm(p), strict=True)}
    return [decide(replace(change, p_adjusted=adjusted.get(change.cell)), margin) for change in changes]


def decide(change: Change, margin: float) -> Change:
    found = change.evidence
    if found is None:
        return change
    d = np.asarray(change.delta)
    way: Verdict = "regressed" if d < 0 else "improved"
    if evidence.is_change(np.asarray(change.p_adjusted), d, margin) and (change.verdict, way) != ("failed", "improved"):
        return replace(change, verdict=way)
    if change.verdict == "failed":
        return change
    if evidence.is_change(found.p, d, margin):
        return replace(change, verdict="suspect")
    return replace(change, verdict="equivalent" if found.equivalent(margin) else "no evidence")


# -- mixers ------------------------------------------------------------------------------------------------------------


def gathered(changes: Sequence[Change], rule: Rule) -> Diff:
    groups: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        groups.setdefault((change.suite, change.mixer), []).append(change)
    tested = {key: sum_up(cells) for key, cells in groups.items()}
    family = [key for key, found in tested.items() if found is not None]
    p = np.array([found[1] for found in tested.values() if found is not None])
    adjusted = dict(zip(family, evidence.holm(p), strict=True))
    mixers = []
    for key, cells in groups.items():
        found = tested[key]
        verdicts: set[Verdict] = {change.verdict for change in cells}
        delta, p_all, p_adjusted = (*found, float(adjusted[key])) if found else (None, None, None)
        if delta is not None and evidence.is_change(np.asarray(p_adjusted), np.asarray(delta), rule.margin):
            verdicts.add("regressed" if delta < 0 else "improved")
        mixers.append(Mixer(*key, tuple(cells), min(verdicts, key=VERDICTS.index), delta, p_all, p_adjusted))
    return Diff(rule, tuple(changes), tuple(mixers), tuple(warnings(changes)))


def sum_up(cells: Sequence[Change]) -> tuple[float, float] | None:
    """Median change and p of a mixer's cells together; an identical cell counts as one without any change."""
    compared = [change for change in cells if change.compared]
    known = [change.evidence for change in compared if change.evidence is not None]
    if not compared:
        return None
    still = np.zeros(len(compared) - len(known))
    lenses = [[found.welch.z for found in known]]
    if all(found.paired is not None for found in known):
        lenses.append([found.paired.z for found in known if found.paired is not None])
    deltas = np.array([change.delta or 0.0 for change in compared])
    delta, p = evidence.together([np.append(still, z) for z in lenses], deltas)
    return float(delta), float(p)


def warnings(changes: Sequence[Change]) -> Iterable[str]:
    both = [(change.base.any, change.head.any) for change in changes if change.base and change.head]
    kinds = sorted({f"{kind(b)} → {kind(h)}" for b, h in both if kind(b) != kind(h)})
    if kinds:
        yield f"base and head ran on different kinds of machine: {'; '.join(kinds)}"
    elif any(b.env.get("id") != h.env.get("id") for b, h in both):
        yield "base and head ran on machines of one kind that are not the same in everything (see env of the records)"
