"""Suites by name: which sets they have, and where their data lie under the folder of data.

ruler         DIR/squad/*.json and DIR/hotpotqa/*.json for qa_1 and qa_2; the other eleven need no data
niah          the six of RULER's needle tasks that the log-linear and DLA papers print
longbench     DIR/longbench/NAME.jsonl, or DIR/longbench/samples/NAME.jsonl
commonsense   DIR/commonsense/NAME.jsonl
retrieval     DIR/retrieval/NAME.jsonl
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mixassay.errors import UserError
from mixassay.registry import suggest
from mixassay.runners.eval import retrieval, ruler, stock
from mixassay.runners.longbench.sets import SETS
from mixassay.tasks.ruler.sources import Sources
from mixassay.tasks.ruler.table import TASKS

Suite = Literal["ruler", "niah", "longbench", "commonsense", "retrieval"]
SUITES: tuple[Suite, ...] = get_args(Suite)

ALL: dict[Suite, tuple[str, ...]] = {
    "ruler": tuple(TASKS),
    "niah": ruler.NEEDLES,
    "longbench": tuple(SETS),
    "commonsense": tuple(stock.TASKS),
    "retrieval": retrieval.SETS,
}
LENGTHS: dict[Suite, tuple[int, ...]] = {"ruler": (4096,), "niah": (4096, 8192, 16384)}
SAMPLES = 100
"""Of a RULER task and length, unless it is said how many: RULER itself takes 500."""


@dataclass(frozen=True)
class Plan:
    """Tasks and lengths of a suite; `left_out`: task -> why it cannot be asked here."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    left_out: dict[str, str]


def plan(suite: Suite, tasks: Sequence[str] | None, lengths: Sequence[int] | None, data: Path | None) -> Plan:
    """What to ask. Tasks that were not named are left out where their data are not there; a named one is an error."""
    if suite not in ALL:
        raise UserError(f'unknown suite "{suite}".{suggest(suite, list(SUITES))}')
    unknown = [name for name in tasks or () if name not in ALL[suite]]
    if unknown:
        raise UserError(f'suite {suite} has no task "{unknown[0]}".{suggest(unknown[0], list(ALL[suite]))}')
    if lengths and suite not in LENGTHS:
        raise UserError(f"--lengths are for ruler and niah: the texts of {suite} are as long as they are")
    wanted = tuple(tasks or ALL[suite])
    absent = {name: why for name in wanted if (why := missing(suite, name, data)) is not None}
    if absent and (tasks or len(absent) == len(wanted)):
        raise UserError(next(iter(absent.values())))
    there = tuple(name for name in wanted if name not in absent)
    return Plan(there, tuple(lengths or LENGTHS.get(suite, ())), absent)


def missing(suite: Suite, task: str, data: Path | None) -> str | None:
    """Why a task cannot be asked: which file to put where. None where it can."""
    if suite in LENGTHS:
        if task not in ("qa_1", "qa_2"):
            return None
        kind, layout = ("squad", "SQuAD's") if task == "qa_1" else ("hotpotqa", "HotpotQA's distractor")
        found = sorted((data / kind).glob("*.json")) if data is not None else []
        if len(found) == 1:
            return None
        place = "--data DIR with DIR" if data is None else str(data)
        return f"{task}: put one file of questions in {layout} layout into {place}/{kind}/, found {len(found)}"
    folder = place_of(suite, data)
    if (folder / f"{task}.jsonl").is_file():
        return None
    where = f"{folder / task}.jsonl" if data is not None else f"DIR/{suite}/{task}.jsonl, and give --data DIR"
    if suite == "commonsense":
        rows = f"the rows of {stock.TASKS[task].published}, with the fields {', '.join(stock.TASKS[task].fields)}"
    elif suite == "retrieval":
        rows = "rows with the fields text and value, as those of hazyresearch/based-swde on the hub"
    else:
        rows = (
            "rows as THUDM/LongBench or Xnhyacinth/LongBench on the hub have them (context, input or question, "
            "answers, length, dataset, all_classes)"
        )
    return f"{task}: no {where}: JSON lines, {rows}"


def place_of(suite: Suite, data: Path | None) -> Path:
    """The folder of a suite's files of rows."""
    folder = (data or Path()) / suite
    return folder / "samples" if suite == "longbench" and (folder / "samples").is_dir() else folder


def sources(data: Path | None, essay: Sequence[str]) -> Sources:
    """Of RULER: the haystack's texts, and the questions where there is one file of each kind."""

    def only(kind: str) -> Path | None:
        found = sorted((data / kind).glob("*.json")) if data is not None else []
        return found[0] if len(found) == 1 else None

    texts = {"essay": tuple(essay)} if essay else {}
    return Sources(squad=only("squad"), hotpotqa=only("hotpotqa"), **texts)
