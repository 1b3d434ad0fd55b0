"""A diff as people and programs read it: grids for the terminal and for Markdown, and JSON."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from mixassay.runners import evidence, stats
from mixassay.runners.diff import FEW, FRESH, Change, Diff, Mixer, Rule, Verdict
from mixassay.runners.diff_bench import MARGIN, BenchChange
from mixassay.runners.evidence import ALPHA
from mixassay.runners.labels import short, spans
from mixassay.runners.progress import clock
from mixassay.runners.render import Cell, Grid
from mixassay.runners.sides import Side

Heads = tuple[tuple[str, ...], ...]

ARROW = {True: "↑", False: "↓"}


def grids(diff: Diff, names: tuple[str, str], *, everything: bool = False) -> Iterator[Grid]:
    """For each suite a verdict for each mixer, then its cells: those that changed in anything, or all."""
    for suite, group in groupby(diff.mixers, key=lambda mixer: mixer.suite):
        mixers = list(group)
        changes = [change for mixer in mixers for change in mixer.cells]
        title = f"{suite}, {names[0]} → {names[1]}: {diff.rule.metric} in points"
        yield of_mixers(mixers, title)
        shown = [change for change in changes if everything or change.verdict != "identical"]
        if shown:
            yield of_cells(shown, changes, diff, f"{suite}, cell by cell")


def of_mixers(mixers: Sequence[Mixer], title: str) -> Grid:
    rows = []
    for mixer in mixers:
        cells = counted(change.verdict for change in mixer.cells)
        numbers = points(mixer.delta, sign=True), chance(mixer.p), chance(mixer.p_adjusted)
        rows.append(tuple(map(Cell, (mixer.name, mixer.verdict, cells, *numbers))))
    heads: Heads = (("mixer",), ("verdict",), ("cells",), ("delta", "(median)"), ("p",), ("p", "(Holm)"))
    note = "verdict: the gravest of a mixer's cells and of all together; p: of their sum (Stouffer), Holm over mixers."
    return Grid(title, heads, tuple(rows), 1, bold(rows, 1), (note,), ())


def of_cells(shown: Sequence[Change], changes: Sequence[Change], diff: Diff, title: str) -> Grid:
    paths = list(dict.fromkeys(path for change in changes for path in change.place))
    rows = []
    for change in shown:
        place = [change.mixer, *(change.place.get(path, "") for path in paths)]
        mark = f" {ARROW[(change.delta or 0) > 0]}" if change.verdict == "suspect" else ""
        verdict = Cell(change.verdict + mark, small=tuple(notes(change, diff.rule)))
        means = [number(change.base, diff.rule), number(change.head, diff.rule)]
        rest = [points(change.delta, sign=True), of_seeds(change), chance(change.p), chance(change.p_adjusted)]
        rows.append((*map(Cell, place), verdict, *means, *map(Cell, rest)))
    swept = [(short(path),) for path in paths]
    heads: Heads = (("mixer",), *swept, ("verdict",), ("base",), ("head",), ("delta",), ("n",), ("p",), ("p", "(Holm)"))
    left = 1 + len(paths)
    return Grid(title, heads, tuple(rows), left, bold(rows, left), tuple(captions(changes, diff)), ())


def captions(changes: Sequence[Change], diff: Diff) -> Iterator[str]:
    rule, family = diff.rule, sum(change.compared for change in diff.changes)
    yield counted(change.verdict for change in changes)
    yield "mean ± sample std (ddof=1) over n seeds (before→after where they differ)."
    yield (
        f"p: twice the smaller of Welch's and the paired t test's, then by Holm's rule over {family} cells. A change:"
        f" p (Holm) <= {ALPHA:g} and |delta| >= {100 * rule.margin:g}; suspect: so by p alone."
    )
    if any(change.verdict == "no evidence" for change in changes):
        yield f"could have seen: a change that alone is seen in {evidence.POWER:.0%} of cases."
    if any(change.verdict == "single seed" for change in changes):
        yield f"single seed: fewer than {FEW} seeds on a side, so no verdict."


def notes(change: Change, rule: Rule) -> Iterator[str]:
    yield from change.notes
    found = change.evidence
    if change.fresh is not None:
        again = change.fresh
        seeds = spans(list(again.base.values)) if again.base else ""
        yield f"fresh seeds {seeds}: {points(again.delta, sign=True)}, p {chance(again.p_adjusted)}"
        found = again.evidence
    if change.verdict == "suspect" and change.base and change.head:
        cost = FRESH * (change.base.seconds + change.head.seconds)
        yield f"--confirm: {2 * FRESH} fresh runs, about {clock(cost)}"
    if change.verdict == "no evidence" and found is not None:
        seen, alone = float(found.smallest), float(found.welch.smallest(ALPHA))
        paired = found.paired is not None and seen < alone
        yield f"could have seen {points(seen)}" + (f" (paired seeds; {points(alone)} without)" if paired else "")
    if change.base and change.head and change.verdict in ("no evidence", "suspect"):
        yield from solving(change.base, change.head, rule)


def solving(base: Side, head: Side, rule: Rule) -> Iterator[str]:
    """Seeds that solve or fail are a count, of which five say little."""
    (k, n), (j, m) = ((stats.solved(list(s.values.values()), rule.solved_at), len(s.values)) for s in (base, head))
    if k == j or n != m:
        return
    from scipy.stats import boschloo_exact  # type: ignore[import-untyped]

    p = boschloo_exact([[k, j], [n - k, m - j]]).pvalue
    yield f"solved {k}/{n} → {j}/{m} (Boschloo p {chance(p)})" + (": needs 10 seeds" if max(n, m) < 10 else "")


def number(side: Side | None, rule: Rule) -> Cell:
    if side is None or side.moments is None:
        return Cell("–")
    values = list(side.values.values())
    solved, std = stats.solved(values, rule.solved_at), side.moments.std
    mark = f"({solved}/{len(values)} solved)" if 0 < solved < len(values) else ""
    return Cell(points(side.moments.mean) + (f" ± {points(std)}" if std is not None else ""), mark)


def of_seeds(change: Change) -> str:
    n = [str(len(side.values)) if side else "–" for side in (change.base, change.head)]
    return n[0] if n[0] == n[1] else "→".join(n)


def points(value: float | None, sign: bool = False) -> str:
    return "–" if value is None else f"{100 * value:{'+' if sign else ''}.1f}"


def chance(p: float | None) -> str:
    return "–" if p is None else f"{p:.2g}" if p >= 1e-3 else f"{p:.0e}"


def bold(rows: Sequence[tuple[Cell, ...]], column: int) -> frozenset[tuple[int, int]]:
    loud = ("regressed", "failed", "improved", "missing")
    return frozenset((i, column) for i, row in enumerate(rows) if row[column].text in loud)


def counted(verdicts: Iterable[Verdict]) -> str:
    return " · ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).items())


# -- benchmarks --------------------------------------------------------------------------------------------------------


def of_benches(changes: Sequence[BenchChange], names: tuple[str, str], *, everything: bool = False) -> Grid:
    """What all of them are about, but for the names that one looks for, is said once, below."""
    said = [set(change.about[:-1]) for change in changes]
    common = {text for text in set.intersection(*said) if text.split("=")[0] not in ("op", "mixer", "T", "pairs")}
    rows = []
    for change in changes:
        if everything or change.verdict not in ("equivalent", "new"):
            numbers = ["–", "–", "–"]
            if (ratios := change.ratios) is not None:
                b, h = (ratio.middle for ratio in ratios)
                numbers = [f"{b:.3g}", f"{h:.3g}", f"{100 * (h / b - 1):+.0f} %"]
            place = [" ".join(text for text in change.about[:-1] if text not in common), change.about[-1]]
            verdict = Cell(change.verdict, small=(change.note,) if change.note else ())
            rows.append((*map(Cell, place), verdict, *map(Cell, [change.reference or "–", *numbers])))
    heads = (("of",), ("pass",), ("verdict",), ("over",), ("base",), ("head",), ("change",))
    caption = (
        counted(change.verdict for change in changes),
        *([f"All: {' '.join(text for text in changes[0].about if text in common)}."] if common else []),
        "Our time over that of another, timed in turns with it in one process; times of two runs are not compared.",
        f"A change: {MARGIN:.0%} or more against everything timed beside it, and the middle 60 % of repeats apart.",
    )
    return Grid(f"Speed, {names[0]} → {names[1]}", heads, tuple(rows), 2, bold(rows, 2), caption, ())


# -- for programs ------------------------------------------------------------------------------------------------------


def to_json(diff: Diff, benches: Sequence[BenchChange], names: tuple[str, str], warnings: Sequence[str]) -> str:
    data = {
        "base": names[0],
        "head": names[1],
        "metric": diff.rule.metric,
        "margin": diff.rule.margin,
        "alpha": ALPHA,
        "std": "sample, ddof=1",
        "counts": diff.counts,
        "mixers": [
            {
                **{name: getattr(mixer, name) for name in ("suite", "name", "verdict", "delta", "p", "p_adjusted")},
                "cells": dict(Counter(change.verdict for change in mixer.cells)),
            }
            for mixer in diff.mixers
        ],
        "cells": [of_change(change) for change in diff.changes],
        "benches": [
            {
                "of": change.about,
                "verdict": change.verdict,
                "note": change.note,
                "base": dict(change.base.ratios) if change.base else None,
                "head": dict(change.head.ratios) if change.head else None,
            }
            for change in benches
        ],
        "warnings": warnings,
    }
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def of_change(change: Change) -> Mapping[str, Any]:
    found = change.evidence
    return {
        **{name: getattr(change, name) for name in ("cell", "suite", "mixer", "place", "verdict", "delta")},
        "base": of_side(change.base),
        "head": of_side(change.head),
        "p": change.p,
        "p_adjusted": change.p_adjusted,
        "p_welch": float(found.welch.p) if found else None,
        "p_paired": float(found.paired.p) if found and found.paired else None,
        "could_have_seen": float(found.smallest) if found else None,
        "notes": change.notes,
        "fresh": of_change(change.fresh) if change.fresh else None,
    }


def of_side(side: Side | None) -> Mapping[str, Any] | None:
    if side is None:
        return None
    m, any_run = side.moments, side.any
    return {
        "n": len(side.values),
        "mean": m.mean if m else None,
        "std": m.std if m else None,
        "values": {str(seed): value for seed, value in side.values.items()},
        "ended": {str(seed): record.status for seed, record in side.runs.items()},
        "tuned": any_run.tuned,
        "commit": any_run.code.commit,
        "source": any_run.code.source,
        "data": any_run.data,
        "env": any_run.env.get("class"),
    }
