"""A task asks questions: rows of tokens, and at some positions the token that must be predicted there.

A task is a frozen dataclass whose fields are its YAML keys. Its rows are stateless: row `i` of (task, seed, split)
is a pure function of these, the same bits on every device and in any batch. Tasks know nothing of mixers.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor

from mixassay.registry import Registry

IGNORE = -100
"""Label of a position that is not scored (PyTorch's own convention)."""

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Rows:
    """N rows of T tokens with Q scored positions each.

    tokens: int64 [N, T]. positions: int64 [N, Q], where a prediction is scored. labels: int64 [N, Q], the right
    token there, or IGNORE in a place that a row with fewer questions leaves empty (its position is then 0).
    slices: named int64 [N] or [N, Q] by which results may be split (e.g. distance to the answer).
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    slices: dict[str, Tensor] = field(default_factory=dict)

    def targets(self) -> Tensor:
        """Dense labels int64 [N, T], IGNORE wherever nothing is scored."""
        dense = self.tokens.new_full((self.tokens.shape[0], self.tokens.shape[1] + 1), IGNORE)
        at = self.positions.masked_fill(self.labels == IGNORE, self.tokens.shape[1])  # empty places go to a spare column
        return dense.scatter(1, at, self.labels)[:, :-1].contiguous()


@runtime_checkable
class Task(Protocol):
    """What the runners ask of a task. Raise `UserError` in `__post_init__` for values that cannot be generated."""

    version: ClassVar[int]  # raised whenever the same arguments give other bits

    @property
    def vocab_size(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N], on `index.device`. `seed` is one int, or int64 [N] with one seed per row.

        Validation and test rows are asked for with seed 0 whatever the run's seed: all runs face the same questions.
        """
        ...


task: Registry[type[Task]] = Registry("task", "mixassay.tasks")
