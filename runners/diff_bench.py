"""Two sets of benchmark records to verdicts. What is compared is a ratio: our time over that of something else which
was timed in turns with it, in one process on the same inputs. Absolute times of two runs are never compared: a machine
drifts between them by more than most changes are worth.

Something else is each peer, by its version, and the floor, which is measured in the same process too. All of them must
agree on a verdict, since each may have a bad run of its own:

    regressed, improved   every ratio moved by 5 % or more, and the middle 60 % of its repeats before and after (times
                          of ours and of the other, each at its worst) do not meet
    equivalent            every ratio, at its worst, stayed within 5 %
    failed                ours gave a time before and none now, or a wrong result
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mixassay.runners.bench_records import Record
from mixassay.runners.bench_report import where
from mixassay.runners.diff import VERDICTS, Verdict

MARGIN = 0.05
NAMES = ("bench", "op", "mixer", "dtype", "d_model", "D", "H", "B", "T", "pairs")
"""What a time is about, as far as a record has it."""

About = tuple[str, ...]


class Ratio(NamedTuple):
    """Our time over another: of the medians, and at the ends of the middle 60 % of both."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Timed:
    """One pass of ours at one shape, in one run. Without ratios where it has no time; `reason` says why."""

    device: str
    implementation: str
    status: str
    reason: str | None
    ratios: Mapping[str, Ratio]


@dataclass(frozen=True)
class BenchChange:
    about: About
    base: Timed | None
    head: Timed | None
    verdict: Verdict
    note: str = ""
    reference: str | None = None  # the first that both were timed against

    @property
    def ratios(self) -> tuple[Ratio, Ratio] | None:
        if self.reference is None or self.base is None or self.head is None:
            return None
        return self.base.ratios[self.reference], self.head.ratios[self.reference]


def compare(base: Iterable[Record], head: Iterable[Record], across_env: bool = False) -> list[BenchChange]:
    """The newest run of each thing on both sides."""
    before, after = timed(base), timed(head)
    found = [judge(key, before.get(key), after.get(key), across_env) for key in {**before, **after}]
    return sorted(found, key=lambda change: VERDICTS.index(change.verdict))


def timed(records: Iterable[Record]) -> dict[About, Timed]:
    """Ours, by what it is about and its pass."""
    runs: dict[tuple[About, str, str], list[Record]] = {}
    for record in records:
        if "implementation" in record:
            about = tuple(f"{name}={record[name]}" for name in NAMES if record.get(name) is not None)
            runs.setdefault((about, str(record.get("time")), str(record["env"].get("id"))), []).append(record)
    found = {}
    for (about, *_), run in sorted(runs.items(), key=lambda item: item[0][1]):
        for ours in (record for record in run if record["ours"]):
            for which in [name for name, part in ours.items() if isinstance(part, dict) and "status" in part]:
                found[*about, which] = time_of(ours, [r for r in run if not r["ours"]], which)
    return found


def time_of(ours: Record, others: Sequence[Record], which: str) -> Timed:
    mine = ours[which]
    ratios = {}
    if mine["status"] == "ok":
        for other in others:
            theirs = other.get(which) or other.get("step", {})  # a plain loop knows no stacks
            if theirs.get("status") == "ok":
                name = " ".join(filter(None, (other["implementation"], other.get("version"))))
                ends = mine["ms_p20"] / theirs["ms_p80"], mine["ms_p80"] / theirs["ms_p20"]
                ratios[name] = Ratio(mine["ms"] / theirs["ms"], *ends)
        if mine.get("floor_ms"):
            ratios["floor"] = Ratio(*(mine[name] / mine["floor_ms"] for name in ("ms", "ms_p20", "ms_p80")))
    device = f"{where(ours)}, {ours['env']['class']}"
    return Timed(device, ours["implementation"], mine["status"], mine.get("reason"), ratios)


def judge(about: About, base: Timed | None, head: Timed | None, across_env: bool) -> BenchChange:
    def verdict(verdict: Verdict, note: str = "", reference: str | None = None) -> BenchChange:
        return BenchChange(about, base, head, verdict, note, reference)

    if base is None or head is None:
        return verdict("missing" if head is None else "new")
    if base.status == "ok" and head.status != "ok":
        return verdict("failed", f"{head.status}: {head.reason}")
    if base.status != "ok":
        return verdict("new" if head.status == "ok" else "not comparable", f"before: {base.status}: {base.reason}")
    if base.device != head.device and not across_env:
        return verdict("not comparable", f"{base.device} → {head.device}; --across-env compares the ratios")
    shared = [name for name in base.ratios if name in head.ratios]
    if not shared:
        return verdict("not comparable", "nothing that both runs timed beside it")
    pairs = [(base.ratios[name], head.ratios[name]) for name in shared]
    note = f"{base.implementation} → {head.implementation}" if base.implementation != head.implementation else ""
    most = 1 + MARGIN
    if all(h.middle >= most * b.middle and h.low > b.high for b, h in pairs):
        return verdict("regressed", note, shared[0])
    if all(b.middle >= most * h.middle and b.low > h.high for b, h in pairs):
        return verdict("improved", note, shared[0])
    if all(h.high <= most * b.low and b.high <= most * h.low for b, h in pairs):
        return verdict("equivalent", note, shared[0])
    return verdict("no evidence", note, shared[0])
