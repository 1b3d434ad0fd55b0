"""What a run measured, as data: one record, one line of JSON. Nothing here imports torch.

A record holds everything a table, a diff or a sceptic needs: the resolved configuration, the numbers per evaluation
cell, the learning curve, what it cost, and which code on which machine made it. A failed run is a record too: seeds
that diverged are data, never silence.
"""

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema, from_json

from mixassay.spec import Args, RunSpec, digest

VERSION: Final = 1
"""Schema of a stored line. Raise it, and add the step to MIGRATIONS, whenever an old line no longer reads as it is."""

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""`MIGRATIONS[v]` makes a line of schema v + 1 out of one of schema v."""

Status = Literal["ok", "diverged", "oom", "error", "timeout", "killed"]

SETTLED = ("ok", "diverged")
"""Outcomes that the configuration itself decides: not run again. All others are accidents, and may be."""


def finite(value: Any) -> Any:
    """None for NaN and infinities, which strict JSON cannot hold; the status says what became of the run."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Finite:
    """`finite` before validation, but for JSON, where there is nothing for it to do: there are 100 numbers a line."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = handler(source)
        guarded = core_schema.no_info_before_validator_function(finite, number)
        return core_schema.json_or_python_schema(json_schema=number, python_schema=guarded)


Number = Annotated[Annotated[float, Field(allow_inf_nan=False)] | None, Finite()]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvalCell(Part):
    """One evaluation cell: the task's fields that name it, and what was measured there over all its scored items."""

    split: Literal["valid", "test"]
    cell: Args  # {"seq_len": 64, "num_kv": 4}
    rows: int
    scored: int  # labelled positions in these rows
    accuracy: Number
    loss: Number
    answer_accuracy: Number = None  # of a language model: unbroken stretches of labels that are right throughout


class Positions(Part):
    """The mean loss of an evaluation cell by position: a running mean over `window` positions around each of `at`."""

    split: Literal["valid", "test"]
    cell: Args
    window: int
    at: tuple[int, ...]
    loss: tuple[Number, ...]


class Language(Part):
    """What only language models tell. Speed is that of training alone, its first steps left out."""

    positions: tuple[Positions, ...] = ()
    ranks: int
    tokens_per_second: float | None
    flops_per_token: float  # see `runners/lm/work.py`
    mfu: Number = None  # share of the devices' bf16 peak, None where that is not known
    peak_bytes: int | None = None  # of memory on the first GPU


class Curve(Part):
    """What was measured on the way: series by name ("train/loss", "valid/accuracy", ...), one number for each step."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, tuple[Number, ...]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
    step: tuple[int, ...] = ()

    def __getitem__(self, series: str) -> tuple[Number, ...]:
        return self.__pydantic_extra__[series]


class Stopped(Part):
    step: int
    reason: str


class Code(Part):
    """Which code ran. `source` hashes the files the run depends on; the rest names them for people."""

    commit: str  # of the package's own checkout; "none" when installed without one
    dirty: bool
    patch: str | None  # hash of what differs from the commit, when dirty
    source: str
    version: str  # of the package

    @property
    def name(self) -> str:
        """For people: the commit, or the release where there is none."""
        return (self.commit[:12] if self.commit != "none" else self.version) + ("-dirty" if self.dirty else "")


class Time(Part):
    start: str  # UTC, ISO 8601
    seconds: float  # this run's share of its stack's wall time
    ms_per_step: Number = None  # likewise
    stack: int = 1  # models that trained together


class Samples(Part):
    """What a language model was asked and what it wrote, sample by sample, beside the records of the suite."""

    prompts: str  # sha256 of the prompts as the model read them; .prompts/<its first 24 digits>.jsonl.gz has them
    answers: str  # sha256 of answers/<key>.jsonl.gz: for each sample the answer, its score and its prompt's hash


class Failure(Part):
    type: str
    message: str


class RunRecord(Part):
    """One run. `metrics` are means over the evaluation cells of a split, each cell weighing the same; of a language
    model's answers (`samples`) they are means over samples, and the cells are depths of needles, or one for all."""

    v: Literal[1] = VERSION
    key: str
    cell: str
    suite: str
    seed: int
    role: Literal["report", "tune"]
    status: Status
    attempt: int = 1
    axes: Args  # path -> value as swept
    tuned: Args  # path -> value, as chosen by `select`
    config: Args  # the resolved sections task, mixer, model, train
    metrics: dict[str, Number]  # "test/accuracy", "test/loss", "valid/accuracy", "valid/loss", mixers' observations
    eval: tuple[EvalCell, ...] = ()
    curve: Curve = Curve()
    stopped: Stopped | None = None
    state_bytes: dict[str, int] = {}  # T -> bytes of state per sequence after T tokens
    live_state_bytes: dict[str, int] = {}  # what of these holds something, where it is less
    params: int = 0
    weights: str | None = None  # "sha256:..." of the trained parameters
    samples: Samples | None = None
    code: Code
    env: dict[str, str | int | bool | None]  # see `provenance.environment`
    data: str  # task name and version, "mqar/1"
    time: Time
    error: Failure | None = None
    language: Language | None = None

    def line(self) -> bytes:
        """The record as one line of strict JSON, newline included."""
        return self.model_dump_json().encode() + b"\n"


class Unreadable(ValueError):
    """A line that is no record: cut short, overwritten, or edited into something else."""


class NewerSchema(ValueError):
    """A line written by a later version of the package, whose meaning this one cannot know."""


Shared = dict[bytes, dict[str, Any]]
"""Texts of `config` and `env` that were read before, and what they say."""


def parse(line: bytes, shared: Shared | None = None) -> RunRecord:
    """The record on one line. Raises `Unreadable`, or `NewerSchema` for a line from the future.

    Records that are given the same `shared` have the `config` and `env` in common that they repeat word for word.
    """
    if shared is not None and (record := _sharing(line, shared)) is not None:
        return record
    try:
        return RunRecord.model_validate_json(line)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise Unreadable("not JSON") from None
    v = data.get("v") if isinstance(data, dict) else None
    if not isinstance(v, int):
        raise Unreadable('no schema number "v"')
    if v > VERSION:
        raise NewerSchema(f"schema {v}, but this version of mixassay reads up to {VERSION}")
    if v not in MIGRATIONS:
        where = ".".join(str(part) for part in first["loc"])
        raise Unreadable(f"{where}: {first['msg']}" if where else first["msg"])
    while v < VERSION:
        data, v = MIGRATIONS[v](data), v + 1
    try:
        return RunRecord.model_validate(data)
    except ValidationError as problem:
        raise Unreadable(f"not a record of schema {VERSION}: {problem.errors(include_url=False)[0]['msg']}") from None


def _sharing(line: bytes, shared: Shared) -> RunRecord | None:
    """The record on a line as `RunRecord.line` writes it, None for any other.

    Most of a sweep's lines differ in their numbers alone: by the hundred thousand they take a third less time and
    memory so. The marks are keys, as a quote within a string is escaped. Whether they are the record's own, and not
    some argument's, shows in what is left: its `config` and `env` must be the empty ones put there.
    """
    try:
        a = line.index(b'"config":') + len('"config":')
        b = line.index(b',"metrics":', a)
        c = line.index(b'"env":', b) + len('"env":')
        d = line.index(b',"data":', c)
        config, env = line[a:b], line[c:d]
        if config in shared and env in shared:
            record = RunRecord.model_validate_json(b"{}".join((line[:a], line[b:c], line[d:])))
            if record.config or record.env:
                return None
            object.__setattr__(record, "config", shared[config])  # the model is frozen for everybody else
            object.__setattr__(record, "env", shared[env])
            for part in (record, record.code, record.time, record.stopped, record.curve, *record.eval):
                if part is not None:
                    object.__setattr__(part, "__pydantic_fields_set__", _GIVEN)
        else:
            record = RunRecord.model_validate_json(line)
            if (from_json(config), from_json(env)) == (record.config, record.env):
                shared[config], shared[env] = record.config, record.env
    except ValueError:  # no mark, no JSON, or no record, which pydantic's is too: reading it whole tells which
        return None
    return record


_GIVEN: set[str] = set()
"""Which fields a line gave, of which nobody asks: a set for each part was two fifths of all records' memory."""


def run_key(spec: RunSpec | RunRecord, source: str, data: str, env_class: str) -> str:
    """The name of a run's content: two runs with one key have no reason to give different numbers.

    `spec` may be the record of one. `source` is the hash of the code the run depends on, `data` the task's name and
    version, `env_class` the kind of machine (`provenance.env_class`).
    """
    return digest([spec.cell, spec.seed, spec.role, spec.tuned, source, data, env_class], length=24)


Version = tuple[str, str, str, str]


def version_of(record: RunRecord) -> Version:
    """What the runs of one mean share: source, data, class of machine, chosen values."""
    tuned = json.dumps(record.tuned, sort_keys=True) if record.tuned else ""
    return record.code.source, record.data, str(record.env.get("class")), tuned
