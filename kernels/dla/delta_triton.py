"""Dynamic linear attention on the gated delta rule, in Triton: kernels and their launches, forward and backward.

With s the scale, b the write strengths and M[t, j] the weight that t gives to the slot of j times the decay from j to t
(`mask_triton.py`: a matrix, 0 for j > t), token t reads

    O = s (S . M) bV               S = (lower part of Q K^T) (I + strictly lower part of b K K^T)^-1

over the whole sequence. S holds no decay: decays are numbers, which come out of every product. Nor does it depend on
slots. It is solved by pairs of chunks of C tokens. With N that inverse of one chunk alone,

    P = (lower part of Q K^T) N    U = N^T K    first Y = Q - P bK

a row of chunks begins with S = P for its own pair and walks back, Y being what its queries are where they come to chunk
j, having passed all behind it:

    S_j = Y U_j^T                  Y <- Y - S_j bK_j

Backward. With Z = s b (dO V^T), the gradient of M is E = S . Z (`mask_triton.py` makes those of weights and decays of
it), and a row walks forth again, at first dY = 0:

    dS_j = Z_j . M_j - dY bK_j^T   dY <- dY + dS_j U_j       last, for the row's own chunk, dP = the same dS

A column sums over the rows behind it, with Y before and dY behind the step:

    d(bV) = s sum (S . M)^T dO     dU = sum dS^T Y           d(bK) = - sum S^T dY

Then each chunk alone:

    dA = lower part of dP N^T      dL = - strictly lower part of (P^T dP + U dU^T) N^T
    dQ = dY + dA K                 dbK = d(bK) - P^T dY + dL K
    dK = b dbK + dA^T Q + dL^T bK + N dU             db = dbK . K + d(bV) . V, summed over columns

Y and dY are kept for every pair, T / C times the queries in all: this is for sequences of up to a few thousand tokens.
A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import Cut, half, load_turned, operands, tile
from mixassay.kernels.dla import pairs_triton
from mixassay.kernels.dla.heads_triton import load_heads, store_heads
from mixassay.kernels.dla.mask_triton import sums
from mixassay.kernels.gated_delta_rule.solve_triton import inverse_precision, solve_kernel

kernel = triton.jit(do_not_specialize=["first", "T", "NT", "H", "R"])


@triton.jit
def _chunk(first, T, H, NT, C: tl.constexpr):
    """A program's head, counted from `first` on and in its row, its sequence's first token, and its chunk: the last
    ones, which have most to read, come first."""
    index = tl.program_id(0).to(tl.int64)
    head = index // NT
    n = (NT - 1 - index % NT).to(tl.int32)
    return head, (first + head) % H, (first + head) // H * T, n


@triton.jit
def _pair(head, n, p, NT, C: tl.constexpr):
    """The first row, in a table of all pairs' [C, K], of chunk n and the earlier chunk p."""
    return (head * (NT * (NT - 1) // 2) + n * (n - 1) // 2 + p) * C


@triton.jit
def _strengths(beta, row, h, i, left, H, ACC: tl.constexpr):
    return tl.load(beta + (row + i) * H + h, mask=i < left, other=0.0).to(ACC)


@kernel
def chunk_kernel(
    q,
    k,
    inverse,  # N  [B, T, H, C]
    scores,  # P  [B, T, H, C]
    keys,  # U  [B, T, H, K]
    first,
    T,
    NT,
    H,
    R,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """What a chunk's queries read of its own tokens, and its keys as of its end."""
    _, h, row, n = _chunk(first, T, H, NT, C)
    row += n * C
    left = T - n * C
    i = tl.arange(0, C)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
    N = load_heads(inverse, row, h, i, left, H, C, C)
    A = tl.dot(qs, tl.trans(ks), input_precision=PREC, out_dtype=ACC)
    A = tl.where(i[:, None] >= i[None, :], A, 0.0).to(DOT)
    store_heads(scores, tl.dot(A, N, input_precision=PREC, out_dtype=ACC), row, h, i, left, H, C, C)
    store_heads(keys, tl.dot(tl.trans(N), ks, input_precision=PREC, out_dtype=ACC), row, h, i, left, H, K, BK)


@kernel
def walk_kernel(
    q,
    k,
    v,
    beta,
    scores,
    keys,
    M,
    o,
    ys,  # [pairs, C, K]
    scale,
    first,
    T,
    NT,
    H,
    R,
    side,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    OUTPUT: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """A row of chunks, from its own back: what it reads, or its queries before every step."""
    head, h, begin, n = _chunk(first, T, H, NT, C)
    row = begin + n * C
    left = T - n * C
    i = tl.arange(0, C)
    if OUTPUT:
        M += head * side * side + n * C + i[None, :] * side + i[:, None]  # t innermost
        out = tl.zeros([C, BV], dtype=ACC)
    S = load_heads(scores, row, h, i, left, H, C, C).to(ACC)
    Y = load_heads(q, row, h // R, i, left, H // R, K, BK).to(ACC)
    for step in range(0, n):
        j = (n - step) * C
        A = S * _strengths(beta, begin + j, h, i, T - j, H, ACC)[None, :]
        if OUTPUT:
            vs = load_heads(v, begin + j, h, i, T - j, H, V, BV).to(DOT)
            mask = tl.load(M + j.to(tl.int64) * side)
            out = tl.dot((A * mask).to(DOT), vs, acc=out, input_precision=PREC, out_dtype=ACC)
        ks = load_heads(k, begin + j, h // R, i, T - j, H // R, K, BK).to(DOT)
        Y = tl.dot((-A).to(DOT), ks, acc=Y, input_precision=PREC, out_dtype=ACC)
        if not OUTPUT:
            store_heads(ys, Y, _pair(head, n, n - step - 1, NT, C), 0, i, C, 1, K, BK)
        us = load_heads(keys, begin + j - C, h, i, C, H, K, BK)
        S = tl.dot(Y.to(DOT), tl.trans(us), input_precision=PREC, out_dtype=ACC)
    if OUTPUT:
        A = S * _strengths(beta, begin, h, i, T, H, ACC)[None, :]
        vs = load_heads(v, begin, h, i, T, H, V, BV).to(DOT)
        out = tl.dot((A * tl.load(M)).to(DOT), vs, acc=out, input_precision=PREC, out_dtype=ACC)
        store_heads(o, out * scale, row, h, i, left, H, V, BV)


@kernel
def row_kernel(
    k,
    v,
    beta,
    keys,
    M,
    do,
    dys,  # [pairs, C, K]
    dscores,  # dP  [B, T, H, C]
    dy,  # of the first queries  [B, T, H, K]
    scale,
    first,
    T,
    NT,
    H,
    R,
    side,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """A row of chunks, from the first to its own: the gradients of its queries and own scores."""
    head, h, begin, n = _chunk(first, T, H, NT, C)
    row = begin + n * C
    left = T - n * C
    i = tl.arange(0, C)
    M += head * side * side + n * C + i[None, :] * side + i[:, None]
    dos = load_heads(do, row, h, i, left, H, V, BV).to(DOT)
    dY = tl.zeros([C, BK], dtype=ACC)
    dS = tl.zeros([C, C], dtype=ACC)
    for p in range(0, n + 1):
        j = p * C
        bs = _strengths(beta, begin + j, h, i, T - j, H, ACC)
        if p > 0:
            us = load_heads(keys, begin + j - C, h, i, C, H, K, BK)
            dY = tl.dot(dS.to(DOT), us, acc=dY, input_precision=PREC, out_dtype=ACC)
        vs = load_heads(v, begin + j, h, i, T - j, H, V, BV).to(DOT)
        ks = load_heads(k, begin + j, h // R, i, T - j, H // R, K, BK).to(DOT)
        store_heads(dys, dY, _pair(head, n, p, NT, C), 0, i, tl.where(p < n, C, 0), 1, K, BK)
        dS = tl.dot(dos, tl.trans(vs), input_precision=PREC, out_dtype=ACC) * scale
        dS *= tl.load(M + j.to(tl.int64) * side)
        dS -= tl.dot(dY.to(DOT), tl.trans(ks), input_precision=PREC, out_dtype=ACC)
        dS *= bs[None, :]
    store_heads(dy, dY, row, h, i, left, H, K, BK)
    dS = tl.where(i[:, None] >= i[None, :], dS, 0.0)
    store_heads(dscores, dS, row, h, i, left, H, C, C)


@kernel
def column_kernel(
    k,
    v,
    beta,
    scores,
    keys,
    M,
    E,
    ys,
    dys,
    do,
    dkeys,  # dU  [B, T, H, K]
    dbk,  # d(bK)  [B, T, H, K]
    dv,
    dbeta,
    scale,
    first,
    T,
    NT,
    H,
    R,
    side,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """A column of chunks, from its own to the last: the gradient of its mask, and what its keys and values get."""
    index = tl.program_id(0).to(tl.int64)
    head = index // NT
    m = (index % NT).to(tl.int32)
    h, begin = (first + head) % H, (first + head) // H * T
    row = begin + m * C
    here = T - m * C
    i = tl.arange(0, C)
    at = head * side * side + (m * C).to(tl.int64) * side + i[:, None] * side + i[None, :]
    ks = load_heads(k, row, h // R, i, here, H // R, K, BK).to(DOT)
    vs = load_heads(v, row, h, i, here, H, V, BV).to(DOT)
    us = load_heads(keys, row, h, i, here, H, K, BK)
    bs = _strengths(beta, row, h, i, here, H, ACC)
    dU = tl.zeros([C, BK], dtype=ACC)
    dbK = tl.zeros([C, BK], dtype=ACC)
    # Its own chunk.
    dos = load_heads(do, row, h, i, here, H, V, BV).to(DOT)
    S = load_turned(scores + (row * H + h) * C, i, here, i, H * C, C, C).to(ACC)  # [j, t]
    Z = tl.dot(vs, tl.trans(dos), input_precision=PREC, out_dtype=ACC) * (scale * bs)[:, None]
    tl.store(E + m * C + at, S * Z)
    S *= tl.load(M + m * C + at)
    dbV = tl.dot(S.to(DOT), dos, input_precision=PREC, out_dtype=ACC)
    for n in range(m + 1, NT):
        t = n * C
        Y = load_heads(ys, _pair(head, n, m, NT, C), 0, i, C, 1, K, BK)
        dY = load_heads(dys, _pair(head, n, m, NT, C), 0, i, C, 1, K, BK)
        dos = load_heads(do, begin + t, h, i, T - t, H, V, BV).to(DOT)
        S = tl.dot(us, tl.trans(Y), input_precision=PREC, out_dtype=ACC)
        Z = tl.dot(vs, tl.trans(dos), input_precision=PREC, out_dtype=ACC) * scale
        tl.store(E + t + at, S * Z * bs[:, None])
        mask = tl.load(M + t + at).to(ACC)
        dbK = tl.dot((-S).to(DOT), dY, acc=dbK, input_precision=PREC, out_dtype=ACC)
        dbV = tl.dot((S * mask).to(DOT), dos, acc=dbV, input_precision=PREC, out_dtype=ACC)
        dS = Z * mask - tl.dot(ks, tl.trans(dY), input_precision=PREC, out_dtype=ACC)
        dU = tl.dot((dS * bs[:, None]).to(DOT), Y, acc=dU, input_precision=PREC, out_dtype=ACC)
    dbV *= scale
    store_heads(dkeys, dU, row, h, i, here, H, K, BK)
    store_heads(dbk, dbK, row, h, i, here, H, K, BK)
    store_heads(dv, dbV * bs[:, None], row, h, i, here, H, V, BV)
    tl.store(dbeta + (row + i) * H + h, tl.sum(dbV * vs.to(ACC), 1), mask=i < here)


@kernel
def gradients_kernel(
    q,
    k,
    beta,
    inverse,
    scores,
    keys,
    dscores,
    dy,
    dkeys,
    dbk,
    dq,  # [B, T, H, K]
    dk,
    dbeta,  # of b V on entry, whole on return
    first,
    T,
    NT,
    H,
    R,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """What is left to one chunk alone: gradients of its queries, keys and strengths."""
    _, h, row, n = _chunk(first, T, H, NT, C)
    row += n * C
    left = T - n * C
    i = tl.arange(0, C)
    lower = i[:, None] >= i[None, :]
    upper = i[:, None] <= i[None, :]
    off = i[:, None] != i[None, :]
    N = load_heads(inverse, row, h, i, left, H, C, C)
    P = load_heads(scores, row, h, i, left, H, C, C)
    dP = load_heads(dscores, row, h, i, left, H, C, C)
    us = load_heads(keys, row, h, i, left, H, K, BK)
    dus = load_heads(dkeys, row, h, i, left, H, K, BK)
    ks = load_heads(k, row, h // R, i, left, H // R, K, BK).to(DOT)
    bs = _strengths(beta, row, h, i, left, H, ACC)

    x = tl.dot(tl.trans(P), dP, input_precision=PREC, out_dtype=ACC)
    x = tl.dot(us, tl.trans(dus), acc=x, input_precision=PREC, out_dtype=ACC).to(DOT)
    x = tl.dot(x, tl.trans(N), input_precision=PREC, out_dtype=ACC)
    dL = tl.where(lower & off, -x, 0.0).to(DOT)
    dys = load_heads(dy, row, h, i, left, H, K, BK)
    dbK = load_heads(dbk, row, h, i, left, H, K, BK).to(ACC)
    dbK = tl.dot(dL, ks, acc=dbK, input_precision=PREC, out_dtype=ACC)
    dbK -= tl.dot(tl.trans(P), dys, input_precision=PREC, out_dtype=ACC)
    at = dbeta + (row + i) * H + h
    tl.store(at, tl.load(at, mask=i < left, other=0.0) + tl.sum(dbK * ks.to(ACC), 1), mask=i < left)
    dks = tl.dot(N, dus, acc=dbK * bs[:, None], input_precision=PREC, out_dtype=ACC)

    x = tl.dot(tl.trans(dP), P, input_precision=PREC, out_dtype=ACC)
    x = tl.dot(dus, tl.trans(us), acc=x, input_precision=PREC, out_dtype=ACC).to(DOT)
    x = tl.dot(N, x, input_precision=PREC, out_dtype=ACC)
    dL = tl.where(upper & off, -x * bs[None, :], 0.0).to(DOT)  # transposed, with the b of bK
    dks = tl.dot(dL, ks, acc=dks, input_precision=PREC, out_dtype=ACC)

    dA = tl.dot(dP, tl.trans(N), input_precision=PREC, out_dtype=ACC)
    dA = tl.where(lower, dA, 0.0).to(DOT)
    dqs = tl.dot(dA, ks, acc=dys.to(ACC), input_precision=PREC, out_dtype=ACC)
    store_heads(dq, dqs, row, h, i, left, H, K, BK)
    dA = tl.dot(N, tl.trans(dP), input_precision=PREC, out_dtype=ACC)
    dA = tl.where(upper, dA, 0.0).to(DOT)
    qs = load_heads(q, row, h // R, i, left, H // R, K, BK).to(DOT)
    dks = tl.dot(dA, qs, acc=dks, input_precision=PREC, out_dtype=ACC)
    store_heads(dk, dks, row, h, i, left, H, K, BK)


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
            "BK": pairs_triton.columns(self.K, how.C),
            "BV": pairs_triton.columns(self.V, how.C),
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
            BK=min(tile(self.K), 64),
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
