"""Published tables as data, and ours set beside them: `results/published/*.yaml`.

A published number is a mean, perhaps a deviation, and a count; Welch's interval needs no more. "At least 99" is a
bound and is compared as one. Numbers match by the mixer's name and the value of the table's column in the resolved
configuration; whether the set-ups agree is told, not judged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mixassay import source
from mixassay.errors import UserError
from mixassay.registry import suggest
from mixassay.runners import stats
from mixassay.runners.labels import find, short
from mixassay.runners.render import Cell, Grid
from mixassay.runners.report import Entry, Table

FOLDER = Path(__file__).parent.parent / "published"  # in a checkout a link to results/published


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Value(Part):
    """A published number in points. With `bound` the truth is at least `mean`."""

    mean: float
    std: float | None = None
    bound: Literal[">="] | None = None
    seeds: list[float] = []  # the single runs, where they are known

    @model_validator(mode="after")
    def agrees_with_seeds(self) -> Self:
        if self.seeds:
            found = stats.moments(self.seeds)
            for name, given, true in (("mean", self.mean, found.mean), ("std", self.std, found.std)):
                if given is not None and true is not None and abs(given - true) > 0.1:
                    raise ValueError(f"{name} {given} does not follow from the seeds, which give {true:.2f}")
        return self

    def moments(self, n: int) -> stats.Moments:
        return stats.moments(self.seeds) if self.seeds else stats.Moments(self.mean, self.std, n)


class Numbers(Part):
    """One set of numbers and where it is from. `rows`: mixer -> value of the column -> number."""

    source: str
    read_from: str
    metric: str
    n: int = Field(gt=0)
    std: str  # which deviation it is, as far as known
    note: str
    rows: dict[str, dict[str, Value]]


class Rerun(Numbers):
    name: str


class Claim(Part):
    """That one row is above another."""

    of: str
    over: str


class Published(Numbers):
    title: str
    task: str
    column: str  # the path that the columns are values of, "model.d_model"
    claims: list[Claim] = []
    reruns: list[Rerun] = []

    @model_validator(mode="after")
    def claims_are_about_rows(self) -> Self:
        for name in (name for claim in self.claims for name in (claim.of, claim.over)):
            if name not in self.rows:
                raise ValueError(f'a claim is about "{name}", which is none of the rows.{suggest(name, [*self.rows])}')
        return self

    @property
    def sets(self) -> dict[str, Numbers]:
        return {"published": self, **{rerun.name: rerun for rerun in self.reruns}}


def shipped() -> list[str]:
    """The names of the published tables that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Published:
    """A shipped table by its name, or any by its path. Raises `UserError` with file, line and column."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f'no published table "{name}".{suggest(name, shipped())}')
    problems = source.Problems()
    node = source.read(path, problems)
    problems.raise_any()
    try:
        return Published.model_validate(node.plain())
    except ValidationError as faults:
        for fault in faults.errors(include_url=False):
            at = ".".join(str(part) for part in fault["loc"])
            problems.add(node.nearest(at).at, f"{at or 'the file'}: {fault['msg']}")
    problems.raise_any()
    raise AssertionError("a validation error names what is wrong")


@dataclass(frozen=True)
class Pair:
    """Our number beside one of theirs, both in points."""

    mixer: str
    label: str  # of our row
    column: str
    ours: stats.Moments
    whose: str
    theirs: stats.Moments
    bound: bool

    @property
    def difference(self) -> stats.Difference:
        """Ours minus theirs. Against a bound the true difference is at most `value`, and no interval can be given."""
        if self.bound:
            return stats.Difference(self.ours.mean - self.theirs.mean, None, None, None, None)
        return stats.difference(self.ours, self.theirs)


def compare(table: Table, published: Published) -> list[Pair]:
    """All our numbers that have a counterpart. Raises `UserError` when the metrics are different quantities."""
    if short_metric(table.metric) != short_metric(published.metric):
        raise UserError(f"{published.title} reports {published.metric}, the sweep {table.metric}: not comparable")
    return [pair for place in table.entries for pair in _pairs(table, published, place)]


def _pairs(table: Table, published: Published, place: tuple[tuple[str, ...], tuple[str, ...]]) -> Iterator[Pair]:
    entry = table.entries[place]
    if entry.at is not None or entry.moments is None:  # published numbers are means over the evaluation cells
        return
    mixer, column = _name(entry, published)
    ours = in_points(entry.moments)
    for whose, numbers in published.sets.items():
        value = numbers.rows.get(mixer, {}).get(column)
        if value is not None:
            theirs = value.moments(numbers.n)
            yield Pair(mixer, " ".join(place[0]), column, ours, whose, theirs, bound=value.bound is not None)


def _name(entry: Entry, published: Published) -> tuple[str, str]:
    """The mixer's name and the value of the published table's column."""
    config = entry.runs.cell.sections.config()
    return str(find(config, "mixer.name")), str(find(config, published.column))


def in_points(m: stats.Moments) -> stats.Moments:
    return stats.Moments(100 * m.mean, None if m.std is None else 100 * m.std, m.n)


def grids(table: Table, published: Published) -> list[Grid]:
    """All that is set beside the table: the comparison, and what becomes of the published claims."""
    return [grid(table, published), *([claims(table, published)] if published.claims else [])]


def grid(table: Table, published: Published) -> Grid:
    """The comparison as texts, one line for each published counterpart of each of our numbers."""
    found = compare(table, published)
    rows, last = [], None
    for pair in found:
        d = pair.difference
        ours = (pair.label, pair.column, _text(pair.ours))
        theirs = f"≥ {pair.theirs.mean:g}" if pair.bound else _text(pair.theirs)
        value = f"≤ {_signed(d.value)}" if pair.bound else _signed(d.value)
        texts = (*(ours if ours != last else ("", "", "")), pair.whose, theirs, value, _interval(d))
        rows.append(tuple(Cell(text) for text in texts))
        last = ours
    warnings = []
    if not found:
        known = f"mixers {', '.join(published.rows)} and {published.column}"
        warnings.append(f"none of our numbers has a counterpart: the published table has {known}")
    caption = [
        "Differences are ours minus theirs in points, with Welch's 95 % interval from mean, std and n.",
        *_beyond(found),
        f"published: {published.source}. Read from: {published.read_from} Metric {published.metric}, "
        f"n={published.n}, std {published.std}. {published.task} {published.note}",
    ]
    shown = {pair.whose for pair in found}
    for rerun in published.reruns:
        if rerun.name in shown:
            caption.append(
                f"{rerun.name}: {rerun.source}. Read from: {rerun.read_from}. Metric {rerun.metric}, n={rerun.n}, "
                f"std {rerun.std}. {rerun.note}"
            )
    names = ("mixer", short(published.column), "ours", "whose", "theirs", "difference", "95 %")
    heads = tuple((name,) for name in names)
    return Grid(f"Against: {published.title}", heads, tuple(rows), 2, frozenset(), tuple(caption), tuple(warnings))


def claims(table: Table, published: Published) -> Grid:
    """By how much one row is above another, in our numbers and in each of theirs, for every value of the column."""
    ours: dict[tuple[str, str], list[stats.Moments]] = {}
    for entry in table.entries.values():
        if entry.at is None and entry.moments is not None:
            ours.setdefault(_name(entry, published), []).append(in_points(entry.moments))
    known: dict[str, dict[tuple[str, str], stats.Moments]] = {
        "ours": {place: several[0] for place, several in ours.items() if len(several) == 1}
    }
    for whose, numbers in published.sets.items():
        known[whose] = {
            (mixer, column): value.moments(numbers.n)
            for mixer, row in numbers.rows.items()
            for column, value in row.items()
            if value.bound is None
        }
    rows, last = [], None
    for claim in published.claims:
        for column in published.rows[claim.of]:
            for whose, moments in known.items():
                a, b = moments.get((claim.of, column)), moments.get((claim.over, column))
                if a is not None and b is not None:
                    d = stats.difference(a, b)
                    place = claim.of, claim.over, column
                    texts = (*(place if place != last else ("", "", "")), whose, _signed(d.value), _interval(d))
                    rows.append(tuple(Cell(text) for text in texts))
                    last = place
    caption = (
        "Differences of two rows of one table, in points, with Welch's 95 % interval. Where a published number is a "
        "bound there is none.",
    )
    heads = tuple((name,) for name in ("mixer", "over", short(published.column), "whose", "difference", "95 %"))
    return Grid(f"Claims of: {published.title}", heads, tuple(rows), 4, frozenset(), caption, ())


def long_form(table: Table, published: Published) -> list[dict[str, Any]]:
    """The comparison as data, for JSON."""
    return [
        {
            "mixer": pair.mixer,
            published.column: pair.column,
            "ours": _data(pair.ours),
            "whose": pair.whose,
            "theirs": _data(pair.theirs),
            "bound": ">=" if pair.bound else None,
            "difference": pair.difference.value,
            "se": pair.difference.se,
            "interval": None if pair.difference.low is None else [pair.difference.low, pair.difference.high],
        }
        for pair in compare(table, published)
    ]


def short_metric(metric: str) -> str:
    """`accuracy` of `test/accuracy`: the split is told, not compared."""
    return metric.rsplit("/", 1)[-1]


def _beyond(pairs: Sequence[Pair]) -> list[str]:
    """How many of the intervals leave out 0, by whose numbers they compare with."""
    counts = []
    for whose in dict.fromkeys(pair.whose for pair in pairs):
        known = [pair.difference for pair in pairs if pair.whose == whose and pair.difference.low is not None]
        if known:
            counts.append(f"{whose} {sum(d.clear for d in known)} of {len(known)}")
    return [f"Intervals that leave out 0: {'; '.join(counts)}. By chance alone one in twenty does."] if counts else []


def _interval(d: stats.Difference) -> str:
    return f"[{_signed(d.low)}, {_signed(d.high)}]" if d.low is not None and d.high is not None else ""


def _signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # + 0.0: no -0.0


def _data(m: stats.Moments) -> Mapping[str, float | None]:
    return {"mean": m.mean, "std": m.std, "n": m.n}


def _text(m: stats.Moments) -> str:
    return f"{m.mean:.1f}" + (f" ± {m.std:.1f}" if m.std is not None else "") + f" (n={m.n})"
