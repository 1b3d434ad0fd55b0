"""An audit as a picture: bound and bias of every policy, one panel for each stream, both at the same scale.

Bars are the bound B, dots the bias of reading a segment, whiskers one sample deviation. Needs matplotlib:
`pip install 'mixassay[plot]'`.
"""

from collections.abc import Sequence
from pathlib import Path

from mixassay.runners import stats
from mixassay.runners.audit.records import AuditRecord
from mixassay.runners.plot import check, save

BAR, DOT = "#9CB8D8", "#C04F00"


def plot(records: Sequence[AuditRecord], path: Path, title: str) -> None:
    """Write the picture. Raises UserError without matplotlib, or where the file cannot be written."""
    check(path)
    from matplotlib.figure import Figure

    streams = list(dict.fromkeys(record.stream for record in records))
    policies = list(dict.fromkeys(record.policy for record in records))
    columns = min(3, len(streams))
    rows = -(-len(streams) // columns)
    figure = Figure(figsize=(4.6 * columns, rows * (1.2 + 0.26 * len(policies))), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for panel, stream in zip(panels, streams, strict=False):
        mine = {record.policy: record for record in records if record.stream == stream}
        for y, policy in enumerate(reversed(policies)):
            if policy not in mine:
                continue
            bound, bias = (stats.moments(mine[policy].values(name)) for name in ("bound", "segment_bias"))
            panel.barh(y, bound.mean, xerr=bound.std, color=BAR, height=0.7, error_kw={"elinewidth": 0.8})
            panel.errorbar(bias.mean, y, xerr=bias.std, fmt="o", color=DOT, markersize=3, elinewidth=0.8)
        panel.set_yticks(range(len(policies)), list(reversed(policies)), fontsize=8)
        panel.set_title(stream, fontsize=10)
        panel.grid(True, axis="x", color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_xlim(0, 1.05 * max(max(record.values("bound")) for record in records))
    for panel in panels[len(streams) :]:
        panel.set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("bound B (bars) and segment bias (dots), per token; less is better", fontsize=9)
    save(figure, path)
