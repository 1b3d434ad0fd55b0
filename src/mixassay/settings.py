"""The settings of a sweep file that move no number of a run: its table, its execution, and how `select` chooses."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from mixassay.spec import Count, Metric, Positive, Spec, ValidMetric

DURATION = re.compile(r"([0-9.]+)([smh])")


def seconds(value: Any) -> Any:
    """45m, 90s, 1.5h or a number of seconds, as seconds."""
    match = DURATION.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else value


SECONDS_SCHEMA = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": "^[0-9.]+[smh]$"}]}
Seconds = Annotated[float, Field(gt=0), BeforeValidator(seconds), WithJsonSchema(SECONDS_SCHEMA)]
Auto = Positive | Literal["auto"]


Tracker = Literal["trackio", "wandb", "tensorboard"]


class Compare(Spec):
    """What counts as a difference, and as solved."""

    margin: Annotated[float, Field(gt=0)] = 0.01
    solved_at: float = 0.99


class Report(Spec):
    """How the table looks. Rows and columns are config paths; no columns given means all other swept paths."""

    metric: Metric = "test/accuracy"
    rows: str = "mixer"
    columns: tuple[str, ...] | None = None
    compare: Compare = Compare()
    title: str | None = None
    notes: str | None = None


class Run(Spec):
    """Where and how runs execute. Nothing here may move a number."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    slots: Auto = "auto"  # stacks that train at the same time on each GPU, or on the CPU
    threads: Auto = "auto"  # CPU threads of each
    stack: Auto = "auto"  # models in one stack, at most
    checkpoint_every: Seconds = 60.0
    timeout: Seconds | None = None  # of one stack
    hang: Seconds = 1800.0  # without a step: its worker is replaced
    retries: Count = 1  # of a stack whose worker died
    keep_weights: bool = False  # of every run of the table, for mixassay.load
    ranks: Positive = 1  # GPUs (or processes on a CPU) that train one language model together
    micro_batch: Auto = "auto"  # rows of a language model at a time on each of them
    compile: bool = False  # blocks of language models by torch.compile
    tracker: Tracker | None = None  # where finished runs are shown as well


class Selection(Spec):
    """`sweep.select` but for its axes: what chooses, and the seeds that are spent on choosing."""

    by: ValidMetric = "valid/accuracy"
    seeds: tuple[int, ...]
