"""The policies: where each of them cuts a sequence, as seen at several of its prefixes.

All but three follow a schedule of slots (`kernels/dla/slots.py`), with boundaries of their own or by score. Fenwick's
blocks are runs of the levels of `kernels/common/fenwick.py`; the oracle with too few slots and the optimum know the
whole sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mixassay.kernels.common.fenwick import level, levels
from mixassay.kernels.dla.boundaries import Reading, boundaries
from mixassay.kernels.dla.slots import Rule, Schedule, slots
from mixassay.runners.audit.config import Dla, Policy
from mixassay.runners.audit.measure import Tokens, bound
from mixassay.runners.audit.optimal import Optimal


@dataclass(frozen=True)
class Case:
    """Sequences of one length, the ends of the prefixes that count (in tokens), and the slots there are."""

    rows: tuple[Tokens, ...]
    ends: tuple[int, ...]
    capacity: int

    @cached_property
    def k(self) -> Tensor:
        return torch.stack([row.k for row in self.rows])[:, :, None]  # [N, T, 1, K]

    @cached_property
    def v(self) -> Tensor:
        return torch.stack([row.v for row in self.rows])[:, :, None]

    @cached_property
    def optimal(self) -> tuple[Optimal, ...]:
        return tuple(Optimal(row.k, row.v, self.capacity) for row in self.rows)

    def changes(self, row: int) -> list[int]:
        """First tokens of the true segments."""
        segment = self.rows[row].segment
        return [0, *(1 + segment.diff().nonzero()[:, 0]).tolist()]


@dataclass(frozen=True)
class Cuts:
    """What a policy does to the sequences of a case."""

    starts: list[list[list[int]]]  # [row][prefix]: first tokens of the blocks, ascending
    slots: int  # the most that are in use after any token
    raised: list[int]  # boundaries by the end of each row, merged ones too


def cut(policy: Policy, case: Case, tau: float | None = None) -> Cuts:
    """`tau` stands for the policy's own where that is tuned."""
    N, T, ends = len(case.rows), case.k.shape[1], case.ends
    if isinstance(policy, Dla):
        assert tau is not None or policy.tau != "tuned"
        threshold = policy.tau if policy.tau != "tuned" else tau
        assert isinstance(threshold, float)
        S = case.capacity if policy.capacity == "same" else T
        return scheduled(dla(case.k, case.v, threshold, S, policy.rule, policy.reading).starts[:, :, 0], ends)
    token = torch.arange(T)
    if policy.name in ("single", "fixed", "window"):
        block = {"single": T, "fixed": -(-T // case.capacity), "window": 1}[policy.name]
        opens = (token % block == 0)[None, :, None].expand(N, T, 1)
        return scheduled(slots(opens, case.capacity).starts[:, :, 0], ends)
    if policy.name == "fenwick":
        cuts = [[fenwick(end - 1, T) for end in ends]] * N
        return Cuts(cuts, max(t.bit_count() + 1 for t in range(T)), [0] * N)
    if policy.name == "optimal":
        return _known([[best.starts(end, min(case.capacity, end)) for end in ends] for best in case.optimal])
    return _known([_oracle(case, row) for row in range(N)])


def dla(k: Tensor, v: Tensor, tau: float | Tensor, S: int, rule: Rule, reading: Reading) -> Schedule:
    score, boundary = boundaries(k, v, tau, reading=reading)
    return slots(boundary, S, rule=rule, score=score, k=k, v=v)


def scheduled(starts: Tensor, ends: Sequence[int]) -> Cuts:
    """The cuts of slots whose ranks begin at `starts` [N, T, S] after each token (`Schedule.starts` of one head)."""
    T = starts.shape[1]
    used = 1 + (starts.diff(dim=2) != 0).sum(2)  # unused ranks repeat the oldest slot's start
    opened = starts[:, :, 0] == torch.arange(T)
    found = [[torch.unique(row[end - 1]).tolist() for end in ends] for row in starts]
    return Cuts(found, int(used.max()), (opened.sum(1) - 1).tolist())


def ends_of(T: int, prefixes: int) -> tuple[int, ...]:
    """Lengths of prefixes, evenly from T / 2 + 1 to T."""
    return tuple(sorted({T - (T - 1 - T // 2) * i // max(1, prefixes - 1) for i in range(prefixes)}))


def fenwick(t: int, T: int) -> list[int]:
    """Blocks of log-linear attention as token t sees them: runs of one level."""
    found = level(torch.tensor(t), torch.arange(t + 1), levels(T))
    return [0, *(1 + found.diff().nonzero()[:, 0]).tolist()]


def _oracle(case: Case, row: int) -> list[list[int]]:
    changes = case.changes(row)
    if len(changes) <= case.capacity:
        return [[t for t in changes if t < end] for end in case.ends]
    best = Optimal(case.rows[row].k, case.rows[row].v, case.capacity, changes)
    return [best.starts(end, min(case.capacity, sum(t < end for t in changes))) for end in case.ends]


def _known(starts: list[list[list[int]]]) -> Cuts:
    most = max(len(one) for row in starts for one in row)
    return Cuts(starts, most, [len(row[-1]) - 1 for row in starts])


def tune(policy: Dla, case: Case, taus: Sequence[float]) -> float:
    """The threshold whose cuts of the whole sequences, at the case's capacity, have the least bound in the mean. Of
    equals the smallest."""
    N, H = len(case.rows), len(taus)
    v = case.v.expand(-1, -1, H, -1)
    schedule = dla(case.k, v, torch.tensor(taus, dtype=v.dtype), case.capacity, policy.rule, policy.reading)
    last = schedule.starts[:, -1]  # [N, H, S]
    means = [sum(bound(case.rows[n], torch.unique(last[n, h]).tolist()) for n in range(N)) / N for h in range(H)]
    return min(zip(means, taus, strict=True))[1]
