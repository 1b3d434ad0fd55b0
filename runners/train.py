"""Trains the members of a stack together, each as it would train alone."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mixassay.runners import checkpoint as disk
from mixassay.runners import first_step
from mixassay.runners.chance import nothing_drawn
from mixassay.runners.outcome import Interrupted, Keep, Outcome
from mixassay.runners.training import Training
from mixassay.spec import RunSpec

__all__ = ["Interrupted", "Outcome", "run"]


def run(
    stack: Sequence[RunSpec],
    *,
    device: str = "cpu",
    checkpoint: Path | None = None,
    checkpoint_every: float = 30.0,
    emit: Callable[[dict[str, Any]], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
    keep: Keep | None = None,
) -> Iterator[Outcome]:
    """Trains `stack` (all of one `.stack`) and yields each member's outcome when it has finished.

    With `checkpoint` (a folder) the state is kept there every `checkpoint_every` seconds, before outcomes are
    yielded, and when `should_stop()` says so, which raises `Interrupted`. A folder that holds a state of exactly
    these members is continued, outcomes already yielded are yielded again, and it is removed at the end. `emit`
    gets progress events a few times a second. `keep` gets a member's weights by name, before its outcome is yielded
    and before a checkpoint without it is written. On a GPU the first gradient is checked (`first_step`), which may
    raise `WrongStep`.
    """
    training = Training(stack, device, keep)
    if checkpoint is not None:
        training.resume(checkpoint)
    if training.step == 0:
        training.try_out()
    if training.step == 0 and first_step.checked(device):
        training.first_errors = first_step.errors(training.stack, *training.first_rows())
    yield from training.finished
    saved = shown = time.monotonic()
    while training.members:
        with nothing_drawn(device, training.step):
            training.advance()
        done = training.settle()
        now = time.monotonic()
        stop = should_stop()
        if checkpoint is not None and (done or stop or now - saved > checkpoint_every):
            training.save(checkpoint)
            saved = now
        yield from done
        if stop and training.members:
            raise Interrupted
        if now - shown > 0.25 or done:
            emit(training.progress())
            shown = now
    if checkpoint is not None:
        disk.remove(checkpoint)
