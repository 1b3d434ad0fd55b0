"""What a run is, as data. Every field is a YAML key; nothing here imports torch.

`RunSpec` is one training run, fully expanded. `.cell` names what is compared (everything but the seed and what was
tuned); `.stack` names what must agree for runs to train in one stack.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Args = dict[str, Any]


def on_validation(metric: Any) -> Any:
    """Whatever steers a run may look at validation only, or the reported test numbers are chosen ones."""
    if isinstance(metric, str) and metric.startswith("test/"):
        raise ValueError(f'a test metric ("{metric}") here biases the report; use {metric.replace("test/", "valid/")}')
    return metric


Metric = Literal[
    "test/accuracy", "test/loss", "test/answer_accuracy", "valid/accuracy", "valid/loss", "valid/answer_accuracy"
]
ValidMetric = Annotated[Literal["valid/accuracy", "valid/loss"], BeforeValidator(on_validation)]


class Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Named(BaseModel):
    """`name` and the arguments of the thing so named, which are checked against its signature by `check.py`."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: str

    @property
    def args(self) -> Args:
        return dict(self.__pydantic_extra__ or {})


class MixerSpec(Named):
    """A registered mixer. `mixer: gla` is short for `mixer: {name: gla}`."""


class TaskSpec(Named):
    """A registered task, and how much of it is drawn. All other keys are the task's own.

    A train or eval cell is a mapping of the task's fields that overrides those given here; in `train_cells` it may
    also hold `examples` (fixed set) and `weight` (share of the batches; without weights an epoch over fixed sets
    visits each row once, and endless cells are visited equally often).
    """

    train_examples: Positive | Literal["endless"] = "endless"  # of each train cell that gives no `examples` itself
    valid_examples: Positive = 1000  # per evaluation cell
    test_examples: Positive = 1000
    train_cells: tuple[Args, ...] = ()  # () = the task itself
    eval_cells: tuple[Args, ...] = ()  # () = the train cells
    data_seed: Count | None = None  # None: training rows follow the run's seed; a number: the same rows for all seeds


class ModelSpec(Spec):
    n_layers: Positive = 2
    d_model: Positive = 64
    block: Literal["zoology", "mamba", "swiglu"] = "zoology"
    hybrid: MixerSpec | None = None  # this mixer in layers 0, 2, ...; the mixer under test in 1, 3, ...
    positions: Literal["none", "learned"] = "none"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the embeddings, as in Zoology
    init_std: Annotated[float, Field(gt=0)] = 0.02  # of the embeddings and of the swiglu block's own layers
    mlp_ratio: Annotated[float, Field(gt=0)] = 4.0  # swiglu block only


class Stop(Spec):
    """Stop a run early, on validation only: `{metric: valid/accuracy, above: 0.99}`."""

    metric: ValidMetric = "valid/accuracy"
    above: float | None = None
    below: float | None = None


class TrainSpec(Spec):
    steps: Positive | None = None  # one of steps and epochs; epochs need a fixed set
    epochs: Positive | None = None
    batch_size: Positive = 64
    lr: Annotated[float, Field(gt=0)] = 3e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the steps
    clip: Annotated[float, Field(gt=0)] | None = None  # norm of one model's gradient
    precision: Literal["fp32", "tf32", "fp16", "fp64", "bf16"] = "fp32"  # of products; tf32 is fp32 on a CPU
    eval_every: Positive | None = None  # steps between validations; None: every epoch, or a tenth of the run
    stop: Stop | None = None
    loop: Literal["stack", "lm"] = "stack"  # lm: one model at a time, in micro-batches, on one GPU or several


MEMBER_FIELDS = ("lr", "weight_decay")
"""Training fields that may differ between the members of one stack."""


class Sections(Spec):
    """The four sections that determine a run's numbers, but for its seed."""

    task: TaskSpec
    mixer: MixerSpec
    model: ModelSpec
    train: TrainSpec

    def config(self) -> Args:
        """The sections as plain data."""
        return self.model_dump(mode="json", include=set(Sections.model_fields))

    def fingerprint(self, without: Collection[str] = ()) -> str:
        """Hash of the sections, but for the dotted paths in `without`.

        Fields at their default do not count, so that a field which a later version adds leaves old hashes alone, and
        a default that moves shows up in a diff as a changed number rather than as another cell.
        """
        config = self.model_dump(mode="json", include=set(Sections.model_fields), exclude_defaults=True)
        for path in without:
            *above, last = path.split(".")
            inside: Any = config
            for part in above:
                inside = inside.get(part) if isinstance(inside, dict) else None
            if isinstance(inside, dict):
                inside.pop(last, None)
        return digest(config)

    def having(self, values: Mapping[str, Any]) -> Self:
        """These sections with other values at some dotted paths, validated anew."""
        data = self.model_dump(mode="json")
        for path, value in values.items():
            *above, last = path.split(".")
            inside = data
            for part in above:
                if not isinstance(inside.get(part), dict):
                    inside[part] = {}
                inside = inside[part]
            inside[last] = value
        return type(self).model_validate_json(json.dumps(data))


class RunSpec(Sections):
    """One training run, fully expanded."""

    suite: str
    seed: Count
    role: Literal["report", "tune"] = "report"
    tuned: Args = {}  # path -> value, for what `select` chose (already set in the sections above)
    axes: Args = {}  # path -> value as swept, for tables

    @property
    def cell(self) -> str:
        """Hash of the configuration without seed and without what `select` tunes: what tables and diffs pair by."""
        return self.fingerprint(without=self.tuned)

    @property
    def stack(self) -> str:
        """Hash of everything that must agree for runs to train in one stack; a language model trains alone."""
        if self.train.loop == "lm":
            return digest([self.fingerprint(), self.seed])
        return self.fingerprint(without=[f"train.{field}" for field in MEMBER_FIELDS])


def problems(run: Sections) -> Iterator[tuple[str, str]]:
    """(path, message) of everything in the sections that is wrong only in view of other fields."""
    train, task = run.train, run.task
    both = train.steps is not None and train.epochs is not None
    if both or (train.steps is None and train.epochs is None):
        found = "both (null takes one away)" if both else "neither"
        yield "train.epochs", f"exactly one of train.steps and train.epochs must be given, found {found}"
    if train.stop is not None and (train.stop.above is None) == (train.stop.below is None):
        yield "train.stop", "train.stop needs exactly one of above and below"
    if train.loop == "lm" and train.precision == "fp16":
        yield "train.precision", "train.loop: lm does not scale losses for fp16: bf16, tf32 or fp32 would do"
    if train.loop == "lm" and run.model.dropout > 0:
        yield "model.dropout", f"train.loop: lm has no dropout, got model.dropout={run.model.dropout}"
    yield from cell_problems(task)
    sizes = [cell.examples for cell in task_cells(task, "train")]
    if None in sizes and any(sizes):
        at = f"task.train_cells.{sizes.index(None)}"
        yield at, f"{at} has no examples but others have; give examples in all or in none, or set task.train_examples"
    elif train.epochs is not None and None in sizes:
        message = "train.epochs needs a fixed set: give task.train_examples (or examples in every train cell)"
        yield "train.epochs", f"{message}, or train.steps instead"
    elif any(size < train.batch_size for size in sizes if isinstance(size, int)):
        smallest = min(size for size in sizes if isinstance(size, int))
        yield "train.batch_size", f"train.batch_size={train.batch_size} is more than a train cell's {smallest} examples"
    weighted = ["weight" in cell for cell in task.train_cells]
    if any(weighted) and not all(weighted):
        at = f"task.train_cells.{weighted.index(False)}"
        yield at, f"{at} has no weight but others have; give weight in all or in none"


def cell_problems(task: TaskSpec) -> Iterator[tuple[str, str]]:
    """(path, message) of what is wrong in the task's train and eval cells, their own arguments aside."""
    for kind in ("train", "eval"):
        seen: list[Args] = []
        for i, cell in enumerate(task.train_cells if kind == "train" else task.eval_cells):
            at = f"task.{kind}_cells.{i}"
            for key, value in cell.items():
                if key in TaskSpec.model_fields:
                    yield f"{at}.{key}", f"{at}.{key}: a cell may override the task's own arguments only, not {key}"
                elif key in SHARES and kind == "eval":
                    message = "is for train cells; evaluation takes task.valid_examples and task.test_examples of each"
                    yield f"{at}.{key}", f"{at}.{key} {message}"
                elif key in SHARES and not amount(key, value):
                    want = "a whole number" if key == "examples" else "a number"
                    yield f"{at}.{key}", f"{at}.{key} should be {want} greater than 0, got {json.dumps(value)}"
            args = task.args | {key: value for key, value in cell.items() if key not in SHARES}
            if args in seen:
                yield at, f"{at} is the same as task.{kind}_cells.{seen.index(args)}"
            seen.append(args)


SHARES = ("examples", "weight")
"""Keys of a train cell that say how much of it is drawn, beside the task's arguments."""


def amount(key: str, value: Any) -> bool:
    kinds = (int,) if key == "examples" else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


class TaskCell(NamedTuple):
    """One setting of a task: its arguments, the size of its fixed training set (None: endless), its weight if given."""

    args: Args
    examples: int | None
    weight: float | None


def task_cells(task: TaskSpec, kind: Literal["train", "eval"]) -> list[TaskCell]:
    """The settings a run trains on, or is evaluated on: the cells given, else (eval) the train cells, else the task."""
    given = (task.eval_cells if kind == "eval" else ()) or task.train_cells or ({},)
    cells = []
    for cell in given:
        args = task.args | {key: value for key, value in cell.items() if key not in SHARES}
        examples = cell.get("examples", None if task.train_examples == "endless" else task.train_examples)
        cells.append(TaskCell(args, examples, cell.get("weight")) if kind == "train" else TaskCell(args, None, None))
    return cells


def cell_labels(task: TaskSpec) -> list[Args]:
    """For each eval cell the arguments in which it differs from others: [{"seq_len": 64, "num_kv": 4}, ...]."""
    return differences([cell.args for cell in task_cells(task, "eval")])


def mixer_labels(mixers: Sequence[MixerSpec], hide: Collection[str] = ()) -> list[str]:
    """For each mixer its name and the arguments that not all of them share: "gla expand_k=0.5".

    `hide` names arguments that a table shows elsewhere, such as in its columns.
    """
    varying = differences([mixer.args for mixer in mixers])
    return [
        " ".join([mixer.name, *(f"{key}={plain(value)}" for key, value in args.items() if key not in hide)])
        for mixer, args in zip(mixers, varying, strict=True)
    ]


def differences(rows: Sequence[Args]) -> list[Args]:
    """Each row without the items that all rows share."""
    shared = [key for key in rows[0] if all(key in row and row[key] == rows[0][key] for row in rows)] if rows else []
    return [{key: value for key, value in row.items() if key not in shared} for row in rows]


def plain(value: Any) -> str:
    """A value as one would write it in YAML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(plain, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def digest(data: Any, length: int = 12) -> str:
    """Hex hash of JSON data, independent of key order and of 1 or 1.0."""
    text = json.dumps(whole(data), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def whole(data: Any) -> Any:
    """The data with floats that are whole numbers as ints: an argument that YAML gives as 1 or 1.0 is one argument."""
    if isinstance(data, float) and data.is_integer():
        return int(data)
    if isinstance(data, dict):
        return {key: whole(value) for key, value in data.items()}
    return [whole(value) for value in data] if isinstance(data, (list, tuple)) else data
