"""Records of an audit as tables, and in long form for programs. Nothing here imports torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from mixassay.runners import stats
from mixassay.runners.audit.records import AuditRecord
from mixassay.runners.labels import spans
from mixassay.runners.render import Cell, Grid
from mixassay.spec import plain

COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "slots": (("slots",), ".1f"),
    "bound": (("B",), ".3f"),
    "worst": (("D1",), ".3f"),
    "segment_bias": (("segment", "bias"), ".4f"),
    "segment_bias_recent": (("recent", "segment"), ".4f"),
    "token_bias": (("token", "bias"), ".3f"),
    "token_bias_recent": (("recent", "token"), ".3f"),
    "needle_bias": (("needle", "bias"), ".3f"),
    "answered_any": (("answers", "any"), ".2f"),
    "answered_open": (("answers", "open"), ".2f"),
    "answered_stale": (("answers", "stale"), ".2f"),
    "gap": (("gap",), ".3f"),
    "raised": (("raised",), ".1f"),
    "precision": (("P",), ".2f"),
    "recall": (("R",), ".2f"),
    "f1": (("F1",), ".2f"),
}
DEVIATIONS = ("bound", "segment_bias", "answered_any", "answered_open", "gap", "raised", "f1")
"""Columns that show their deviation: the others are there to explain these, and JSON has all."""


def tables(records: Sequence[AuditRecord], title: str) -> list[Grid]:
    """The overview, streams down and policies across, and one table for each stream with all that was measured."""
    streams = list(dict.fromkeys(record.stream for record in records))
    details = [_stream(stream, [record for record in records if record.stream == stream]) for stream in streams]
    return [_overview(records, streams, title), *details]


def _overview(records: Sequence[AuditRecord], streams: Sequence[str], title: str) -> Grid:
    policies = list(dict.fromkeys(record.policy for record in records))
    at = {(record.stream, record.policy): record for record in records}
    rows = []
    for stream in streams:
        cells = [Cell(stream)]
        for policy in policies:
            record = at[stream, policy]
            cells.append(Cell(text(record, "bound"), small=(f"bias {text(record, 'segment_bias')}",)))
        rows.append(tuple(cells))
    heads = (("stream",), *((policy,) for policy in policies))
    return Grid(title, heads, tuple(rows), 1, frozenset(), tuple(_caption(records)), ())


def _caption(records: Sequence[AuditRecord]) -> list[str]:
    first = records[0]
    n, capacity, T = len(first.seeds), first.config["capacity"], first.config["stream"]["tokens"]
    ratios = [ratio for record in records for ratio in record.values("ratio")]
    return [
        f"B per token, below it the bias of reading the segment of a stored token: mean ± sample std (ddof=1) over "
        f"n={n} seeds ({spans(first.seeds)}), each the mean over {first.config['prefixes']} prefixes of {T} tokens; "
        f"{capacity} slots. Less is better.",
        f"Largest bias / B of all: {max(ratios):.4f}." if ratios else "No bound is above zero.",
        f"Code {first.code.name}; data {first.data}; on {first.env['class']}.",
    ]


def _stream(stream: str, records: Sequence[AuditRecord]) -> Grid:
    """Columns that no policy has numbers for stay out."""
    measured = {name for record in records for name in record.metrics if record.values(name)}
    shown = {name: head for name, (head, _) in COLUMNS.items() if name in measured}
    heads = (("policy",), ("tau",), *shown.values(), ("max", "ratio"), ("state", "bytes"), ("n",))
    rows = []
    for record in records:
        tau = "" if record.tau is None else f"{record.tau:g}"
        numbers = [Cell(text(record, name)) for name in shown]
        ratio = max(record.values("ratio"), default=None)
        last = (f"{ratio:.3f}" if ratio is not None else "–", f"{record.state_bytes:,}", str(len(record.seeds)))
        rows.append((Cell(record.policy), Cell(tau), *numbers, *map(Cell, last)))
    config = records[0].config["stream"]
    return Grid(f"{stream}: {_said(config)}", heads, tuple(rows), 2, frozenset(), (), ())


def _said(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {plain(value)}" for name, value in config.items())


def text(record: AuditRecord, metric: str) -> str:
    """`0.263 ± 0.002`, with how many of the seeds have a number where not all have."""
    values, form = record.values(metric), COLUMNS[metric][1]
    if not values:
        return "–"
    m = stats.moments(values)
    with_std = metric in DEVIATIONS and m.std is not None
    counted = f" ({m.n}/{len(record.seeds)})" if m.n < len(record.seeds) else ""
    return f"{m.mean:{form}}" + (f" ± {m.std:{form}}" if with_std else "") + counted


def long_form(records: Sequence[AuditRecord]) -> list[dict[str, Any]]:
    """One mapping for each number: stream, policy, metric, mean, std, n, and the values of the seeds."""
    found = []
    for record in records:
        for metric in record.metrics:
            values = record.values(metric)
            m = stats.moments(values) if values else None
            found.append(
                {
                    "audit": record.audit,
                    "stream": record.stream,
                    "policy": record.policy,
                    "tau": record.tau,
                    "capacity": record.config["capacity"],
                    "state_bytes": record.state_bytes,
                    "metric": metric,
                    "mean": m.mean if m else None,
                    "std": m.std if m else None,
                    "n": len(values),
                    "values": dict(zip(map(str, record.seeds), record.metrics[metric], strict=True)),
                }
            )
    return found


def flat(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One mapping for each number and seed, for CSV."""
    return [
        {**{key: value for key, value in row.items() if key != "values"}, "seed": seed, "value": value}
        for row in rows
        for seed, value in row["values"].items()
    ]
