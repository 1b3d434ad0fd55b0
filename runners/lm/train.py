"""Trains a language model, on one rank or several, from its first step or its checkpoint to its outcome."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixassay import plugins
from mixassay.runners import checkpoint as disk
from mixassay.runners import first_step
from mixassay.runners.chance import nothing_drawn
from mixassay.runners.lm.ranks import Ranks, together
from mixassay.runners.lm.training import End, Training, tensors_of
from mixassay.runners.outcome import Interrupted, Keep, Outcome
from mixassay.spec import RunSpec

GO, SAVE, STOP, END = range(4)
"""What rank 0 decides after a step: go on, write a checkpoint first, write one and stop, or the run is over."""


@dataclass(frozen=True)
class How:
    """What moves no number but the order of sums. `micro_batch`: rows at a time on each rank, None: as many as hold
    2^16 tokens on a GPU, all on a CPU. `compiled`: blocks go through torch.compile. `plugins`: for the other ranks."""

    ranks: int = 1
    micro_batch: int | None = None
    compiled: bool = False
    plugins: tuple[str, ...] = ()


def run(
    stack: Sequence[RunSpec],
    *,
    device: str = "cpu",
    checkpoint: Path | None = None,
    checkpoint_every: float = 60.0,
    emit: Callable[[dict[str, Any]], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
    keep: Keep | None = None,
    how: How = How(),
) -> Iterator[Outcome]:
    """As `runners.train.run`, for a stack of one. The first gradient is checked at each length of the mixture."""
    (spec,) = stack
    with together(how.ranks, device, _follow, spec, checkpoint, how) as ranks:
        training = _begin(spec, device, ranks, checkpoint, how)
        end = _lead(training, checkpoint, checkpoint_every, emit, should_stop)
        outcome = training.outcome(end)
    if keep is not None:
        keep(spec, tensors_of(training.model))
    yield outcome
    if checkpoint is not None:
        disk.remove(checkpoint)


def _begin(spec: RunSpec, device: str, ranks: Ranks, checkpoint: Path | None, how: How) -> Training:
    training = Training(spec, device, ranks, how.micro_batch, how.compiled)
    if checkpoint is not None:
        training.resume(checkpoint)
    if training.step == 0 and ranks.first:
        training.try_out()
    if training.step == 0 and ranks.first and first_step.checked(device):
        training.check()
    ranks.agree(GO)  # nobody writes a checkpoint that another still reads
    return training


def _lead(
    training: Training,
    checkpoint: Path | None,
    every: float,
    emit: Callable[[dict[str, Any]], None],
    should_stop: Callable[[], bool],
) -> End:
    """Rank 0's way to the end of the run."""
    ranks, saved, shown, told = training.ranks, time.monotonic(), 0.0, training.curve["step"][:]
    while True:
        with nothing_drawn(training.device, training.step):
            training.advance()
        end = training.settle()
        now = time.monotonic()
        due = checkpoint is not None and now - saved > every
        decision = ranks.agree(END if end else STOP if should_stop() else SAVE if due else GO)
        if end is not None:
            return end
        if decision != GO and checkpoint is not None:
            training.save(checkpoint)
            saved = now
        if decision == STOP:
            raise Interrupted
        if training.curve["step"] != told:
            told = training.curve["step"][:]
            emit({"event": "said", "text": f"{title(training.spec)}: step {training.step}, {training.says()}"})
        if now - shown > 0.25:
            emit(progress(training))
            shown = now


def _follow(ranks: Ranks, device: str, spec: RunSpec, checkpoint: Path | None, how: How) -> None:
    """Every other rank's."""
    plugins.load(how.plugins)
    training = _begin(spec, device, ranks, checkpoint, how)
    while True:
        training.advance()
        training.settle()
        decision = ranks.agree(GO)
        if decision in (SAVE, STOP) and checkpoint is not None:
            training.save(checkpoint)
        if decision in (STOP, END):
            return


def progress(training: Training) -> dict[str, Any]:
    return {
        "event": "progress",
        "step": training.step,
        "steps": training.stream.steps,
        "active": 1,
        "ms_per_step": 1000 * training.training_seconds / max(1, training.step),
        "says": training.says(),
    }


def title(spec: RunSpec) -> str:
    return f"{spec.mixer.name} seed {spec.seed}"
