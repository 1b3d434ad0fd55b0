"""What a run is, as data. Every field is a YAML key; nothing here imports torch.

`RunSpec` is one training run, fully expanded. `.cell` names what is compared (everything but the seed and what was
tuned); `.stack` names what must agree for runs to train in one stack.
"""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Args = dict[str, Any]


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
    also hold `examples` (fixed set) and `weight` (share of the batches; default: its examples, else 1).
    """

    train_examples: Positive | Literal["endless"] = "endless"
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
    mlp_ratio: Annotated[float, Field(gt=0)] = 4.0  # swiglu block only


class Stop(Spec):
    """Stop a run early, on validation only: `{metric: valid/accuracy, above: 0.99}`."""

    metric: str = "valid/accuracy"
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
    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    eval_every: Positive | None = None  # steps between validations; None: every epoch, or a tenth of the run
    stop: Stop | None = None


MEMBER_FIELDS = ("lr", "weight_decay")
"""Training fields that may differ between the members of one stack."""


class RunSpec(Spec):
    suite: str
    task: TaskSpec
    mixer: MixerSpec
    model: ModelSpec
    train: TrainSpec
    seed: Count
    role: Literal["report", "tune"] = "report"
    tuned: Args = {}  # path -> value, for what `select` chose (already set in the sections above)
    axes: Args = {}  # path -> value as swept, for tables

    def config(self) -> Args:
        """The sections that determine the numbers, as plain data."""
        return self.model_dump(mode="json", include={"task", "mixer", "model", "train"})

    @property
    def cell(self) -> str:
        """Hash of the configuration without seed and without what `select` tunes: what tables and diffs pair by."""
        config = self.config()
        for path in self.tuned:
            section, field = path.split(".", 1)
            config[section].pop(field, None)
        return digest(config)

    @property
    def stack(self) -> str:
        """Hash of everything that must agree for runs to train in one stack."""
        config = self.config()
        for field in MEMBER_FIELDS:
            config["train"].pop(field)
        return digest(config)


def digest(data: Any, length: int = 12) -> str:
    """Hex hash of JSON data, independent of key order."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
