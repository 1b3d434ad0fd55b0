"""Suites by name: which sets they have, and where their data lie under the folder of data.

ruler         DIR/squad/*.json and DIR/hotpotqa/*.json for qa_1 and qa_2; the other eleven need no data
niah          the six of RULER's needle tasks that the log-linear and DLA papers print
longbench     DIR/longbench/NAME.jsonl, or DIR/longbench/samples/NAME.jsonl
longbench-e   DIR/longbench/NAME_e.jsonl, beside those
longbench-v2  DIR/longbench-v2/longbench_v2.jsonl, or data.json as the file on the hub is called
commonsense   DIR/commonsense/NAME.jsonl
retrieval     DIR/retrieval/NAME.jsonl

LongBench's rows may also come from the hub: then nothing is looked for on the disk.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mixassay.errors import UserError
from mixassay.registry import suggest
from mixassay.runners.eval import longbench, longbench_v2, retrieval, ruler, stock
from mixassay.runners.longbench import rows, v2
from mixassay.runners.longbench.sets import SETS
from mixassay.tasks.ruler.sources import Sources
from mixassay.tasks.ruler.table import TASKS

Suite = Literal["ruler", "niah", "longbench", "longbench-e", "longbench-v2", "commonsense", "retrieval"]
SUITES: tuple[Suite, ...] = get_args(Suite)

ALL: dict[Suite, tuple[str, ...]] = {
    "ruler": tuple(TASKS),
    "niah": ruler.NEEDLES,
    "longbench": tuple(SETS),
    "longbench-e": longbench.BY_LENGTH,
    "longbench-v2": (longbench_v2.TASK,),
    "commonsense": tuple(stock.TASKS),
    "retrieval": retrieval.SETS,
}
LENGTHS: dict[Suite, tuple[int, ...]] = {"ruler": (4096,), "niah": (4096, 8192, 16384), "retrieval": ()}
"""Suites that are asked at lengths, and at which unless it is said. Retrieval's texts are then as long as they are."""
HUBS: dict[Suite, str] = {"longbench": rows.HUB, "longbench-e": rows.HUB, "longbench-v2": v2.HUB}
"""Suites whose rows may come from the hub, and from where."""
SAMPLES = 100
"""Of a RULER task and length, unless it is said how many: RULER itself takes 500."""


@dataclass(frozen=True)
class Plan:
    """Tasks and lengths of a suite; `left_out`: task -> why it cannot be asked here."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    left_out: dict[str, str]


@dataclass(frozen=True)
class Data:
    """Where rows come from: a folder on the disk, or OWNER/NAME on the hub; or neither."""

    folder: Path | None = None
    hub: str | None = None


NO_DATA = Data()


def data_of(text: str | None, suite: Suite) -> Data:
    """What `--data` means. Raises `UserError` for what is no folder, unless the suite may come from the hub."""
    if text is None or Path(text).is_dir():
        return Data(Path(text) if text else None)
    if not (text == "hub" or re.fullmatch(r"[\w.-]+/[\w.-]+", text)):
        raise UserError(f"--data {text}: no such folder" + (", hub, or OWNER/NAME on it" if suite in HUBS else ""))
    if suite not in HUBS:
        raise UserError(f"--data {text}: no such folder; from the hub come only the suites {', '.join(HUBS)}")
    return Data(hub=HUBS[suite] if text == "hub" else text)


def plan(suite: Suite, tasks: Sequence[str] | None, lengths: Sequence[int] | None, data: Data) -> Plan:
    """What to ask. Tasks that were not named are left out where their data are not there; a named one is an error."""
    if suite not in ALL:
        raise UserError(f'unknown suite "{suite}".{suggest(suite, list(SUITES))}')
    unknown = [name for name in tasks or () if name not in ALL[suite]]
    if unknown:
        raise UserError(f'suite {suite} has no task "{unknown[0]}".{suggest(unknown[0], list(ALL[suite]))}')
    if lengths and suite not in LENGTHS:
        raise UserError(f"--lengths are for {', '.join(LENGTHS)}: the texts of {suite} are as long as they are")
    wanted = tuple(tasks or ALL[suite])
    absent = {name: why for name in wanted if (why := missing(suite, name, data)) is not None}
    if absent and (tasks or len(absent) == len(wanted)):
        raise UserError(next(iter(absent.values())))
    there = tuple(name for name in wanted if name not in absent)
    return Plan(there, tuple(lengths or LENGTHS.get(suite, ())), absent)


def missing(suite: Suite, task: str, data: Data) -> str | None:
    """Why a task cannot be asked: which file to put where. None where it can."""
    if data.hub is not None:
        return None
    folder = data.folder
    if suite in ("ruler", "niah"):
        if task not in ("qa_1", "qa_2"):
            return None
        kind, layout = ("squad", "SQuAD's") if task == "qa_1" else ("hotpotqa", "HotpotQA's distractor")
        found = sorted((folder / kind).glob("*.json")) if folder is not None else []
        if len(found) == 1:
            return None
        place = "--data DIR with DIR" if folder is None else str(folder)
        return f"{task}: put one file of questions in {layout} layout into {place}/{kind}/, found {len(found)}"
    if folder is not None and there(suite, task, data):
        return None
    name = f"{FOLDERS.get(suite, suite)}/{task}.jsonl"
    where = f"DIR/{name}, and give --data DIR" if folder is None else str(source_of(suite, data) / f"{task}.jsonl")
    if suite == "commonsense":
        wanted = f"the rows of {stock.TASKS[task].published}, with the fields {', '.join(stock.TASKS[task].fields)}"
    elif suite == "retrieval":
        wanted = f"rows with the fields {retrieval.FIELDS}"
    elif suite == "longbench-v2":
        wanted = f"rows as {v2.HUB} on the hub has them (question, choice_A to choice_D, answer, context, ...)"
    else:
        wanted = (
            "rows as THUDM/LongBench or Xnhyacinth/LongBench on the hub have them (context, input or question, "
            "answers, length, dataset, all_classes)"
        )
    return f"{task}: no {where}: JSON lines, {wanted}"


FOLDERS: dict[Suite, str] = {"longbench-e": "longbench"}


def there(suite: Suite, task: str, data: Data) -> bool:
    """Whether a suite's files hold the rows of a task."""
    source = source_of(suite, data)
    return source.is_file() or (rows.held(source, task) if suite in HUBS else (source / f"{task}.jsonl").is_file())


def source_of(suite: Suite, data: Data) -> Path:
    """The folder of a suite's files of rows, or its file where it is one."""
    folder = (data.folder or Path()) / FOLDERS.get(suite, suite)
    inside = {"longbench": "samples", "longbench-e": "samples", "longbench-v2": "data.json"}.get(suite, "")
    return folder / inside if (folder / inside).exists() else folder


def sources(data: Path | None, essay: Sequence[str]) -> Sources:
    """Of RULER: the haystack's texts, and the questions where there is one file of each kind."""

    def only(kind: str) -> Path | None:
        found = sorted((data / kind).glob("*.json")) if data is not None else []
        return found[0] if len(found) == 1 else None

    texts = {"essay": tuple(essay)} if essay else {}
    return Sources(squad=only("squad"), hotpotqa=only("hotpotqa"), **texts)
