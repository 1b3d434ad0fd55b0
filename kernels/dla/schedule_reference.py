"""The schedule of one head, token by token in plain Python and float64: the definition of the fast form."""

from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, sqrt

import torch
from torch import Tensor

from mixassay.kernels.dla.boundaries import Reading
from mixassay.kernels.dla.slots import HIGHEST, NOTHING, ROUNDING, UNIT, Rule


@dataclass
class Slot:
    start: int
    opener: int  # the score that opened it, in units
    state: Tensor  # sum of s_t
    n: int = 0
    I: int = 0  # sum of scores, in units
    Q: float = 0.0  # sum of |s_t|^2


@dataclass
class Traced:
    """One entry a token."""

    score: list[float]
    boundary: list[bool]
    shift: list[int]
    starts: list[list[int]]  # by rank
    ranks: list[list[int]]  # of tokens 0 .. t after token t


def schedule(
    k: Tensor,
    v: Tensor,
    threshold: float,
    capacity: int,
    *,
    log_decay: Tensor | None = None,
    reading: Reading = "memory",
    rule: Rule = "density",
    forced: list[bool] | None = None,
) -> Traced:
    """k [T, K], v [T, V], log_decay [T]. `forced` boundaries have no scores."""
    k, v = k.double(), v.double()
    out = Traced([], [], [], [], [])
    slots: list[Slot] = []  # by rank
    rank: list[int] = []  # by token
    C = before = torch.zeros(k.shape[1], v.shape[1], dtype=torch.float64)
    for t in range(len(k)):
        s = torch.outer(k[t], v[t])
        score = 0.0 if forced else threshold if t == 0 else distance(s, before if reading == "token" else C, reading)
        boundary = t == 0 or ((forced[t] if forced else score >= threshold) and capacity > 1)
        shift = -1
        if boundary and t > 0:
            if len(slots) < capacity:
                shift = capacity - 1
            else:
                shift = pick(slots, rule)
                newer, older = slots[shift], slots.pop(shift + 1)
                state, n, I, Q = newer.state + older.state, newer.n + older.n, newer.I + older.I, newer.Q + older.Q
                slots[shift] = Slot(older.start, older.opener, state, n, I, Q)
            rank = [r + (r <= shift) for r in rank]
        unit = round(min(score, HIGHEST) * UNIT)
        if boundary:
            slots.insert(0, Slot(t, unit, torch.zeros_like(s)))
        decay = 1.0 if log_decay is None else exp(log_decay[t].item())
        C = s if boundary else decay * C + s
        before = s
        slots[0].n += 1
        slots[0].I += unit
        slots[0].Q += float(s.square().sum())
        slots[0].state = slots[0].state + s
        rank.append(0)
        out.score.append(score)
        out.boundary.append(boundary)
        out.shift.append(shift)
        out.starts.append([slot.start for slot in slots] + [0] * (capacity - len(slots)))
        out.ranks.append(list(rank))
    return out


def distance(s: Tensor, C: Tensor, reading: Reading) -> float:
    a, b = float(s.norm()), float(C.norm())
    if a == 0 or b == 0:
        return 0.0
    if reading == "memory_raw":
        return float((s - C).norm()) / b
    return sqrt(max(0.0, 2 - 2 * float((s * C).sum()) / (a * b)))


def pick(slots: list[Slot], rule: Rule) -> int:
    """The rank of the newer of the two slots to merge."""
    pairs = list(pairwise(slots))
    tolerance = 0.0
    costs: list[float]
    if rule == "density":
        costs = [(new.I + old.I) * UNIT // (new.n + old.n) for new, old in pairs]
    elif rule == "weak":
        costs = [new.opener for new, _ in pairs]
    else:
        costs = [
            bound(new.n + old.n, new.Q + old.Q, new.state + old.state)
            - bound(new.n, new.Q, new.state)
            - bound(old.n, old.Q, old.state)
            for new, old in pairs
        ]
        tolerance = ROUNDING * sum(sqrt(slot.n * slot.Q) for slot in slots)
    least = min(costs, default=inf)
    return max(r for r, cost in enumerate(costs) if cost <= least + tolerance)


def bound(n: int, Q: float, state: Tensor) -> float:
    """sqrt(n SSE) of one slot."""
    sse = Q - float(state.square().sum()) / n
    return sqrt(n * sse) if sse > NOTHING * Q else 0.0
