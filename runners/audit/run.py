"""From an audit to its records: one for each stream and policy, with every seed's own numbers."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import torch

from mixassay.provenance import code, environment, source_hash
from mixassay.runners.audit.config import KINDS, Audit, Dla, Stream
from mixassay.runners.audit.cuts import Case, Cuts, cut, ends_of, tune
from mixassay.runners.audit.measure import ZERO, Questions, Tokens, answers, bound, boundary_match, measure
from mixassay.runners.audit.records import AuditRecord
from mixassay.tasks import Split
from mixassay.tasks.streams.segmented import SegmentedStream

NUMBER = 4
"""Bytes of a number of a state: float32."""


def run(audit: Audit, progress: Callable[[str], None] = lambda text: None) -> Iterator[AuditRecord]:
    """The records, stream after stream, each policy on the same tokens."""
    where = environment("cpu", threads=torch.get_num_threads())
    source = code(source_hash(["mixassay.runners.audit.run"]))
    for name, stream in audit.streams.items():
        case, held_out = drawn(stream, audit.seeds, audit, "test"), drawn(stream, audit.tuning.seeds, audit, "valid")
        kind = next(kind for kind, cls in KINDS.items() if isinstance(stream, cls))
        reference = Reference(case)
        taus: dict[str, float] = {}
        for policy in audit.policies:
            progress(f"{name}: {policy}")
            start, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
            tau = None
            if isinstance(policy, Dla):
                tau = policy.tau if policy.tau != "tuned" else None
                if tau is None:
                    key = f"{policy.rule} {policy.reading}"
                    taus[key] = tau = taus.get(key) or tune(policy, held_out, audit.tuning.taus)
            cuts = cut(policy, case, tau)
            slack = stream.ramp if isinstance(stream, SegmentedStream) else 0
            tolerance = max(audit.head.tolerance, slack)
            rows = [numbers(case, reference, cuts, row, tolerance) for row in range(len(case.rows))]
            yield AuditRecord(
                audit=audit.head.name,
                stream=name,
                policy=str(policy),
                config={
                    "stream": {"kind": kind, **vars(stream)},
                    "policy": policy.model_dump(),
                    "capacity": audit.head.capacity,
                    "prefixes": audit.head.prefixes,
                    "tolerance": tolerance,
                },
                tau=tau,
                seeds=audit.seeds,
                metrics={key: tuple(row[key] for row in rows) for key in rows[0]},
                state_bytes=NUMBER * cuts.slots * case.k.shape[3] * case.v.shape[3],
                code=source,
                env=where,
                data=f"{kind}_stream/{stream.version}",
                start=start,
                seconds=time.perf_counter() - clock,
            )


def drawn(stream: Stream, seeds: tuple[int, ...], audit: Audit, split: Split) -> Case:
    """Stream 0 of every seed."""
    n = range(len(seeds))
    index, seed = torch.zeros(len(seeds), dtype=torch.int64), torch.tensor(seeds)
    if isinstance(stream, SegmentedStream):
        k, v, segment, needle = stream.draw(index, seed=seed, split=split)
        rows = [Tokens(k[i], v[i], segment[i], needle[i]) for i in n]
    else:
        w = stream.draw(index, seed=seed, split=split)
        none = torch.zeros(stream.tokens, dtype=torch.bool)
        asked = [Questions(w.question[i], w.key[i], w.value[i], stream.values) for i in n]
        rows = [Tokens(w.k[i], w.v[i], w.segment[i], none, asked[i]) for i in n]
    return Case(tuple(rows), ends_of(stream.tokens, audit.head.prefixes), audit.head.capacity)


class Reference:
    """The least bound of each prefix in m blocks, computed when asked for and kept."""

    def __init__(self, case: Case) -> None:
        self.case, self.known = case, dict[tuple[int, int, int], float]()

    def __call__(self, row: int, end: int, m: int) -> float:
        key = row, end, m
        if key not in self.known:
            best = self.case.optimal[row].starts(end, m)
            self.known[key] = bound(self.case.rows[row].upto(end), best)
        return self.known[key]


def numbers(case: Case, reference: Reference, cuts: Cuts, row: int, tolerance: int) -> dict[str, float]:
    """Means over the prefixes, the largest for `ratio`; boundaries of the last. NaN where there is nothing to say."""
    tokens, found = case.rows[row], []
    for end, starts in zip(case.ends, cuts.starts[row], strict=True):
        one = measure(tokens.upto(end), starts)
        if tokens.questions is not None:
            one |= answers(tokens.upto(end), starts)
        least = reference(row, end, len(starts)) if len(starts) <= case.capacity else 0.0
        one |= {"slots": len(starts), "gap": one["bound"] / least if least > ZERO else math.nan}
        found.append(one)
    means = {key: mean([one[key] for one in found]) for key in found[0]}
    ratios = [one["ratio"] for one in found if not math.isnan(one["ratio"])]
    means["ratio"] = max(ratios, default=math.nan)
    match = boundary_match(cuts.starts[row][-1], case.changes(row), tolerance)
    return means | match | {"raised": cuts.raised[row]}


def mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan
