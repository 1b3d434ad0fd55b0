"""Records of benchmarks as a picture: time and memory against T, axes logarithmic, a panel for each width of a head.

Ours are solid, peers dashed in the colour of the operator that they compute, which is the same in all panels; each line
is named at its end. Values are for one number of tokens, however long the sequences, memory is the peak beyond the
inputs. Needs matplotlib, which nothing else here does: `pip install 'mixassay[plot]'`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.runners import palette
from mixassay.runners.bench_records import PASSES, Record
from mixassay.runners.bench_report import TITLES, groups, setting_of, shape_of, where
from mixassay.runners.labels import binary
from mixassay.runners.plot import MARKERS, check, save


@dataclass(frozen=True)
class Line:
    name: str
    number: int  # of the operator or mixer: its colour and shape
    dashed: bool
    points: tuple[tuple[int, float], ...]  # T, value


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    lines: tuple[Line, ...]


def plot(records: Sequence[Record], path: Path) -> None:
    """Write the picture of the records of one benchmark, kernels or decode."""
    check(path)
    from matplotlib.figure import Figure

    rows = panels(records)
    if not rows:
        raise UserError("--plot: no times of kernels or decoding in these records")
    columns = max(map(len, rows))
    figure = Figure(figsize=(6.4 * columns, 4.4 * len(rows)), layout="constrained")
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            draw(figure.add_subplot(len(rows), columns, i * columns + j + 1), panel)
    figure.suptitle(where(records[-1]), fontsize=11)
    save(figure, path)


def panels(records: Sequence[Record]) -> list[list[Panel]]:
    """Rows of panels: a row for each pass (kernels), or one for each setting (decode)."""
    kernels = sorted(groups(records, "kernels", shape_of), key=lambda group: group[0]["D"])
    number = {op: n for n, op in enumerate(dict.fromkeys(r["op"] for group in kernels for r in group))}
    found = [[p for group in kernels if (p := _kernels(group, which, "ms", number)).lines] for which in PASSES]
    found.append([p for group in kernels if (p := _kernels(group, PASSES[-1], "peak_bytes", number)).lines])
    found += [_decode(group) for group in groups(records, "decode", setting_of)]
    return [row for row in found if row]


def _kernels(group: Sequence[Record], which: str, what: str, number: Mapping[str, int]) -> Panel:
    timed = [record for record in group if record[which].get(what) is not None]
    names = dict.fromkeys((record["op"], record["implementation"]) for record in timed)
    tokens = min(record["B"] * record["T"] for record in group)
    lines = []
    for op, implementation in names:
        mine = [r for r in timed if (r["op"], r["implementation"]) == (op, implementation)]
        name = op if mine[0]["ours"] else implementation
        if any(record[which]["status"] == "wrong" for record in mine):
            name += " (wrong)"
        values = points((r["T"], r[which][what] * tokens / (r["B"] * r["T"])) for r in mine)
        lines.append(Line(name, number[op], not mine[0]["ours"], values))
    of, unit = ("", "ms") if what == "ms" else ("peak memory, ", "bytes")
    title = f"{of}{TITLES[which]}, D={group[0]['D']}, H={group[0]['H']}, {group[0]['dtype']}"
    return Panel(title, f"{unit} for {tokens:,} tokens", tuple(lines))


def _decode(group: Sequence[Record]) -> list[Panel]:
    ok = [record for record in group if record["status"] == "ok"]
    number = {mixer: n for n, mixer in enumerate(dict.fromkeys(record["mixer"] for record in group))}

    def lines(value: Callable[[Record], float], suffix: str = "") -> tuple[Line, ...]:
        of = {m: points((r["T"], value(r)) for r in ok if r["mixer"] == m) for m in number}
        return tuple(Line(m + suffix, number[m], bool(suffix), values) for m, values in of.items() if values)

    kept = lines(lambda record: record["state_bytes"])
    live = lines(lambda record: record["live_state_bytes"], ", live")
    sparse = tuple(line for line in live if line.points not in {other.points for other in kept})
    setting = f"d_model={group[0]['d_model']}, batch {group[0]['B']}"
    return [
        Panel(f"one more token, {setting}", "ms", lines(lambda record: record["eager"]["ms"])),
        Panel("state of one sequence", "bytes", (*kept, *sparse)),
    ]


def points(values: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(values))


def draw(axes: Any, panel: Panel) -> None:
    lengths = sorted({T for line in panel.lines for T, _ in line.points})
    for line in panel.lines:
        dashes, marker = (0, (4, 2)) if line.dashed else "-", MARKERS[palette.shape(line.number)]
        style = {"linestyle": dashes, "marker": marker, "markersize": 4, "linewidth": 1.4}
        axes.plot(*zip(*line.points, strict=True), color=colour(line), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [binary(T) for T in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda y, _: binary(y) if panel.unit.startswith("bytes") else f"{y:g}")
    axes.set_xlabel("T")
    axes.set_ylabel(panel.unit)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    name_lines(axes, panel.lines)


def colour(line: Line) -> str:
    return palette.LIGHT[palette.colour(line.number)]


def name_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Names to the right of the panel, at the height of their line's end or as near as there is room."""
    axes.set_ylim(axes.get_ylim())  # settles the scale, which heights depend on
    ends = [axes.transData.transform(line.points[-1]) for line in lines]
    heights = axes.transAxes.inverted().transform(ends)[:, 1]
    order = sorted(range(len(lines)), key=lambda n: heights[n])
    for n, height in zip(order, spread([float(heights[n]) for n in order]), strict=True):
        axes.annotate(
            lines[n].name,
            xy=lines[n].points[-1],
            xytext=(1.02, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=colour(lines[n]),
            arrowprops={
                "arrowstyle": "-",
                "color": colour(lines[n]),
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )


def spread(heights: Sequence[float], gap: float = 0.055) -> list[float]:
    """Sorted heights moved apart, up and down alike, until they are `gap` from each other."""
    up: list[float] = []
    for height in heights:
        up.append(max(height, up[-1] + gap) if up else height)
    down: list[float] = []
    for height in reversed(heights):
        down.append(min(height, down[-1] - gap) if down else height)
    return [(a + b) / 2 for a, b in zip(up, reversed(down), strict=True)]
