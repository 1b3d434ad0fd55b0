"""What the mixers of dynamic linear attention share (Wang et al. 2026): where each head cuts its past, how many slots
it keeps, and what a token reads of each. `kernels/dla` has the mathematics; the base mixer makes q, k, v and the gates.
"""

import math
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from mixassay.errors import UserError
from mixassay.kernels.dla.boundaries import Reading, boundaries, distance, lanes
from mixassay.kernels.dla.op import Scope, dla, dla_step
from mixassay.kernels.dla.register import openings
from mixassay.kernels.dla.schedule import schedule as scheduled
from mixassay.kernels.dla.scores import attached, with_gradient
from mixassay.kernels.dla.slots import Rule, Schedule, keep_older, move, opening, rank_of, units
from mixassay.kernels.gated_delta_rule import gated_delta_rule
from mixassay.kernels.linear_attention import linear_attention
from mixassay.mixers import Mixer, nbytes
from mixassay.mixers.parts.decay import spared
from mixassay.mixers.parts.precision import wide
from mixassay.mixers.parts.segmentation import Segmentation
from mixassay.mixers.parts.sizes import at_least

Cuts = Literal["scored", "blocks", "random", "oracle"]
Weights = Literal["rank", "content"]
Gate = Literal["ste", "soft", "hard"]
Past = dict[str, Tensor]
"""What a decoder keeps, by name; batch is the first axis of each."""

LEAST, MOST = 0.05, 1.9
"""Range of thresholds: scores are between 0 and 2."""

ONE = math.log(math.e - 1)  # softplus(ONE) = 1


class Operands(NamedTuple):
    """Of all tokens [B, T, ...] or of one [B, ...]; G divides H."""

    q: Tensor  # [..., G, K]
    k: Tensor  # [..., G, K]
    v: Tensor  # [..., H, V]
    raw: Tensor  # [..., width], the columns that `Slots` asked for
    log_decay: Tensor | None = None  # [..., H]
    beta: Tensor | None = None  # [..., H]


class Slots(nn.Module):
    """At most `capacity` slots a head, from operands that the base mixer makes.

    cuts            "scored": where a token's score reaches the head's threshold tau; or forced, "blocks" of `every`
                    tokens, "random" with probability 1 / every, "oracle" at the changes that the task tells
    tau             its start, the same for all heads; None: chosen on the first batch, for 2 capacity / T boundaries a
                    token
    reading         what a token is scored against: "memory", the open slot; "token", the one before it; "memory_raw",
                    for tests
    rule            which neighbours meet when all slots are taken: "density" (the paper's), "weak", "ward"
    weights         "rank": softplus(W x + b), by recency rank; "content": + kappa q . (mean key of the slot)
    scope           "all": decay and delta rule act on every slot, as in the base; "segment": on the open one
    boundary_gate   gradient of tau: "ste", straight through hard boundaries; "soft", slots move by the boundary's
                    probability while training, and by hard boundaries in evaluation; "hard", none: tau stays
    temperature     of that probability, sigmoid((score - tau) / temperature)
    score_proj      0, or the width of keys and values that are scored instead, and learn through the gate

    `width` columns of the mixer's input projection come here. Those of the weights start at 0 and b at softplus^-1(1),
    so that a mixer starts as its base, wherever it cuts.
    """

    def __init__(
        self,
        heads: int,
        *,
        capacity: int,
        cuts: Cuts,
        every: int,
        tau: float | None,
        reading: Reading,
        rule: Rule,
        weights: Weights,
        scope: Scope,
        boundary_gate: Gate,
        temperature: float,
        score_proj: int,
        scale: float,
        delta: bool = False,
    ) -> None:
        super().__init__()
        at_least(1, capacity=capacity, every=every)
        at_least(0, score_proj=score_proj)
        for name, value, known in (
            ("cuts", cuts, Cuts),
            ("reading", reading, Reading),
            ("rule", rule, Rule),
            ("weights", weights, Weights),
            ("scope", scope, Scope),
            ("boundary_gate", boundary_gate, Gate),
        ):
            if value not in get_args(known):
                raise UserError(f'{name} must be one of {", ".join(get_args(known))}, got "{value}"')
        if tau is not None and not LEAST <= tau <= MOST:
            raise UserError(f"tau must be within {LEAST} and {MOST}, got {tau}")
        if temperature <= 0:
            raise UserError(f"temperature must be greater than 0, got {temperature}")
        if boundary_gate == "soft" and scope == "segment":
            raise UserError('boundary_gate "soft" needs scope "all": a slot that is half closed is not frozen')
        if score_proj and (cuts != "scored" or boundary_gate == "hard" or reading == "memory_raw"):
            raise UserError('score_proj learns from boundary_gate "ste" or "soft", cuts "scored" and a unit reading')
        self.heads, self.capacity, self.cuts, self.every = heads, capacity, cuts, every
        self.reading: Reading = reading
        self.rule: Rule = rule
        self.scope: Scope = scope
        self.boundary_gate, self.temperature, self.score_proj = boundary_gate, temperature, score_proj
        self.scale, self.delta = scale, delta
        self.learns = cuts == "scored" and boundary_gate != "hard" and capacity > 1
        self.calibrates = cuts == "scored" and tau is None
        self.bias = spared(torch.full((heads, capacity), ONE))
        self.kappa = nn.Parameter(torch.zeros(heads)) if weights == "content" else None
        self.tau: Tensor
        start = torch.full((heads,), 0.6 if tau is None else tau)
        if self.learns:
            self.tau = spared(start)
        else:
            self.register_buffer("tau", start)

    @property
    def width(self) -> int:
        return self.heads * (self.capacity + 2 * self.score_proj)

    def start(self, linear: nn.Linear) -> None:
        """Zeroes the weights' columns of a projection whose last `width` columns come here."""
        with torch.no_grad():
            linear.weight[len(linear.weight) - self.width :][: self.heads * self.capacity] = 0

    def forward(self, given: Operands, changes: Tensor | None = None) -> Tensor:
        """[B, T, H, V]. `changes` bool [B, T] are what cuts "oracle" follow."""
        return self._read(given, *self.schedule(given, changes))

    def _read(self, given: Operands, score: Tensor, found: Schedule) -> Tensor:
        q, k, v, raw, log_decay, beta = given
        ks, vs = self._scored(given)
        soft = self.learns and self.boundary_gate == "soft" and self.training
        gate = moves = None
        if soft or (self.learns and torch.is_grad_enabled()):
            if self.score_proj:
                score = with_gradient(score, ks, vs, found.boundary, log_decay, self.reading)
            gate = self._probability(score)
        if soft:
            moves = openings(found, score.detach(), self.rule, ks.detach(), vs.detach())
        match = None if self.kappa is None else matches(q, k, found.starts)
        weights = self._rank_scale(raw, match)
        return dla(
            q, k, v, weights, found, log_decay, beta, scale=self.scale, scope=self.scope, gate=gate, opening=moves
        )

    @torch.no_grad()
    def prefill(self, given: Operands) -> tuple[Tensor, Past]:
        """`forward`, and the past behind it, where slots `begin`."""
        score, found = self.schedule(given)
        return self._read(given, score, found), self._behind(given, score, found)

    def begin(self, past: Past) -> bool:
        """Whether `prefill` can serve: behind a past, and where closed slots are frozen, only steps can."""
        return self.scope == "all" and not bool(past["position"].any())

    def _behind(self, given: Operands, score: Tensor, found: Schedule) -> Past:
        """The past after all tokens. A slot's state is what they leave of its own tokens' values: operators are linear
        in the values."""
        (B, T, H, V), (ks, vs), start = given.v.shape, self._scored(given), found.starts[:, -1]  # [B, H, R]
        past = self.init_past(B, self.bias, given.k.shape[-1], V)
        token = torch.arange(T, device=start.device).expand(B, H, T)
        held = rank_of(start, token).transpose(1, 2).unsqueeze(-1)  # [B, T, H, 1]
        masks = [held == r for r in range(self.capacity)]

        def sums(x: Tensor) -> Tensor:
            """[B, T, H, N] -> [B, H, R, N]"""
            return torch.stack([(x * mask).sum(1) for mask in masks], dim=2)

        def count(x: Tensor) -> Tensor:
            return sums(x.unsqueeze(-1)).squeeze(-1)

        past["position"] = past["position"] + T
        past["S"] = torch.stack([left(given.k, given.v * m, given.log_decay, given.beta) for m in masks], dim=2)
        past["n"] = count(torch.ones_like(score, dtype=torch.int64))
        if "keys" in past:
            past["keys"] = sums(wide(self._each_head(given.k)))
        if "I" in past:
            past["I"] = count(units(score))
        if "divide" in past:
            opener = units(score).gather(1, start.transpose(1, 2)).transpose(1, 2)
            past["divide"] = torch.where(past["n"] > 0, opener, 0)
        if "last_k" in past:
            past |= {"last_k": ks[:, -1].to(self.bias.dtype), "last_v": vs[:, -1].to(self.bias.dtype)}
        if "C" in past:
            past["C"] = left(ks, vs * masks[0], given.log_decay, None)
        if "sums" in past:
            past["sums"] = torch.stack([left(ks, vs * mask, None, None) for mask in masks], dim=2)
            past["Q"] = count(norm(ks, vs))
        return past

    def segmentation(self, given: Operands, changes: Tensor | None = None) -> Segmentation:
        k = given.k.repeat_interleave(self.heads // given.k.shape[2], dim=2)
        v = given.v if given.beta is None else given.beta.unsqueeze(-1) * given.v
        return Segmentation(k, v, self.schedule(given, changes)[1].starts)

    @torch.no_grad()
    def calibrate(self, given: Operands) -> None:
        """Sets every tau to a threshold with 2 capacity / T boundaries a token, found by bisection."""
        ks, vs = self._scored(given)
        low, high = torch.full_like(self.tau, LEAST), torch.full_like(self.tau, MOST)
        for _ in range(16):
            tau = (low + high) / 2
            _, found = boundaries(ks, vs, tau, given.log_decay, reading=self.reading)
            more = found.double().mean((0, 1)) > 2 * self.capacity / vs.shape[1]
            low, high = torch.where(more, tau, low), torch.where(more, high, tau)
        self.tau.copy_(high)

    def init_past(self, batch: int, like: Tensor, K: int, V: int) -> Past:
        """Before the first token, in the dtype and on the device of `like`."""
        H, R = self.heads, self.capacity
        ks, vs = (self.score_proj, self.score_proj) if self.score_proj else (K, V)
        count = torch.zeros(batch, H, R, dtype=torch.int64, device=like.device)
        past = {"position": count[:, 0, 0].clone(), "S": like.new_zeros(batch, H, R, K, V), "n": count}
        if self.kappa is not None:
            past["keys"] = like.new_zeros(batch, H, R, K)
        if R > 1 and self.cuts == "scored":
            if self.rule != "ward":
                past["I" if self.rule == "density" else "divide"] = torch.zeros_like(count)
            if self.reading == "token":
                past["last_k"], past["last_v"] = like.new_zeros(batch, H, ks), like.new_zeros(batch, H, vs)
            elif not self._open_slot_is_scored:
                past["C"] = like.new_zeros(batch, H, ks, vs)
        if R > 1 and self.rule == "ward":
            past["sums"], past["Q"] = like.new_zeros(batch, H, R, ks, vs), like.new_zeros(batch, H, R)
        return past

    def step(self, given: Operands, past: Past, change: Tensor | None = None) -> tuple[Tensor, Past]:
        """o [B, H, V] and the new past; `change` bool [B] is what cuts "oracle" follow."""
        q, k, v, raw, log_decay, beta = given
        ks, vs = self._scored(given)
        begins = (past["position"] == 0).unsqueeze(-1)
        score, boundary, after = self._look(ks, vs, log_decay, past, begins, change)
        held = {name: past[key].flatten(0, 1) for name, key in HELD.items() if key in past}
        held.setdefault("I", torch.zeros_like(held["n"]))
        divide = past.get("divide", past["n"]).flatten(0, 1)
        moves = opening(self.rule, held, divide).view(boundary.shape)
        shift = torch.where(boundary & ~begins, moves, -1)

        written = {"n": torch.ones_like(shift), "I": units(score), "keys": self._each_head(k)}
        written |= {"sums": (ks.unsqueeze(-1) * vs.unsqueeze(-2)).detach(), "Q": norm(ks, vs).detach()}
        for name in written.keys() & past.keys():
            x = move(past[name].flatten(0, 1), shift.flatten()).view(past[name].shape)
            after[name] = torch.cat((x[:, :, :1] + written[name].unsqueeze(2), x[:, :, 1:]), dim=2)
        if "divide" in past:
            at = torch.where(begins, 0, shift).flatten()  # the first token opens a slot that moves nothing
            after["divide"] = keep_older(divide, at, units(score).flatten()).view(past["divide"].shape)
        match = None
        if self.kappa is not None:
            means = after["keys"] / after["n"].clamp(min=1).unsqueeze(-1)
            match = (means * self._each_head(q).unsqueeze(-2)).sum(-1)
        o, after["S"] = dla_step(
            q,
            k,
            v,
            self._rank_scale(raw, match),
            shift,
            log_decay,
            beta,
            past["S"],
            scale=self.scale,
            scope=self.scope,
            gate=self._probability(score) if self.learns and torch.is_grad_enabled() else None,
            opening=moves,
        )
        return o, after | {"position": past["position"] + 1}

    def _look(
        self, ks: Tensor, vs: Tensor, log_decay: Tensor | None, past: Past, begins: Tensor, change: Tensor | None
    ) -> tuple[Tensor, Tensor, Past]:
        """Score and boundary [B, H], and what the next token will be scored against."""
        shape = vs.shape[:2]
        if self.cuts != "scored" or self.capacity == 1:
            forced = begins if self.cuts == "scored" else self._forced(past["position"], change)
            return vs.new_zeros(shape), (forced | begins).expand(shape), {}
        own, tau, after = norm(ks, vs), self._tau(), {}
        if self.reading == "token":
            last_k, last_v = past["last_k"], past["last_v"]
            inner, memory = (ks * last_k).sum(-1) * (vs * last_v).sum(-1), norm(last_k, last_v)
            after = {"last_k": ks.detach().to(last_k.dtype), "last_v": vs.detach().to(last_v.dtype)}
        else:
            C = past["S"][:, :, 0].detach() if self._open_slot_is_scored else past["C"]
            inner, memory = ((ks.unsqueeze(-1) * C).sum(-2) * vs).sum(-1), C.square().sum((-2, -1))
        score = torch.where(begins, tau, distance(inner, own, memory, raw=self.reading == "memory_raw")).detach()
        boundary = (score >= tau) | begins
        if "C" in past:
            kept = past["C"] if log_decay is None else log_decay.detach().exp()[..., None, None] * past["C"]
            new = (ks.unsqueeze(-1) * vs.unsqueeze(-2)).detach()
            after["C"] = torch.where(boundary[..., None, None], 0.0, kept) + new
        return attached(score, inner, own, memory) if self.score_proj else score, boundary, after

    @property
    def _open_slot_is_scored(self) -> bool:
        """Whether slot 0 is what tokens are scored against: a sum of the same keys and values, with decay alone."""
        return not self.delta and not self.score_proj

    def _scored(self, given: Operands) -> tuple[Tensor, Tensor]:
        """Keys and values [..., H, *] that scores compare."""
        if not self.score_proj:
            return self._each_head(given.k), given.v
        columns = wide(given.raw[..., self.heads * self.capacity :])
        k, v = torch.unflatten(columns, -1, (2, self.heads, self.score_proj)).unbind(-3)
        return k, v

    def _each_head(self, x: Tensor) -> Tensor:
        """[..., G, K] -> [..., H, K]"""
        return x.repeat_interleave(self.heads // x.shape[-2], dim=-2)

    def schedule(self, given: Operands, changes: Tensor | None = None) -> tuple[Tensor, Schedule]:
        """Scores [B, T, H] and the slots of every token."""
        ks, vs = self._scored(given)
        if self.cuts == "scored":
            return scheduled(
                ks,
                vs,
                self.capacity,
                threshold=self._tau(),
                log_decay=given.log_decay,
                reading=self.reading,
                rule=self.rule,
            )
        forced = self._forced(torch.arange(vs.shape[1], device=vs.device), changes)
        return scheduled(ks, vs, self.capacity, forced=forced.expand(vs.shape[:3]), rule=self.rule)

    def _forced(self, position: Tensor, changes: Tensor | None) -> Tensor:
        """Boundaries [..., H or 1] at positions [...]."""
        if self.cuts == "blocks":
            return (position % self.every == 0).unsqueeze(-1)
        if self.cuts == "random":
            head = torch.arange(self.heads, device=position.device)
            return scrambled(position.unsqueeze(-1) * self.heads + head) < 2**32 // self.every
        if changes is None:
            raise UserError('cuts "oracle" need a task that tells its changes, as segmented_recall with markers does')
        return changes.unsqueeze(-1)

    def _tau(self) -> Tensor:
        return self.tau.clamp(LEAST, MOST)

    def _probability(self, score: Tensor) -> Tensor:
        return torch.sigmoid((score - self._tau()) / self.temperature)

    def _rank_scale(self, raw: Tensor, match: Tensor | None) -> Tensor:
        """[..., H, R]; `match` [..., H, R] is q . mean key."""
        if self.score_proj:
            raw = raw[..., : self.heads * self.capacity]
        # The sum is as wide as the bias: raw itself, the largest tensor of a layer, is not copied.
        raw = torch.unflatten(raw, -1, (self.heads, self.capacity)) + wide(self.bias)
        if match is not None and self.kappa is not None:
            raw = raw + self.kappa.unsqueeze(-1) * match
        return softplus(raw)


def scrambled(index: Tensor) -> Tensor:
    """Words of 32 bits in int64, the same on every device: the last rounds of MurmurHash3."""
    word = (index + 1) * 0x9E3779B1 & 0xFFFFFFFF
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ word >> 16


HELD = {"n": "n", "I": "I", "S": "sums", "Q": "Q"}
"""The names that `opening` has for what a past holds."""

BY_RANK = ("S", "n", "I", "divide", "keys", "sums", "Q")


def left(k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None) -> Tensor:
    """The state [B, H, K, V] behind all tokens."""
    if beta is None:
        state = linear_attention(k, k, v, log_decay, output_final_state=True)[1]
    else:
        state = gated_delta_rule(k, k, v, beta, log_decay, output_final_state=True)[1]
    assert state is not None
    return state


def norm(k: Tensor, v: Tensor) -> Tensor:
    """|k v^T|^2"""
    return k.square().sum(-1) * v.square().sum(-1)


def matches(q: Tensor, k: Tensor, starts: Tensor) -> Tensor:
    """q_t . (mean key of the slot of each rank at t), 0 for an empty one: q, k [B, T, G, K], starts [B, T, H, R] ->
    [B, T, H, R]."""
    B, T, H, R = starts.shape
    q, k = (lanes(wide(x).repeat_interleave(H // x.shape[2], dim=2)) for x in (q, k))
    begin = lanes(starts).long()  # [N, T, R]
    upto = torch.arange(1, T + 1, device=k.device).view(1, T, 1).expand(B * H, T, 1)
    end = torch.cat((upto, begin[..., :-1]), dim=-1)
    sums = pad(k.cumsum(1), (0, 0, 1, 0))  # [N, T + 1, K]: of all tokens before
    at = torch.stack((begin, end)).flatten(2).unsqueeze(-1)  # [2, N, T R, 1]
    before, after = sums.expand(2, *sums.shape).gather(2, at.expand(-1, -1, -1, k.shape[2])).unbind(0)
    means = (after - before).view(B * H, T, R, -1) / (end - begin).clamp(min=1).unsqueeze(-1)
    return (means * q.unsqueeze(2)).sum(-1).view(B, H, T, R).transpose(1, 2)


class SlotMixer(Mixer):
    """A mixer whose state is (the convolution's last inputs, what `slots` keeps)."""

    slots: Slots

    def operands(self, x: Tensor) -> Operands:
        """Of `forward` on x [B, T, D]."""
        raise NotImplementedError

    @property
    def told_changes(self) -> bool:
        return self.slots.cuts == "oracle"

    def segmentation(self, x: Tensor, changes: Tensor | None = None) -> Segmentation:
        return self.slots.segmentation(self.operands(x), changes)

    @property
    def softens(self) -> bool:
        return self.slots.learns and self.slots.boundary_gate == "soft"

    @property
    def straight_through(self) -> tuple[str, ...]:
        """Thresholds, and with `score_proj` all that scores are made of."""
        if not self.slots.learns:
            return ()
        upstream = ["x", *(n for n, _ in self.named_parameters() if n.startswith(("in_proj", "slot_proj")))]
        return ("slots.tau", *(upstream if self.slots.score_proj else ()))

    @property
    def calibrates(self) -> bool:
        return self.slots.calibrates

    def calibrate(self, x: Tensor) -> None:
        self.slots.calibrate(self.operands(x))

    def observe(self, x: Tensor, *changes: Tensor) -> dict[str, Tensor]:
        """Boundaries a token, and the slots that a head's tokens have at the end."""
        found = self.slots.schedule(self.operands(x), *changes)[1]
        return {"boundary_rate": found.boundary.double().mean(), "slots": found.used[:, -1].double().mean()}

    def state_bytes(self, T: int) -> int:
        """All slots, whether they hold tokens or not: the same for every T."""
        return nbytes(self.init_state(1))

    def live_state_bytes(self, T: int) -> int:
        """With all slots that T tokens may fill: blocks as many as there are, other cuts one a token at most."""
        past = cast(tuple[Tensor, Past], self.init_state(1))[1]
        tokens = -(-T // self.slots.every) if self.slots.cuts == "blocks" else T
        empty = self.slots.capacity - min(self.slots.capacity, tokens)
        return self.state_bytes(T) - empty * sum(nbytes(past[n][:, :, 0]) for n in BY_RANK if n in past)
