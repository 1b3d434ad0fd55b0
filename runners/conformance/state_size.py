"""The state is as large as the mixer says: `state_bytes(T)` are the bytes of the live state after T steps, and they
grow as `state_law` declares, "constant", "log" or "linear" in T.
"""

import math
from collections.abc import Callable

import torch

from mixassay.mixers import nbytes
from mixassay.runners.conformance.outcome import Failed, Measured, NotOffered
from mixassay.runners.conformance.subject import Subject, run_steps

LAWS: dict[str, Callable[[int], float]] = {"constant": lambda T: 0.0, "log": lambda T: math.log2(T), "linear": float}
"""Bytes are a + b law(T)."""


@torch.no_grad()
def check(subject: Subject) -> Measured:
    if not subject.steps:
        raise NotOffered("no init_state and step")
    m = subject.build(dtype=torch.float32, nudge=0)
    lengths = [2**i for i in range(3, 11 if subject.full else 8)]
    x, state, live = subject.tokens(1, lengths[-1], dtype=torch.float32), m.init_state(1), []
    for before, T in zip([0, *lengths], lengths, strict=False):
        _, state = run_steps(m, x[:, before:T], state)
        live.append(nbytes(state))
    for T, found in zip(lengths[:3], live, strict=False):
        if m.state_bytes(T) != found:
            raise Failed(f"state_bytes({T}) is {m.state_bytes(T)}, the live state has {found} bytes", f"{T} steps")
    law = fitted(lengths, live)
    if law != m.state_law:
        said = ", ".join(f"{n} after {T}" for T, n in zip(lengths, live, strict=True))
        raise Failed(f"the state is declared {m.state_law} in T and measured {law}: bytes {said} tokens")
    occupied = [m.live_state_bytes(T) for T in lengths]
    measured: Measured = {"law": law, f"bytes at T={lengths[-1]}": live[-1]}
    if occupied != live:
        measured |= {"occupied": fitted(lengths, occupied), f"occupied at T={lengths[-1]}": occupied[-1]}
    return measured


def fitted(lengths: list[int], sizes: list[int]) -> str:
    """The simplest law whose best fit leaves no more than a hundredth of the sizes' mean; "other" if none does."""
    y = torch.tensor(sizes, dtype=torch.float64)
    for name, law in LAWS.items():
        A = torch.tensor([[1.0, law(T)] for T in lengths], dtype=torch.float64)
        left = y - A @ torch.linalg.lstsq(A, y.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        if float(left.abs().max()) <= 0.01 * float(y.mean()) or not y.any():
            return name
    return "other"
