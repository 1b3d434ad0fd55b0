"""What figures are made of, as data: points in axes and shaded grids. `page/svg.py` and `plot.py` only place them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from mixassay.runners import stats
from mixassay.runners.axes import Axis

Kind = Literal["metric", "seeds", "state", "heatmap", "curves", "positions"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Dot(NamedTuple):
    """One seed. `dx`, `dy`: how far it is moved aside, as a share of the axes, so that it hides no other."""

    x: float
    y: float
    cell: str  # hash of the configuration
    seed: int
    dx: float = 0.0
    dy: float = 0.0
    where: str = ""  # the evaluation cell and the value there, where the run has several


class Mean(NamedTuple):
    x: float
    y: float
    cell: str
    complete: bool
    dx: float = 0.0


class Curve(NamedTuple):
    """One run on its way; `ended` says whether its last point is an end and not a divergence or a failure."""

    points: tuple[tuple[float, float], ...]
    cell: str
    seed: int
    ended: bool


@dataclass(frozen=True)
class Series:
    """A row of the table: the `row`-th, which gives its colour and shape."""

    name: str
    row: int
    dots: tuple[Dot, ...] = ()
    means: tuple[Mean, ...] = ()
    curves: tuple[Curve, ...] = ()
    joined: bool = False  # the means, by a line


@dataclass(frozen=True)
class Panel:
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    front: tuple[tuple[float, float], ...] = ()
    bars: bool = False  # y has names: means are upright bars


@dataclass(frozen=True)
class Shade:
    """One place of a heatmap: the mean over the seeds that have a number, of those asked for."""

    moments: stats.Moments | None
    seeds: int
    fraction: float  # of the scale, 0 to 1
    cell: str
    points: bool
    where: str
    samples: int | None = None  # that the mean is over, where these are counted and not seeds

    @property
    def text(self) -> str:
        """The mean as it stands in the map."""
        if self.moments is None:
            return "–"
        return f"{self.moments.mean:.1f}" if self.points else f"{self.moments.mean:.2g}"

    @property
    def count(self) -> str:
        if self.samples is not None:
            return f"n={self.samples}"
        n = self.moments.n if self.moments else 0
        return f"n={n}" if n == self.seeds else f"{n}/{self.seeds}"


@dataclass(frozen=True)
class Heatmap:
    title: str
    row: int
    x: str
    y: str
    columns: tuple[Any, ...]
    rows: tuple[Any, ...]  # from the top
    shades: Mapping[tuple[Any, Any], Shade]  # (column, row) -> what is there


@dataclass(frozen=True)
class Figure:
    kind: Kind
    title: str
    names: tuple[str, ...]  # of the table's rows
    panels: tuple[Panel | Heatmap, ...]
    notes: tuple[str, ...] = ()
    across: int | None = None  # panels that belong side by side; None: as many as there is room for
