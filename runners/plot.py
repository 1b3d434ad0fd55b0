"""Figures as files, by matplotlib: `pip install 'mixassay[plot]'`. Imports it only when something is drawn."""

import textwrap
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.runners import palette
from mixassay.runners.axes import Axis
from mixassay.runners.marks import Figure, Heatmap, Panel, Series

FORMATS = (".svg", ".png", ".pdf")
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "up": "^", "down": "v", "plus": "P", "cross": "X"}
GREY, GRID = "#707070", "#DDDDDD"
ACROSS = 4
"""Panels side by side, at most."""


def check(path: Path) -> None:
    """Raise `UserError` for a picture that cannot be made."""
    if path.suffix not in FORMATS:
        raise UserError(f"--plot: {path} should end in {', '.join(FORMATS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as problem:
        raise UserError("--plot needs matplotlib: pip install 'mixassay[plot]'") from problem


def save(canvas: Any, path: Path) -> None:
    """Write a matplotlib figure, the same bytes for the same figure."""
    from matplotlib import rc_context

    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
    try:
        with rc_context({"svg.hashsalt": "mixassay"}):
            canvas.savefig(path, dpi=150, metadata=metadata)
    except OSError as problem:
        raise UserError(f"cannot write to {path}: {problem.strerror}") from problem


def plot(figure: Figure, path: Path) -> None:
    """Write a figure. Raises `UserError` without matplotlib, or where the file cannot be written."""
    check(path)
    from matplotlib.figure import Figure as Canvas

    across = figure.across or balanced(len(figure.panels))
    down = -(-len(figure.panels) // across)
    panel_width, panel_height = size(figure)
    width = max(across * panel_width, 5.6)
    title = textwrap.fill(figure.title, int(width * 11))
    notes = "\n".join(line for note in figure.notes for line in textwrap.wrap(note, int(width * 19)))
    named = legend(figure)
    columns = max(1, min(len(named), int(width * 12 / (8 + max(map(len, figure.names))))))  # 8: the mark and a gap
    lines = 1.5 * len(title.splitlines()) + len(notes.splitlines()) + 1.3 * -(-len(named) // columns)
    canvas = Canvas(figsize=(width, down * panel_height + 0.13 * lines + 0.2), layout="constrained")
    for n, panel in enumerate(figure.panels):
        axes = canvas.add_subplot(down, across, n + 1)
        heatmap(axes, panel) if isinstance(panel, Heatmap) else draw(axes, panel)
        if n % across and () != names(panel) == names(figure.panels[n - 1]):
            axes.set_yticklabels([])  # the panel to the left has them
    canvas.suptitle(title, fontsize=11)
    if named:
        under = canvas.legend(
            handles=named, loc="outside lower center", ncols=columns, frameon=False, fontsize=8, title=notes
        )
        under.get_title().set(fontsize=7, color=GREY)
    else:
        canvas.supxlabel(notes, fontsize=7, color=GREY)
    save(canvas, path)


def balanced(panels: int) -> int:
    """So many side by side that all lines of panels are nearly of one length."""
    return -(-panels // -(-panels // ACROSS))


def size(figure: Figure) -> tuple[float, float]:
    """Inches of one panel."""
    first = figure.panels[0]
    if isinstance(first, Heatmap):
        return 1.4 + 0.62 * len(first.columns), 1.0 + 0.42 * len(first.rows)
    if first.bars:
        longest = max(len(name) for panel in figure.panels for name in names(panel))
        return 3.4 + 0.075 * longest, 0.8 + 0.42 * max(len(names(panel)) for panel in figure.panels)
    if figure.kind == "curves":
        return 3.0, 2.3
    crowded = max(0, len(legend(figure)) - 6)  # marks that share a place stand side by side
    return 4.6 + 0.25 * crowded, 3.4


def names(panel: Panel | Heatmap) -> tuple[str, ...]:
    """Of the rows, where they stand at the panel's left."""
    return tuple(text for _, text in panel.y.ticks) if isinstance(panel, Panel) and panel.bars else ()


def draw(axes: Any, panel: Panel) -> None:
    """A panel in the unit square: both axes are placed by `Axis.place`, here as in the browser."""
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    for set_ticks, axis in ((axes.set_xticks, panel.x), (axes.set_yticks, panel.y)):
        set_ticks([axis.place(value) for value, _ in axis.ticks], [text for _, text in axis.ticks], fontsize=8)
    axes.set_xlabel(panel.x.label, fontsize=8)
    axes.set_ylabel(panel.y.label, fontsize=8)
    axes.set_title(panel.title, fontsize=9)
    axes.grid(True, axis="x" if panel.bars else "y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.front:
        steps = (*panel.front, (panel.x.high, panel.front[-1][1]))
        axes.step(*placed(panel.x, panel.y, steps), where="post", color=GREY, alpha=0.4, linewidth=3, zorder=1)
    for series in panel.series:
        draw_series(axes, panel, series)


def draw_series(axes: Any, panel: Panel, series: Series) -> None:
    colour = palette.LIGHT[palette.colour(series.row)]
    marker = MARKERS[palette.shape(series.row)]
    for curve in series.curves:
        xs, ys = placed(panel.x, panel.y, curve.points)
        axes.plot(xs, ys, color=colour, linewidth=1, alpha=0.8)
        axes.plot(xs[-1:], ys[-1:], color=colour, marker="o" if curve.ended else "x", markersize=3.5)
    dots = [(panel.x.place(dot.x) + dot.dx, panel.y.place(dot.y) + dot.dy) for dot in series.dots]
    if dots:
        axes.scatter(*zip(*dots, strict=True), s=14, color=colour, alpha=0.55, linewidths=0, zorder=3)
    means = [(panel.x.place(mean.x) + mean.dx, panel.y.place(mean.y)) for mean in series.means]
    if series.joined and means:
        axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.2, zorder=2)
    for (x, y), mean in zip(means, series.means, strict=True):
        if panel.bars:
            half = 0.32 / len(panel.y.ticks)
            axes.plot([x, x], [y - half, y + half], color=colour, linewidth=2, linestyle="-" if mean.complete else ":")
        else:
            face = colour if mean.complete else "white"
            axes.plot([x], [y], marker=marker, markersize=6, color=colour, markerfacecolor=face, zorder=4)


def placed(x: Axis, y: Axis, points: Any) -> tuple[list[float], list[float]]:
    return [x.place(a) for a, _ in points], [y.place(b) for _, b in points]


def heatmap(axes: Any, panel: Heatmap) -> None:
    axes.set_xlim(0, len(panel.columns))
    axes.set_ylim(len(panel.rows), 0)
    for (column, row), shade in panel.shades.items():
        x, y = panel.columns.index(column), panel.rows.index(row)
        face = palette.shade(shade.fraction) if shade.moments else "white"
        axes.fill_between([x, x + 1], y, y + 1, facecolor=face, edgecolor="white", linewidth=1)
        ink = palette.ink(shade.fraction) if shade.moments else GREY
        axes.text(x + 0.5, y + 0.42, shade.text, ha="center", va="center", color=ink, fontsize=8)
        axes.text(x + 0.5, y + 0.78, shade.count, ha="center", va="center", color=ink, fontsize=5.5)
    axes.set_xticks([n + 0.5 for n in range(len(panel.columns))], list(map(str, panel.columns)), fontsize=8)
    axes.set_yticks([n + 0.5 for n in range(len(panel.rows))], list(map(str, panel.rows)), fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlabel(panel.x, fontsize=8)
    axes.set_ylabel(panel.y, fontsize=8)
    axes.set_title(panel.title, fontsize=9)
    axes.spines[:].set_visible(False)


def legend(figure: Figure) -> list[Any]:
    """The names of the rows, where the axes or titles do not say them."""
    from matplotlib.lines import Line2D

    first = figure.panels[0]
    if isinstance(first, Heatmap) or first.bars or figure.kind == "curves":
        return []
    drawn = {series.row for panel in figure.panels if isinstance(panel, Panel) for series in panel.series}
    return [
        Line2D(
            [], [], color=palette.LIGHT[palette.colour(n)], marker=MARKERS[palette.shape(n)], markersize=6, label=name
        )
        for n, name in enumerate(figure.names)
        if n in drawn
    ]
