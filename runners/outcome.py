"""What a trainer tells of a run that has ended, and how it says that it was stopped before."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mixassay.spec import RunSpec

Keep = Callable[[RunSpec, dict[str, Tensor]], None]
"""Is given a run's weights by their names in the model."""


class Interrupted(Exception):
    """Stopped at a step boundary; the checkpoint continues from there."""


@dataclass(frozen=True)
class Outcome:
    """What training knows of one finished member. `seconds` is its share of the stack's wall time."""

    spec: RunSpec
    status: Literal["ok", "diverged"]
    metrics: dict[str, float]
    eval: list[dict[str, Any]]
    curve: dict[str, list[float]]
    stopped: dict[str, Any]
    state_bytes: dict[str, int]
    live_state_bytes: dict[str, int]
    params: int
    weights: str
    seconds: float
    ms_per_step: float
    stack: int
    error: dict[str, str] | None = None
    language: dict[str, Any] | None = None  # see `record.Language`
