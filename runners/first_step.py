"""Before a stack trains on a GPU: is its first gradient right?

Kernels, half precision, many models side by side: what a compiler or a format gets wrong there looks like a mixer that
does not learn, or like a number. So the loss and gradient of the rows of the first step are compared once with those of
the same models in float32 by torch's operators alone, the first and the last of the stack, a few rows at a time. Where
a gradient is further off than its format's digits explain, rounding is asked what it does to torch's operators: is it
the mixer in this format, or a kernel?
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from mixassay.kernels import use_backend
from mixassay.kernels.common.precision import cast, rounding
from mixassay.model import labelled_loss
from mixassay.runners.loss_scale import LEAST
from mixassay.runners.stack import Stack, gradients
from mixassay.runners.tolerance import BY_TORCH, ERROR, beyond, explained
from mixassay.tasks import IGNORE

FAR = 0.5
"""A relative difference, Euclidean, that no rounding makes."""

ROWS = 64
"""Of a batch that are differentiated at a time: torch's forms of some operators hold much for each."""

NUDGES = 3
"""Draws of weights that are one rounding away."""

DIGITS = {"bf16": 8, "fp16": 11, "tf32": 10}
"""Of a number, binary; of float32 24. tf32 has 11, of which kernels lose one: the matrix units cut what Triton's `dot`
gives them, where torch's products round."""


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
        found.append(compared((losses[row], grads[row]), by_torch(), by_torch, stack.precision))
    return worst(found)


Made = tuple[Tensor, Tensor]
"""A loss and its gradient [P]."""

Nudge = Callable[[Iterable[Tensor]], AbstractContextManager[object]]
"""Weights -> while they are changed (`nudged`), or as they are (`nullcontext`)."""

ByTorch = Callable[[str, Nudge], Made]
"""By torch's operators in a precision, with the weights as a nudge leaves them."""


def compared(ours: Made, truth: Made, by_torch: ByTorch, precision: str, *, refuse: bool = True) -> dict[str, float]:
    """How far `ours` is from float32's `truth`: ERROR, and BY_TORCH where that is more than the digits of `precision`
    explain.

    refuse: raise WrongStep where rounding does not explain the gradient, or the loss.
    """
    off = [_relative(mine, theirs) for mine, theirs in zip(ours, truth, strict=True)]
    found = {ERROR: off[1]}
    if beyond(off[1], precision):
        found[BY_TORCH] = by_rounding(by_torch, truth[1], precision, enough=off[1])
    if refuse:
        for name, far, mine, theirs in zip(("loss", "gradient"), off, ours, truth, strict=True):
            rounded = name == "gradient" and math.isfinite(far) and explained(far, found.get(BY_TORCH, 0.0))
            if not far <= FAR and not rounded and theirs.norm().isfinite():
                raise WrongStep(_told(name, far, mine, precision))
    return found


def by_rounding(by_torch: ByTorch, truth: Tensor, precision: str, enough: float) -> float:
    """How far rounding takes the gradient of torch's operators: in `precision`, and in float32 from weights that are
    nudged in the last digit of it. The furthest; no more is tried once that explains `enough`.

    Some gradients turn on the last digit: where a norm follows an output near 0 (the first tokens of higher-order
    linear attention, (q.k)^2 v), or a decision is hard (dynamic linear attention). There two right implementations are
    as far from each other as from the truth, and one draw says little.
    """
    tries: list[tuple[str, Nudge]] = [
        ("fp32", functools.partial(nudged, precision=precision, seed=seed)) for seed in range(NUDGES)
    ]
    if precision not in ("fp32", "fp64"):
        tries.insert(0, (precision, nullcontext))
    furthest = 0.0
    for asked, nudge in tries:
        furthest = max(furthest, _relative(by_torch(asked, nudge)[1], truth))
        if explained(enough, furthest):
            break
    return furthest


@contextmanager
def nudged(weights: Iterable[Tensor], precision: str, seed: int) -> Iterator[None]:
    """All weights changed by up to a unit of roundoff of `precision`, at random."""
    held = [(x, x.detach().clone()) for x in weights]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x, _ in held:
            draw = torch.rand(x.shape, generator=generator).to(x.device, x.dtype)
            x.mul_(1 + (2 * draw - 1) * 2.0 ** -DIGITS.get(precision, 24))
    try:
        yield
    finally:
        with torch.no_grad():
            for x, before in held:
                x.copy_(before)


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


def plain(
    stack: Stack,
    row: int,
    tokens: Tensor,
    positions: Tensor,
    labels: Tensor,
    precision: str = "fp32",
    nudge: Nudge = nullcontext,
) -> Made:
    """Loss and gradient [P] of the stack's model `row`, by torch alone."""
    model = stack.model(row)
    leaves: list[Tensor] = list(model.parameters())
    loss, grad = labels.new_zeros((), dtype=stack.params.dtype), torch.zeros_like(stack.params[row])
    questions = (labels != IGNORE).sum()
    with use_backend("torch"), rounding(precision), nudge(leaves):
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
    if precision == "fp16" and not finite:
        cause = (
            "Either float16, which ends at 65,504, cannot hold this mixer (train.precision tf32), or a kernel is wrong"
        )
    elif finite and name == "gradient":
        cause = "Rounding takes torch's own operators less than half as far: a kernel must be wrong"
    else:
        cause = "No rounding explains that: a kernel must be wrong"
    return f"before the first step the {name} {what}. {cause}. MIXASSAY_BACKEND=torch does without; please report it"
