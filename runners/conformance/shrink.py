"""From an input for which a claim fails to the smallest one: fewer rows, fewer tokens, zeros, ones.

Greedy: each simplification is kept if the claim still fails. What is left is what the fault needs.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from mixassay.runners.conformance.outcome import Failed

Fault = Callable[[Tensor], str | None]
"""What is wrong for tokens x [B, T, D], or None."""

TRIES = 250
SHOWN = 6


def holds(fault: Fault, inputs: Iterable[Tensor]) -> None:
    """Raise `Failed` with the smallest input like the first for which there is a fault."""
    guarded = guard(fault)
    for x in inputs:
        if guarded(x) is not None:
            x, message = smallest(guarded, x)
            raise Failed(message, describe(x))


def guard(fault: Fault) -> Fault:
    """An exception is a fault, too."""

    def guarded(x: Tensor) -> str | None:
        try:
            return fault(x)
        except (Failed, KeyboardInterrupt):
            raise
        except Exception as problem:
            return f"raises {type(problem).__name__}: {' '.join(str(problem).split())[:200]}"

    return guarded


def smallest(fault: Fault, x: Tensor) -> tuple[Tensor, str]:
    """An input none of whose simplifications is at fault, as far as `TRIES` show, and what is wrong there."""
    message, tries = fault(x) or "", 0
    for simpler in (fewer_rows, shorter, silenced, plainer):
        better = True
        while better and tries < TRIES:
            better = False
            for candidate in simpler(x):
                tries += 1
                said = fault(candidate)
                if said is not None:
                    x, message, better = candidate, said, True
                    break
    return x, message


def fewer_rows(x: Tensor) -> Iterator[Tensor]:
    if len(x) > 1:
        yield from torch.split(x, 1)
        yield from (x[:i] for i in range(2, len(x)))


def shorter(x: Tensor) -> Iterator[Tensor]:
    T = x.shape[1]
    for n in sorted({1, T // 4, T // 2, 3 * T // 4, T - 1} & set(range(1, T))):
        yield x[:, :n]
    if T > 1:
        yield x[:, 1:]


def silenced(x: Tensor) -> Iterator[Tensor]:
    """Runs of tokens as zeros."""
    T = x.shape[1]
    size = T
    while size:
        for start in range(0, T, size):
            if x[:, start : start + size].any():
                y = x.clone()
                y[:, start : start + size] = 0
                yield y
        size //= 2


def plainer(x: Tensor) -> Iterator[Tensor]:
    """Tokens as the first unit vector."""
    unit = torch.zeros_like(x[0, 0])
    unit[0] = 1
    for row, t in x.any(-1).nonzero().tolist():
        if not torch.equal(x[row, t], unit):
            y = x.clone()
            y[row, t] = unit
            yield y


def describe(x: Tensor) -> str:
    """`x [1, 17, 16] = 0 but x[0, 16, 0] = 1`, or how many entries are not zero."""
    shape = f"x {list(x.shape)}"
    entries = x.nonzero().tolist()
    if len(entries) > SHOWN:
        tokens = x.any(-1).nonzero().tolist()
        which = ", ".join(f"[{row}, {t}]" for row, t in tokens[:SHOWN])
        more = ", ..." if len(tokens) > SHOWN else ""
        return f"{shape}, zero but for the normal numbers of tokens {which}{more}"
    if not entries:
        return f"{shape} = 0"
    return f"{shape} = 0 but " + ", ".join(f"x{list(at)} = {x[tuple(at)].item():g}" for at in entries)
