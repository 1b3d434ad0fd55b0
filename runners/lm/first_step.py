"""Before a language model trains on a GPU: is its first gradient right? As `runners.first_step` asks of a stack, and at
each length of the mixture, since kernels cut long rows otherwise than short ones.

And once more when it has been trained: a mixer that begins as its parent does (weights of all levels or slots 1) shows
a kernel little of what is its own.
"""

import functools
import time
from contextlib import nullcontext

import torch
from torch import Tensor

from mixassay.kernels import use_backend
from mixassay.kernels.common.precision import cast, rounding
from mixassay.model import Model
from mixassay.runners.first_step import Made, Nudge, compared, worst
from mixassay.runners.lm.batches import Batches
from mixassay.runners.lm.loss import row_losses
from mixassay.runners.memory import out_of_memory
from mixassay.runners.stack import gradients
from mixassay.runners.stream import Stream
from mixassay.spec import RunSpec
from mixassay.tasks import IGNORE

TOKENS = 2**12
"""Of a length that are compared, as far as the first batch has them: rows of 256, or one long one."""

PATIENCE = 10.0
"""Seconds that torch's form of a length may take, by that of the shorter one; beyond, long rows are left out. DLA's
takes minutes for 4096 tokens."""


def errors(model: Model, spec: RunSpec, stream: Stream, *, refuse: bool = True) -> dict[str, float]:
    """ERROR and, where asked, BY_TORCH (`runners.first_step`) of the length, of all compared, where a gradient is
    furthest off.

    refuse: raise WrongStep where no rounding explains it, or a loss.
    """
    found: list[dict[str, float]] = []
    seconds, device = 0.0, next(model.parameters()).device
    steps = {stream.task_at(step).seq_len: step for step in reversed(range(stream.steps))}
    before = min(steps)
    for length, step in sorted(steps.items()):
        if seconds * length / before > PATIENCE:
            break
        rows = slice(0, max(1, min(stream.batch_size, TOKENS // length)))
        tokens, labels = (x.to(device) for x in Batches(stream, spec.seed, rows)[step])
        with torch.compiler.set_stance("force_eager"):  # or a compiled block would keep the choice of operators
            off, seconds = _at(model, spec.train.precision, tokens, labels, refuse)
        found.append(off)
        before = length
    return worst(found)


def _at(model: Model, precision: str, tokens: Tensor, labels: Tensor, refuse: bool) -> tuple[dict[str, float], float]:
    """Of rows of one length, and how long torch's form took; of their second halves, and so on, where that does not fit
    in memory."""
    while True:
        start = time.perf_counter()
        try:
            truth = plain(model, tokens, labels)
            truth[0].item()  # waits for all of it
            break
        except (RuntimeError, MemoryError) as problem:
            if not out_of_memory(problem) or tokens.shape[1] == 1:
                raise
        torch.cuda.empty_cache()  # out here the error is gone, and with its frames all tensors of the attempt
        tokens, labels = half(tokens, labels)
    seconds = time.perf_counter() - start
    ours = kernels(model, precision, tokens, labels)
    return compared(ours, truth, functools.partial(plain, model, tokens, labels), precision, refuse=refuse), seconds


def kernels(model: Model, precision: str, tokens: Tensor, labels: Tensor) -> Made:
    """The rows' mean loss and its gradient [P], as training makes them."""
    return made(model, precision, tokens, labels)


def plain(model: Model, tokens: Tensor, labels: Tensor, precision: str = "fp32", nudge: Nudge = nullcontext) -> Made:
    """The same by torch alone."""
    with use_backend("torch"), nudge(model.parameters()):
        return made(model, precision, tokens, labels)


def made(model: Model, precision: str, tokens: Tensor, labels: Tensor) -> Made:
    with rounding(precision):
        with cast(tokens.device.type, precision):
            loss: Tensor = model(tokens, head=row_losses(labels)).mean()
        return loss.detach(), gradients(loss, list(model.parameters()), None)


def half(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of every row half as many tokens, those before its last label."""
    n = tokens.shape[1] // 2
    ends = [max(n, int(row.nonzero().max()) + 1) for row in labels != IGNORE]
    at = torch.tensor(ends, device=tokens.device).unsqueeze(1) - n + torch.arange(n, device=tokens.device)
    return tokens.gather(1, at), labels.gather(1, at)
