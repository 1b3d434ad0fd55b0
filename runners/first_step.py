"""Before a stack trains on a GPU: is its first gradient right?

Kernels, half precision, many models side by side: what a compiler or a format gets wrong there looks like a mixer that
does not learn, or like a number. So the loss and gradient of the rows of the first step are compared once with those of
the same models in float32 by torch's operators alone, the first and the last of the stack, a few rows at a time. A
gradient that is further off than its format's digits explain is made once more, by torch's operators in that format:
is it the format, or a kernel?
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mixassay.kernels import use_backend
from mixassay.kernels.common.precision import cast, rounding
from mixassay.model import labelled_loss
from mixassay.runners.loss_scale import LEAST
from mixassay.runners.stack import Stack, gradients
from mixassay.runners.tolerance import BY_TORCH, ERROR, beyond
from mixassay.tasks import IGNORE

FAR = 0.5
"""A relative difference, Euclidean, that no rounding makes."""

ROWS = 64
"""Of a batch that are differentiated at a time: torch's forms of some operators hold much for each."""


class WrongStep(Exception):
    """What is trained on would be something else than the models' gradient."""


def checked(device: str) -> bool:
    """Whether a first gradient is compared with float32's: on a CPU it is made by the same operators."""
    return device != "cpu"


def errors(stack: Stack, tokens: Tensor, positions: Tensor, labels: Tensor) -> dict[str, float]:
    """tokens [M, B, T], positions and labels [M, B, Q] -> ERROR, and BY_TORCH where that is more than rounding.

    Raises WrongStep where no rounding explains it, or a loss.
    """
    losses, grads = _ours(stack, tokens, positions, labels)
    found = []
    for row in sorted({0, len(stack) - 1}):
        by_torch = functools.partial(plain, stack, row, tokens[row], positions[row], labels[row])
        found.append(compared((losses[row], grads[row]), by_torch("fp32"), by_torch, stack.precision))
    return worst(found)


Made = tuple[Tensor, Tensor]
"""A loss and its gradient [P]."""


def compared(
    ours: Made, truth: Made, by_torch: Callable[[str], Made], precision: str, *, refuse: bool = True
) -> dict[str, float]:
    """How far `ours` is from float32's `truth`: ERROR, and BY_TORCH where that is more than the digits of `precision`
    explain, and they are fewer than float32's; `by_torch` makes the same by torch's operators in a precision.

    refuse: raise WrongStep where no rounding explains it, or the loss.
    """
    if refuse:
        for name, mine, theirs in zip(("loss", "gradient"), ours, truth, strict=True):
            off = _relative(mine, theirs)
            if not off <= FAR and theirs.norm().isfinite():
                raise WrongStep(_told(name, off, mine, precision))
    found = {ERROR: _relative(ours[1], truth[1])}
    if beyond(found[ERROR], precision) and precision not in ("fp32", "fp64"):
        found[BY_TORCH] = _relative(by_torch(precision)[1], truth[1])
    return found


def worst(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return max(found, key=lambda one: one[ERROR])


def _relative(ours: Tensor, theirs: Tensor) -> float:
    size = theirs.norm()
    return float((ours - theirs).norm() / size.clamp(min=torch.finfo(size.dtype).tiny))


def _ours(stack: Stack, tokens: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """In float16 at the largest scale at which training would find all gradients finite, if there is one."""

    def at(scale: float) -> tuple[Tensor, Tensor]:
        return stack.loss_and_grad(tokens, positions, labels, None, stack.params.new_full((len(stack),), scale))

    losses, grads = at(1.0)
    for scale in (2.0**-4, 2.0**-8, LEAST) if stack.precision == "fp16" else ():
        if grads.isfinite().all():
            break
        losses, grads = at(scale)
    return losses, grads


def plain(stack: Stack, row: int, tokens: Tensor, positions: Tensor, labels: Tensor, precision: str = "fp32") -> Made:
    """Loss and gradient [P] of the stack's model `row`, by torch alone."""
    model = stack.model(row)
    leaves: list[Tensor] = list(model.parameters())
    loss, grad = labels.new_zeros((), dtype=stack.params.dtype), torch.zeros_like(stack.params[row])
    questions = (labels != IGNORE).sum()
    with use_backend("torch"), rounding(precision):
        for some, at, asked in zip(*(torch.split(x, ROWS) for x in (tokens, positions, labels)), strict=True):
            share = (asked != IGNORE).sum() / questions
            if share == 0:  # a mean over nothing
                continue
            with cast(some.device.type, precision):
                here = model(some, at, None, labelled_loss(asked, IGNORE))
            factor = share * questions / 4 if precision == "fp16" else None  # as `Stack.loss_and_grad` has it
            loss += share * here.detach()
            grad += share * gradients(here, leaves, factor)
    return loss, grad


def _told(name: str, off: float, ours: Tensor, precision: str) -> str:
    finite = bool(ours.isfinite().all())
    what = f"is {off:.0%} off float32's" if finite else "is not finite, float32's is"
    coarse = f"{precision} is too coarse for this mixer"
    if precision == "fp16" and not finite:
        coarse = "float16 ends at 65,504"
    return (
        f"before the first step the {name} {what}. Either {coarse} (train.precision tf32 or fp32), "
        "or a kernel is wrong: MIXASSAY_BACKEND=torch does without them, and please report it"
    )
