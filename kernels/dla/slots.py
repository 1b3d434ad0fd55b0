"""Which slot each token is in: boundaries and a capacity S to the schedule that masks, kernels and decoders follow.

At a boundary of a full cache two neighbours are merged first, the segment just closed included. The rules:

    density  least (I_i + I_{i+1}) / (n_i + n_{i+1}), I the sum of a slot's scores, n its tokens (the paper's)
    weak     the divide that was opened by the least score
    ward     least growth of the bias bound, sqrt(n SSE) of the union less both parts, SSE = Q - |S|^2 / n with
             S the sum of the slot's s_t (undecayed) and Q that of |k_t|^2 |v_t|^2

Equals: the oldest pair. Scores count in whole units of 2^-20 (above 16 as 16), so that sums, densities and equals are
the same in any order of summation and on any device: T up to 2^20 for scores up to 2, 2^17 up to 16. Growths of
`ward`, in float64, are equal when closer than 2^-28 of the sum of sqrt(n Q): less is rounding.

Boundaries may come from anywhere: `boundaries.boundaries`, every n-th token (fixed blocks), the true change points (an
oracle), a coin. Boundaries at every token and no scores make a window: S - 1 single tokens and all the rest.
"""

from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.dla.boundaries import lanes

Rule = Literal["density", "weak", "ward"]
UNIT = 2**20
HIGHEST = 16
ROUNDING = 2.0**-28
NOTHING = 2.0**-40
"""An SSE below this part of Q is the rounding of identical tokens."""


class Schedule(NamedTuple):
    """Integers for B sequences of T tokens and H heads; all a mask needs is `starts`, all a decoder needs `shift`."""

    boundary: Tensor
    """bool [B, T, H]. Always true at the first token; never elsewhere with one slot."""
    shift: Tensor
    """int64 [B, T, H], -1 or the highest rank that moves up before the token is written (see the package)."""
    starts: Tensor
    """int32 [B, T, H, S]. After token t, rank r holds tokens [starts[t, r], starts[t, r - 1]), rank 0 up to t
    itself. Ranks that are not in use start at 0, where the oldest slot starts too, and so hold nothing."""

    @property
    def used(self) -> Tensor:
        """Slots in use after each token, int64 [B, T, H]."""
        return (1 + (self.shift >= 0).cumsum(1)).clamp(max=self.starts.shape[-1])

    @property
    def until(self) -> Tensor:
        """int32 [B, T, H]. Token s is where a slot starts after the tokens s <= t < until[s]: 0 where none ever does.
        The newer of two slots that meet loses its start."""
        T, S = self.starts.shape[1], self.starts.shape[-1]
        moved = self.shift[:, 1:]
        newer = self.starts[:, :-1].gather(-1, moved.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        lost = torch.where((moved >= 0) & (moved < S - 1), newer.long(), T)  # T: a spare row
        token = torch.arange(1, T, dtype=torch.int32, device=lost.device)[:, None].expand(lost.shape)
        last = torch.where(self.boundary, T, 0).int()
        return torch.cat((last, last[:, :1]), dim=1).scatter(1, lost, token)[:, :T]


def slots(
    boundary: Tensor,
    capacity: int,
    *,
    rule: Rule = "density",
    score: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
) -> Schedule:
    """The schedule of S = `capacity` slots for boundaries, bool [B, T, H]; the first token counts as one.

    score [B, T, H] serves the rules density and weak, None is a score of 0 everywhere. k [B, T, G, K], G dividing H,
    and v [B, T, H, V] serve ward, which takes B H T K V numbers of memory. Steps in sequence: the most boundaries of
    any head. Raises UserError.
    """
    axes = Axes("dla.slots")
    axes.check_positive("capacity", capacity)
    if rule not in get_args(Rule):
        raise UserError(f'dla.slots: unknown rule "{rule}", expected one of {", ".join(get_args(Rule))}')
    if boundary.dim() != 3 or boundary.dtype != torch.bool or not boundary.shape[1]:
        axes.fail(f"boundary has shape {list(boundary.shape)} and dtype {boundary.dtype}, expected bool [B, T, H]")
    axes.size.update(zip("BTH", boundary.shape, strict=True))
    if score is not None:
        axes.check("score", score, "BTH")
    if rule == "ward":
        if k is None or v is None:
            axes.fail("rule ward needs k and v")
        axes.check("k", k, "BTGK")
        axes.check("v", v, "BTHV")
        axes.check_groups("k", "v")
        k = k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    with torch.no_grad():
        shift, starts = _fill(boundary, capacity, rule, score, k, v)
    first = torch.arange(boundary.shape[1], device=boundary.device)[:, None] == 0
    return Schedule((shift >= 0) | first, shift, starts)


def opening(rule: Rule, held: dict[str, Tensor], divide: Tensor) -> Tensor:
    """The shift [N] that a boundary makes now. `held` are sums of the slots by rank, [N, S, ...]: tokens n and, for
    density, scores I, for ward, s_t as S and |s_t|^2 as Q; `divide` [N, S] is the score that opened each, for weak."""
    S = held["n"].shape[1]
    if S == 1:
        return torch.full_like(held["n"][:, 0], -1)
    return torch.where(held["n"][:, -1] > 0, _pick(rule, held, divide), S - 1)


def _pick(rule: Rule, held: dict[str, Tensor], divide: Tensor) -> Tensor:
    """The rank [N] of the newer slot of the pair to merge in a full cache."""
    n = held["n"]
    tolerance: Tensor | int = 0  # with a float, integers would be compared as floats
    if rule == "density":
        cost = (held["I"][:, :-1] + held["I"][:, 1:]) * UNIT // (n[:, :-1] + n[:, 1:]).clamp(min=1)
    elif rule == "weak":
        cost = divide[:, :-1]
    else:
        inner = (held["S"][:, :-1] * held["S"][:, 1:]).sum((2, 3))
        cost, tolerance = growth(n, held["Q"], held["S"].square().sum((2, 3)), inner)
    least = cost <= cost.amin(1, keepdim=True) + tolerance
    return torch.where(least, torch.arange(cost.shape[1], device=n.device), -1).amax(1)


def move(x: Tensor, shift: Tensor) -> Tensor:
    """What slots [N, S, ...] that add up (states, counts) become when ranks 0 .. shift [N] move up: rank 0 is empty.

    Nothing falls out at the top: for shift = S - 1 the last slot, empty at a hard boundary, meets the one that comes.
    """
    S = x.shape[1]
    moves = torch.arange(S, device=x.device) <= shift[:, None].clamp(max=S - 2)
    moves = moves.view(*x.shape[:2], *[1] * (x.dim() - 2))
    up = torch.where(moves, x, 0)[:, :-1]
    return torch.cat((torch.zeros_like(x[:, :1]), up), dim=1) + torch.where(moves, 0, x)


def keep_older(x: Tensor, shift: Tensor, new: Tensor) -> Tensor:
    """The same for what the older of two slots keeps when they meet (their start), with `new` [N] for rank 0."""
    rank = torch.arange(x.shape[1], device=x.device)
    return torch.where(rank <= shift[:, None], torch.cat((new[:, None], x[:, :-1]), dim=1), x)


def units(score: Tensor) -> Tensor:
    return (score.double().clamp(max=HIGHEST) * UNIT).round().long()


def growth(n: Tensor, Q: Tensor, square: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Of the bound by the merge of ranks r and r + 1, float64 [N, S - 1], and what counts as equal, [N, 1]. n, Q and
    square = |S|^2 [N, S], inner = <S_r, S_{r+1}> [N, S - 1]."""

    def bound(n: Tensor, Q: Tensor, square: Tensor) -> Tensor:
        sse = Q - square / n.clamp(min=1)
        return (n * torch.where(sse > NOTHING * Q, sse, 0.0)).sqrt()

    apart = bound(n, Q, square)
    pair = [x[:, :-1] + x[:, 1:] for x in (n, Q, square, apart)]
    together = bound(pair[0], pair[1], pair[2] + 2 * inner)
    return together - pair[3], ROUNDING * (n * Q).sqrt().sum(1, keepdim=True)


def _fill(
    boundary: Tensor, S: int, rule: Rule, score: Tensor | None, k: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor]:
    """shift [B, T, H] and starts [B, T, H, S]: one step a segment, all heads side by side."""
    (B, T, H), device = boundary.shape, boundary.device
    opens = lanes(boundary).clone()
    opens[:, 0] = True
    if S == 1:
        opens[:, 1:] = False
    N, number = B * H, opens.cumsum(1) - 1  # [N, T]: the segment of each token
    J = int(number.max()) + 1
    token = torch.arange(T, device=device).expand(N, T)
    begin = torch.full((N, J), T, device=device).scatter_reduce(1, number, token, "amin")  # T: no such segment
    total = partial(_total, number, J)
    score = units(lanes(score)) if score is not None else torch.zeros_like(number)
    opener = score.gather(1, begin.clamp(max=T - 1))
    segments = {"I": total(score), "n": total(torch.ones_like(number))}  # whole segments, [N, J, ...]
    if rule == "ward":
        assert k is not None
        assert v is not None
        k, v = lanes(k).double(), lanes(v).double()
        segments["S"] = total(k[..., :, None] * v[..., None, :])
        segments["Q"] = total(k.square().sum(-1) * v.square().sum(-1))
    held = {name: _first(x, S) for name, x in segments.items()}  # by rank, [N, S, ...]
    start, divide = _first(begin, S), _first(opener, S)
    shifts, starts = [torch.full((N,), -1, device=device)], [start]
    for j in range(1, J):
        shift = torch.where(begin[:, j] < T, opening(rule, held, divide), -1)
        start, divide = keep_older(start, shift, begin[:, j]), keep_older(divide, shift, opener[:, j])
        held = {name: _opened(x, shift, segments[name][:, j]) for name, x in held.items()}
        shifts.append(shift)
        starts.append(start)
    shift = torch.where(opens, torch.stack(shifts, dim=1).gather(1, number), -1)
    whole = torch.stack(starts, dim=1).gather(1, number[..., None].expand(-1, -1, S))
    return shift.view(B, H, T).transpose(1, 2), whole.int().view(B, H, T, S).transpose(1, 2)


def _total(number: Tensor, J: int, x: Tensor) -> Tensor:
    """Sums of tokens [N, T, ...] over the J segments `number` [N, T] that they are in: [N, J, ...]."""
    N = len(number)
    flat = (number + J * torch.arange(N, device=number.device)[:, None]).flatten()
    return x.new_zeros(N * J, *x.shape[2:]).index_add_(0, flat, x.flatten(0, 1)).view(N, J, *x.shape[2:])


def _first(x: Tensor, S: int) -> Tensor:
    """S slots with the first segment of x [N, J, ...] in rank 0."""
    return torch.cat((x[:, :1], x.new_zeros(len(x), S - 1, *x.shape[2:])), dim=1)


def _opened(x: Tensor, shift: Tensor, new: Tensor) -> Tensor:
    """The slots moved, with a segment's total in rank 0 where one was opened (nothing is added elsewhere: 0)."""
    x = move(x, shift)
    return torch.cat((x[:, :1] + new[:, None], x[:, 1:]), dim=1)


def ranks(schedule: Schedule) -> Tensor:
    """The dense form: int64 [B, H, T, T], the rank of the slot that holds token s after token t; -1 for s > t."""
    starts = schedule.starts.transpose(1, 2)  # [B, H, T, S]
    token = torch.arange(starts.shape[2], device=starts.device)
    return rank_of(starts, token).masked_fill(token > token[:, None], -1)


def rank_of(starts: Tensor, token: Tensor) -> Tensor:
    """starts [..., S] and tokens [..., n] that are not later than theirs -> ranks, int64 [..., n]."""
    token = token.to(starts.dtype) + torch.zeros_like(starts[..., :1])
    return starts.shape[-1] - torch.searchsorted(starts.flip(-1).contiguous(), token.contiguous(), right=True)
