"""Figures as inline SVG. Colours are the page's variables, so that one drawing serves light and dark.

Every mark of a run carries its cell (`data-cell`, the place in the page's data) and seed; `page.js` does the rest.
"""

from collections.abc import Iterable, Iterator, Mapping
from html import escape

from mixassay.runners import palette
from mixassay.runners.axes import Axis
from mixassay.runners.marks import Figure, Heatmap, Panel, Series

LETTER = 6.8
"""Width of a letter of tick labels."""
BOLD = 7.6
"""Of titles."""

SYMBOLS = {
    "circle": '<circle cx="0" cy="0" r="4.5"/>',
    "square": '<rect x="-4.2" y="-4.2" width="8.4" height="8.4"/>',
    "diamond": '<path d="M0-5.8 5.8 0 0 5.8-5.8 0z"/>',
    "up": '<path d="M0-5.4 5.4 4.4H-5.4z"/>',
    "down": '<path d="M0 5.4 5.4-4.4H-5.4z"/>',
    "plus": '<path d="M-1.9-5.4h3.8v3.5h3.5v3.8H1.9v3.5h-3.8V1.9h-3.5v-3.8h3.5z"/>',
    "cross": '<path d="M-2.6-5 0-2.4 2.6-5 5-2.6 2.4 0 5 2.6 2.6 5 0 2.4-2.6 5-5 2.6-2.4 0-5-2.6z"/>',
}


def symbols() -> str:
    """The shapes, once for the whole page."""
    shapes = "".join(f'<g id="m-{name}">{drawn}</g>' for name, drawn in SYMBOLS.items())
    return f'<svg width="0" height="0" class="defs" aria-hidden="true"><defs>{shapes}</defs></svg>'


def style(row: int) -> str:
    """Sets the colour of the table's `row`-th row."""
    return f'style="--c:var(--c{palette.colour(row)})"'


def sample(row: int) -> str:
    """The mark of a row, for a legend."""
    mark = f'<use href="#m-{palette.shape(row)}" class="mean"/>'
    return f'<svg width="14" height="14" viewBox="-7 -7 14 14" aria-hidden="true" {style(row)}>{mark}</svg>'


def strip(values: Mapping[int, float], axis: Axis, row: int, cell: int) -> str:
    """The seeds of one number on a short line."""
    places = {seed: 4 + 112 * axis.place(value) for seed, value in values.items()}
    dots = "".join(
        f'<circle class="dot" cx="{x:.1f}" cy="8" r="3" data-cell="{cell}" data-seed="{seed}"/>'
        for seed, x in places.items()
    )
    line = '<line class="grid" x1="4" x2="116" y1="8" y2="8"/>'
    return f'<svg class="strip" width="120" height="16" role="img" aria-label="seeds" {style(row)}>{line}{dots}</svg>'


def panels(figure: Figure, cells: Mapping[str, int]) -> Iterator[str]:
    """Each panel of a figure. `cells` gives the place of each configuration in the page's data."""
    for panel in figure.panels:
        yield heatmap(panel, cells) if isinstance(panel, Heatmap) else Drawing(figure, panel, cells).svg()


class Drawing:
    """A panel on its way into SVG: where the frame is, and what stands in it."""

    def __init__(self, figure: Figure, panel: Panel, cells: Mapping[str, int]) -> None:
        self.panel, self.cells = panel, cells
        self.left = 14 + LETTER * max(len(text) for _, text in panel.y.ticks) + (16 if panel.y.label else 0)
        self.top, self.right, self.bottom = 24 if panel.title else 10, 14, 38
        small = figure.kind == "curves"
        self.width = 420 if panel.bars else 210 if small else 330
        self.height = 30 * len(panel.y.ticks) if panel.bars else 120 if small else 210

    def x(self, value: float, aside: float = 0.0) -> float:
        return self.left + self.width * (self.panel.x.place(value) + aside)

    def y(self, value: float, aside: float = 0.0) -> float:
        return self.top + self.height * (1 - self.panel.y.place(value) - aside)

    def svg(self) -> str:
        panel = self.panel
        width, height = self.left + self.width + self.right, self.top + self.height + self.bottom
        width = max(width, self.left + BOLD * len(panel.title))
        body = [*self.frame(), *self.front(), *(self.series(series) for series in panel.series)]
        return svg(width, height, panel.title or panel.x.label, body)

    def frame(self) -> Iterator[str]:
        panel, end, foot = self.panel, self.left + self.width, self.top + self.height
        for value, text in panel.x.ticks:
            x = self.x(value)
            if panel.bars:
                yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{foot}"/>'
            yield label(x, foot + 14, text)
        for value, text in panel.y.ticks:
            y = self.y(value)
            if not panel.bars:
                yield f'<line class="grid" x1="{self.left:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield label(self.left - 6, y + 4, text, "end")
        yield f'<path class="axis" d="M{self.left:.1f} {self.top}V{foot}H{end:.1f}"/>'
        yield label(self.left + self.width / 2, foot + 31, panel.x.label)
        if panel.y.label:
            middle = self.top + self.height / 2
            turned = f'transform="rotate(-90 11 {middle:.1f})"'
            yield f'<text x="11" y="{middle:.1f}" text-anchor="middle" {turned}>{escape(panel.y.label)}</text>'
        if panel.title:
            yield title(self.left, self.width, panel.title)

    def front(self) -> Iterator[str]:
        if self.panel.front:
            (x, y), *others = self.panel.front
            steps = "".join(f"H{self.x(a):.1f}V{self.y(b):.1f}" for a, b in others)
            end = self.left + self.width
            yield f'<path class="front" d="M{self.x(x):.1f} {self.y(y):.1f}{steps}H{end:.1f}"/>'

    def series(self, series: Series) -> str:
        found = [*self.curves(series), *self.line(series), *self.dots(series), *self.means(series)]
        return f'<g data-row="{series.row}" {style(series.row)}>{"".join(found)}</g>'

    def curves(self, series: Series) -> Iterator[str]:
        for curve in series.curves:
            whose = self.whose(curve.cell, curve.seed)
            points = [(self.x(x), self.y(y)) for x, y in curve.points]
            x, y = points[-1]
            end = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'
            if not curve.ended:
                end = f'<path class="lost" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6"/>'
            yield f'<g class="curve" {whose}><polyline points="{joined(points)}"/>{end}</g>'

    def line(self, series: Series) -> Iterator[str]:
        if series.joined and len(series.means) > 1:
            points = joined((self.x(mean.x, mean.dx), self.y(mean.y)) for mean in series.means)
            yield f'<polyline class="joined" points="{points}"/>'

    def dots(self, series: Series) -> Iterator[str]:
        for dot in series.dots:
            x, y = self.x(dot.x, dot.dx), self.y(dot.y, dot.dy)
            whose = self.whose(dot.cell, dot.seed) + at(dot.where)
            yield f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.2" {whose}/>'

    def means(self, series: Series) -> Iterator[str]:
        for mean in series.means:
            x, y = self.x(mean.x, mean.dx), self.y(mean.y)
            kind, whose = "" if mean.complete else " hollow", f'data-cell="{self.cells[mean.cell]}"'
            if self.panel.bars:
                yield f'<line class="bar{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 10:.1f}" y2="{y + 10:.1f}" {whose}/>'
            else:
                mark = f"#m-{palette.shape(series.row)}"
                yield f'<use class="mean{kind}" href="{mark}" x="{x:.1f}" y="{y:.1f}" {whose}/>'

    def whose(self, cell: str, seed: int) -> str:
        return f'data-cell="{self.cells[cell]}" data-seed="{seed}"'


def heatmap(panel: Heatmap, cells: Mapping[str, int]) -> str:
    names = [str(value) for value in panel.rows]
    left, top, wide, high = 24 + LETTER * max(map(len, names)), 24, 52, 36
    body = [
        title(left, wide * len(panel.columns), panel.title),
        *(label(left - 6, top + high * (n + 0.5) + 4, name, "end") for n, name in enumerate(names)),
    ]
    foot = top + high * len(names)
    for n, column in enumerate(panel.columns):
        body.append(label(left + wide * (n + 0.5), foot + 14, str(column)))
        for row in panel.rows:
            if (shade := panel.shades.get((column, row))) is None:
                continue
            x, y = left + wide * n, top + high * panel.rows.index(row)
            known, middle = shade.moments is not None, x + wide / 2
            fill = palette.shade(shade.fraction) if known else "none"
            ink = palette.ink(shade.fraction) if known else "var(--muted)"
            mine = f'data-cell="{cells[shade.cell]}"{at(shade.where)} style="--ink:{ink}"'
            rect = f'<rect x="{x:.1f}" y="{y}" width="{wide - 1}" height="{high - 1}" fill="{fill}"/>'
            texts = label(middle, y + 16, shade.text) + label(middle, y + 29, shade.count, more='class="n"')
            body.append(f'<g class="shade" {mine}>{rect}{texts}</g>')
    body.append(label(left + wide * len(panel.columns) / 2, foot + 31, panel.x))
    middle = top + high * len(names) / 2
    turned = f'transform="rotate(-90 11 {middle:.1f})"'
    body.append(f'<text x="11" y="{middle:.1f}" text-anchor="middle" {turned}>{escape(panel.y)}</text>')
    width = left + max(wide * len(panel.columns) + 14, BOLD * len(panel.title))
    return svg(width, foot + 38, panel.title, body)


def svg(width: float, height: float, name: str, body: Iterable[str]) -> str:
    shape = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg {shape} role="img" aria-label="{escape(name)}">{"".join(body)}</svg>'


def title(left: float, width: float, text: str) -> str:
    """Over the middle of a panel, or where it is wider than that from its left on."""
    if BOLD * len(text) > width:
        return label(left, 14, text, "start", 'class="title"')
    return label(left + width / 2, 14, text, more='class="title"')


def label(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def at(where: str) -> str:
    """Which evaluation cell a mark stands for, where its run has several."""
    return f' data-at="{escape(where)}"' if where else ""


def joined(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
