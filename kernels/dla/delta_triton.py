"""Dynamic linear attention on the gated delta rule, in Triton: how a call is spread over the machine, and its launches.

With s the scale, b the write strengths and M[t, j] the weight that t gives to the slot of j times the decay from j to t
(`mask_triton.py`: a matrix, 0 for j > t), token t reads

    O = s (S . M) bV               S = (lower part of Q K^T) (I + strictly lower part of b K K^T)^-1

over the whole sequence. S holds no decay: decays are numbers, which come out of every product. Nor does it depend on
slots. It is solved by pairs of chunks of C tokens (`delta_pairs_triton.py`). What comes before them and after them is
left to each chunk alone (`delta_chunk_triton.py`). Of the gradient of M, which pairs have too, `mask_triton.py` makes
those of weights and decays.

Queries Y and their gradients dY are kept for every pair, T / C times the queries in all: this is for sequences of up to
a few thousand tokens. A product is never transposed after it was computed: where a transposed one is needed, its
operands are swapped.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixassay.kernels.common.triton import Cut, half, operands
from mixassay.kernels.dla import pairs_triton
from mixassay.kernels.dla.delta_chunk_triton import chunk_kernel, gradients_kernel
from mixassay.kernels.dla.delta_pairs_triton import column_kernel, row_kernel, walk_kernel
from mixassay.kernels.dla.mask_triton import sums
from mixassay.kernels.gated_delta_rule.solve_triton import inverse_precision, solve_kernel


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    rows: int  # of a program of the mask, a multiple of C
    num_warps: int
    column_warps: int  # of `column`, which holds most
    num_stages: int


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if half(dtype):
        return Plan(64, 128, 8 if max(K, V) > 64 else 4, 8, 2)
    # Exact products fill a thread's registers; chunks of 32 want two warps where tensor cores serve (`tile`).
    return Plan(16, 128, 8, 8, 1) if operands(dtype)[2] == "ieee" else Plan(32, 128, 2, 2, 1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    until: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """o, and N [B, T, H, C] for the backward. rank_scale, beta and log_decay in the accumulator's dtype or narrower,
    `until` of the schedule."""
    call = _Call(q, k, v, rank_scale, until, beta, log_decay, scale, how)
    inverse, o = call.inverse(), torch.empty_like(call.v)
    made = call.chunks(inverse) | {"M": call.matrix(call.dot), "o": o, "ys": None}
    for part in call.parts():
        call.mask(part, made["M"])
        call.launch(walk_kernel, part, OUTPUT=True, **made)
    return o, inverse


def room(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `forward` returns, not filled in."""
    return v.new_empty(v.shape), kept(q, *v.shape[:3], plan(q.dtype, q.shape[-1], v.shape[-1]).C)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    until: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    gated: bool,
    inverse: Tensor,
    do: Tensor,
    scale: float,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, rank_scale, beta, log_decay and, where there is one, of the boundaries' gate; N by
    `forward` with the same plan."""
    call = _Call(q, k, v, rank_scale, until, beta, log_decay, scale, how)
    dv, dbeta, dweights = torch.empty_like(call.v), torch.empty_like(call.beta), torch.zeros_like(call.rank_scale)
    terms = 3 if gated else 1
    u, columns = call.new(terms, call.N, call.T), call.new(terms, call.N, call.blocks, call.side)
    M, E = call.matrix(call.dot), call.matrix(call.acc)
    made = {"inverse": inverse, "do": do.to(v.dtype).contiguous(), "M": M, "E": E, "o": None, "dv": dv, "dbeta": dbeta}
    made |= call.chunks(inverse)
    made |= {name: torch.empty_like(made["keys"]) for name in ("dy", "dkeys", "dbk")}
    made |= {"dscores": torch.empty_like(inverse), "ys": call.pairs(), "dys": call.pairs()}
    for part in call.parts():
        call.mask(part, M)
        call.launch(walk_kernel, part, OUTPUT=False, **made)
        call.launch(row_kernel, part, **made)
        call.launch(column_kernel, part, **made, num_warps=call.column_warps)
        call.ranks(part, E, dweights, u, columns, gated)
    alone = call.R == 1  # else the heads that share a key are added
    dq, dk = (call.new(*made["keys"].shape, dtype=q.dtype if alone else call.acc) for _ in range(2))
    call.launch(gradients_kernel, (0, call.N), dq=dq, dk=dk, **made)
    if not alone:
        dq, dk = (x.unflatten(2, (-1, call.R)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dweights, dbeta, *sums(u, columns, call.log_decay, call.until, gated)


def kept(q: Tensor, *shape: int) -> Tensor:
    """Room for what kernels keep for one another, in the dtype of products."""
    return q.new_empty(shape, dtype=q.dtype)


class _Call(pairs_triton.Call):
    """The sizes of one call, its operands made contiguous, and its launches, for some heads at a time."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rank_scale: Tensor,
        until: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        scale: float,
        how: Plan | None,
    ) -> None:
        how = how or plan(q.dtype, q.shape[-1], v.shape[-1])
        pairs = pairs_triton.Plan(how.C, how.rows, how.num_warps, how.num_stages)
        super().__init__(q, k, v, rank_scale, until, log_decay, scale, pairs)
        self.column_warps = how.column_warps
        self.beta = beta.to(self.acc).contiguous()
        self.given: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, "beta": self.beta, "scale": scale}
        self.given |= {name: getattr(self, name) for name in ("T", "NT", "H", "R", "side", "K", "V")}
        self.given |= {
            "BK": pairs_triton.tile_beside(self.K, how.C),
            "BV": pairs_triton.tile_beside(self.V, how.C),
        } | self.tiles

    def launch(self, kernel: Any, part: tuple[int, int], **more: Any) -> None:
        given = self.given | {"first": part[0]} | more
        options = {name: given[name] for name in ("num_warps", "num_stages")}
        kernel[(part[1] * self.NT,)](**{name: given[name] for name in kernel.arg_names}, **options)

    def inverse(self) -> Tensor:
        inverse = kept(self.q, *self.beta.shape, self.how.C)
        cut = Cut.of(self.B, self.T, None, 0, self.how.C)
        dot, acc, precision = operands(self.q.dtype)
        solve_kernel[(self.N * self.NT,)](
            self.k,
            self.beta,
            None,
            inverse,
            self.new(self.N, self.T),  # decays, of which there are none here
            None,
            self.T,
            cut.length,
            cut.P,
            self.H,
            self.R,
            K=self.K,
            C=self.how.C,
            BK=min(pairs_triton.tile_beside(self.K, self.how.C), 64),
            DECAY=False,
            PACKED=False,
            DOT=dot,
            ACC=acc,
            SUM=acc,
            PREC=precision,
            EXACT=inverse_precision(self.q.dtype, self.K),
            num_warps=1,
            num_stages=1,
        )
        return inverse

    def chunks(self, inverse: Tensor) -> dict[str, Any]:
        """P and U."""
        made = {"scores": torch.empty_like(inverse), "keys": kept(self.q, *self.beta.shape, self.K)}
        self.launch(chunk_kernel, (0, self.N), inverse=inverse, **made)
        return made

    def pairs(self) -> Tensor:
        return kept(self.q, self.heads * (self.NT * (self.NT - 1) // 2), self.how.C, self.K)
