"""Tables and heatmaps of stored evaluations. Nothing here imports torch.

A number is the mean over seeds of the mean over samples, in points, with the deviation over seeds where there are
several: training seeds of our runs, data seeds of a model that there is once. With one seed it stands with the standard
error over its samples. A mean over tasks is given where all the table's tasks have a number at that length.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import stats
from mixassay.runners.labels import spans
from mixassay.runners.marks import Figure, Heatmap, Shade
from mixassay.runners.render import Cell, Grid
from mixassay.spec import MixerSpec, mixer_labels

METRIC = "test/accuracy"
GROUPS = ("difficulty", "length")
"""Kinds of groups of questions that have columns of their own."""
ORDER = {"easy": 0, "hard": 1, "short": 2, "medium": 3, "long": 4}
"""Of groups whose names are not in it."""


@dataclass(frozen=True)
class Place:
    """One model at one task and length."""

    model: str
    task: str
    length: int | None
    records: tuple[RunRecord, ...]  # one for each seed, alike in data, settings and code

    @property
    def values(self) -> dict[int, float]:
        return {r.seed: value for r in self.records if (value := r.metrics.get(METRIC)) is not None}

    @property
    def samples(self) -> int:
        """Of each seed."""
        return int(self.records[0].config["task"]["samples"])

    @property
    def seeds(self) -> frozenset[int]:
        return frozenset(self.values)

    def group(self, kind: str, name: str) -> tuple[dict[int, float], int]:
        """The scores of a group of questions, by seed, and of how many questions each is."""
        found = {r.seed: cell for r in self.records for cell in r.eval if cell.cell == {kind: name}}
        values = {seed: cell.accuracy for seed, cell in found.items() if cell.accuracy is not None}
        return values, max((cell.rows for cell in found.values()), default=0)


@dataclass(frozen=True)
class Evaluations:
    """`places` in the order of tasks, then models, then lengths."""

    suite: str
    places: tuple[Place, ...]
    aside: int  # records of other settings, data or code, left out

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(place.model for place in self.places))

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(place.task for place in self.places))

    @property
    def lengths(self) -> list[int | None]:
        return sorted({place.length for place in self.places}, key=lambda length: length or 0)

    @property
    def groups(self) -> list[tuple[str, str]]:
        """Kinds and names of the groups of questions that have columns of their own."""
        cells = [cell.cell for place in self.places for record in place.records for cell in record.eval]
        there = {(kind, str(cell[kind])) for cell in cells for kind in GROUPS if kind in cell}
        return sorted(there, key=lambda group: (GROUPS.index(group[0]), ORDER.get(group[1], 0), group[1]))

    def seeds(self, model: str) -> frozenset[int]:
        """That its numbers are of where none is missing: those of all models, if one has them all, else its own."""
        each = {
            name: frozenset[int]().union(*(p.seeds for p in self.places if p.model == name)) for name in self.models
        }
        every = frozenset[int]().union(*each.values())
        return every if every in each.values() else each[model]

    def at(self, model: str, task: str, length: int | None) -> Place | None:
        return next((p for p in self.places if (p.model, p.task, p.length) == (model, task, length)), None)


def is_evaluation(record: RunRecord) -> bool:
    return record.samples is not None


def collect(records: Iterable[RunRecord]) -> Evaluations:
    """Raises `UserError` where there is no record of an evaluation."""
    wanted = [record for record in records if is_evaluation(record) and record.status == "ok"]
    if not wanted:
        raise UserError(
            "no record of an evaluation; `mixassay eval` makes them, and a sweep's table is that of its file"
        )
    names = labels(wanted)
    groups: dict[tuple[str, str, int | None], list[RunRecord]] = {}
    for record in wanted:
        task = record.config["task"]
        groups.setdefault((names[model(record)], task["name"], task["length"]), []).append(record)
    tasks = list(dict.fromkeys(task for _, task, _ in groups))
    places, aside = [], 0
    for at in sorted(groups, key=lambda at: (tasks.index(at[1]), list(names.values()).index(at[0]), at[2] or 0)):
        chosen = newest(groups[at])
        aside += len(groups[at]) - len(chosen)
        places.append(Place(*at, tuple(chosen)))
    return Evaluations(wanted[0].suite, tuple(places), aside)


def newest(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Of all settings, data and code the newest, one record for each seed."""
    versions: dict[Any, dict[int, RunRecord]] = {}
    for record in records:
        versions.setdefault((record.cell, record.data, record.code.source), {})[record.seed] = record
    best = max(versions.values(), key=lambda runs: max(record.time.start for record in runs.values()))
    return [best[seed] for seed in sorted(best)]


def model(record: RunRecord) -> str:
    """What the runs of one model have in common but their seed."""
    config = record.config
    train = {name: value for name, value in config["train"].items() if name != "source"}
    return json.dumps([config["mixer"], config["model"], train], sort_keys=True)


def labels(records: Sequence[RunRecord]) -> dict[str, str]:
    """A name for each model; its parameters and a number where the mixer's name does not tell two apart."""
    firsts = {model(record): record for record in records}
    mixers = mixer_labels([MixerSpec.model_validate(record.config["mixer"]) for record in firsts.values()])
    names: dict[str, str] = {}
    for key, name, record in zip(firsts, mixers, firsts.values(), strict=True):
        if mixers.count(name) > 1:
            name = f"{name} {record.params:,}"
        if taken := sum(other.split(" #")[0] == name for other in names.values()):
            name = f"{name} #{taken + 1}"
        names[key] = name
    return names


MISSING = Cell("–")


def grid(found: Evaluations) -> Grid:
    """A row for each task and model, a column for each length, and for each group of questions where there are some."""
    heads = tuple((f"{length:,}" if length is not None else "score",) for length in found.lengths)
    rows = []
    for task in found.tasks:
        for name in found.models:
            places = [found.at(name, task, length) for length in found.lengths]
            if any(places):
                cells = [number(place, len(found.seeds(name))) for place in places]
                cells += [part(places[0], group, len(found.seeds(name))) for group in found.groups]
                rows.append((Cell(task), Cell(name), *cells))
    if len(found.tasks) > 1:
        for name in found.models:
            means = [mean_of_tasks(found, name, length) for length in found.lengths]
            means += [mean_of_tasks(found, name, None, group) for group in found.groups]
            if any(cell != MISSING for cell in means):
                rows.append((Cell(f"mean of {len(found.tasks)}"), Cell(name), *means))
    return Grid(
        title=found.suite,
        heads=(("task",), ("model",), *heads, *((name,) for _, name in found.groups)),
        rows=tuple(rows),
        left=2,
        bold=frozenset(),
        caption=tuple(caption(found)),
        warnings=tuple(warnings(found)),
    )


def number(place: Place | None, of: int) -> Cell:
    """`of`: how many seeds there should be."""
    if place is None or not place.values:
        return MISSING
    m = stats.moments(list(place.values.values()))
    error = place.records[0].metrics.get("test/stderr")
    spread = f" (se {100 * error:.1f})" if m.std is None and error is not None else ""
    return Cell(points(m) + spread, fewer(m.n, of), (count(m.n, place.samples),))


def part(place: Place | None, group: tuple[str, str], of: int) -> Cell:
    """The mean over seeds of a group's score; sets with groups have no lengths."""
    values, n = place.group(*group) if place is not None else ({}, 0)
    if not values:
        return MISSING
    m = stats.moments(list(values.values()))
    return Cell(points(m), fewer(m.n, of), (count(m.n, n),))


def mean_of_tasks(found: Evaluations, name: str, length: int | None, group: tuple[str, str] | None = None) -> Cell:
    """Of each seed that has a score for every task its mean over them, of a group where one is given."""
    places = [found.at(name, task, length) for task in found.tasks]
    values = [(place.group(*group)[0] if group else place.values) if place is not None else {} for place in places]
    seeds = sorted(set.intersection(*(set(each) for each in values)))
    if not seeds:
        return MISSING
    m = stats.moments([fmean(each[seed] for each in values) for seed in seeds])
    return Cell(points(m), fewer(m.n, len(found.seeds(name))))


def fewer(seeds: int, of: int) -> str:
    return f"({seeds}/{of})" if seeds < of else ""


def count(seeds: int, samples: int) -> str:
    return f"n={seeds}x{samples}" if seeds > 1 else f"n={samples}"


def points(m: stats.Moments) -> str:
    return f"{100 * m.mean:.1f}" + (f" ± {100 * m.std:.1f}" if m.std is not None else "")


def caption(found: Evaluations) -> list[str]:
    records = [record for place in found.places for record in place.records]
    counts = sorted({place.samples for place in found.places})
    lines = [
        "Scores in points"
        + (": mean ± sample std (ddof=1) over seeds" if any(len(p.seeds) > 1 for p in found.places) else "")
        + (", (se) the standard error over samples" if any(len(p.seeds) == 1 for p in found.places) else "")
        + f"; {'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} samples a seed."
    ]
    lines.append(f"{seeds(found)}. A canary that knows the answers and one that knows none ran before.")
    for metric, says in SHARES.items():
        known = [(at(p), record.metrics.get(metric)) for p in found.places for record in p.records]
        shares = [(place, share) for place, share in known if share is not None]
        if any(share != SILENT.get(metric) for _, share in shares):
            each = dict.fromkeys(f"{place} {100 * share:.0f} %" for place, share in shares)
            lines.append(f"{says}: {', '.join(each)}.")
    lines += wrong_needles(found)
    short = [(at(p), record.metrics.get("test/best_possible") or 1) for p in found.places for record in p.records]
    if any(best < 1 - 1e-6 for _, best in short):
        each = dict.fromkeys(f"{place} {100 * best:.1f}" for place, best in short if best < 1 - 1e-6)
        lines.append(f"The answer's budget allows at most: {', '.join(each)}.")
    commits = sorted({record.code.name for record in records})
    lines.append(f"Code {', '.join(commits)}; on {'; '.join(sorted({str(r.env.get('class')) for r in records}))}.")
    return lines


def seeds(found: Evaluations) -> str:
    """`Seeds 0-2`, once for all models where they have the same."""
    each = {name: found.seeds(name) for name in found.models}
    if len(set(each.values())) == 1:
        said = spans(sorted(each[found.models[0]]))
    else:
        said = "; ".join(f"{spans(sorted(of))} of {name}" for name, of in each.items())
    short = any(place.seeds < each[place.model] for place in found.places)
    return f"Seeds {said}" + ("; a cell with fewer says how many" if short else "")


SHARES = {
    "test/cut_prompts": "Prompts that were cut to fit",
    "test/answer_in_prompt": "Prompts that hold an answer",
    "test/unread": "Answers that name no choice, and are wrong",
}
SILENT = {"test/cut_prompts": 0.0, "test/unread": 0.0}
"""Shares that are not worth a line where all are so."""


def wrong_needles(found: Evaluations) -> list[str]:
    """How many of the wrong answers are the value of a needle that was not asked for: found, and not told apart."""
    lines = []
    for task in found.tasks:
        said = []
        for name in found.models:
            of = [(p.samples, r.metrics) for p in found.places if (p.model, p.task) == (name, task) for r in p.records]
            known = [(n, m["test/wrong_needle"], m[METRIC]) for n, m in of if m.get("test/wrong_needle") is not None]
            wrong = round(sum(n * (1 - (score or 0)) for n, _, score in known))
            if wrong:
                said.append(f"{100 * sum(n * (share or 0) for n, share, _ in known) / wrong:.0f} % of {wrong} ({name})")
        if said:
            lines.append(f"Wrong answers to {task} that are another needle's value: {', '.join(said)}.")
    return lines


def at(place: Place) -> str:
    return place.task if place.length is None else f"{place.task}@{place.length}"


def warnings(found: Evaluations) -> list[str]:
    said = [f"{found.aside} record(s) of other settings, data or code are left out"] if found.aside else []
    for task in found.tasks:
        for length in found.lengths:
            data = {p.records[0].data for name in found.models if (p := found.at(name, task, length)) is not None}
            if len(data) > 1:
                where = f"{task}@{length}" if length else task
                said.append(f"{where}: models read different prompts, as their tokenizers or limits differ")
    return said


def heatmap(found: Evaluations) -> Figure:
    """Depth of the needle by length, a map for each task and model. Raises `UserError` where no answer has a depth."""
    shades: dict[tuple[str, str], dict[tuple[Any, Any], Shade]] = {}
    for place in found.places:
        its = {(place.length, depth): shade for depth, shade in depths(place).items()}
        if its:
            shades.setdefault((place.task, place.model), {}).update(its)
    if not shades:
        raise UserError("no heatmap to draw: no answer of these tasks has a depth")
    drawn_tasks, drawn_models = map(set, zip(*shades, strict=True))
    tasks = [task for task in found.tasks if task in drawn_tasks]
    models = [name for name in found.models if name in drawn_models]
    columns, rows = tuple(sorted({length for its in shades.values() for length, _ in its})), tuple(range(0, 100, 10))
    panels = []
    for task, name in itertools.product(tasks, models):
        its = shades.get((task, name), {})
        whole = {(c, r): its.get((c, r), NOTHING) for c in columns for r in rows}
        row = found.models.index(name)
        panels.append(Heatmap(f"{task}, {name}", row, "length", "depth, per cent", columns, rows, whole))
    notes = ("Answers found in each tenth of the haystack, in points: pale is 0, dark 100; n: answers of all seeds.",)
    title = f"{found.suite}: depth by length"
    across = len(models) if len(tasks) > 1 and len(models) <= SIDE_BY_SIDE else None
    return Figure("heatmap", title, tuple(found.models), tuple(panels), notes, across)


SIDE_BY_SIDE = 6
"""Models whose maps of a task stand in one line."""


NOTHING = Shade(None, 0, 0.0, "", True, "", samples=0)


def depths(place: Place) -> dict[int, Shade]:
    """Per cent of depth -> what was found there by all seeds together."""
    found: dict[int, list[tuple[float, int]]] = {}
    for record in place.records:
        for cell in record.eval:
            if cell.accuracy is not None and "depth" in cell.cell:
                found.setdefault(round(100 * cell.cell["depth"]), []).append((cell.accuracy, cell.rows))
    shades = {}
    for depth, parts in found.items():
        n = sum(rows for _, rows in parts)
        mean = 100 * sum(accuracy * rows for accuracy, rows in parts) / n
        m = stats.Moments(mean, None, len(parts))
        shades[depth] = Shade(m, len(place.records), mean / 100, place.records[0].cell, True, f"depth {depth}", n)
    return shades


def long_form(found: Evaluations) -> list[dict[str, Any]]:
    """A mapping for each record: for programs."""
    return [
        {
            "model": place.model,
            "task": place.task,
            "length": place.length,
            "seed": record.seed,
            "samples": place.samples,
            **{name.removeprefix("test/"): value for name, value in record.metrics.items()},
            **{f"{kind}={cell.cell[kind]}": cell.accuracy for cell in record.eval for kind in cell.cell},
            "key": record.key,
        }
        for place in found.places
        for record in place.records
    ]
