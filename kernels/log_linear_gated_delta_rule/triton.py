"""The log-linear gated delta rule in Triton: how a call is spread over the machine, its launches, forward and backward.

Within a chunk of C tokens, G is the inclusive cumulative log decay, Gam_ij = e^{G_i - G_j} for j <= i (else 0), b the
write strengths, s the scale, Lam_ij the weight that token i gives to the level of token j (Guo et al. 2025):

    M = (I + strictly lower part of b K K^T)^-1          P = (lower part of Q K^T) M          R = M^T K
    O = s (P . Gam . Lam) bV + what it reads of earlier chunks

M holds no decay: decays are numbers, which come out of every product. A chunk makes of the state S before it

    e^{G_C} (S + F S) + N          F = -R^T bK          N = R^T (b e^{G_C - G} V)

Two neighbours are again such a pair (F, N). So chunks are the leaves of a tree whose nodes later chunks read: M is
solved for by gated_delta_rule/solve_triton.py, `chunk_triton.py` has what a chunk is and reads by itself,
`tree_triton.py` what is above, `nodes_triton.py` where it all lies. Backward the tree comes first, then each chunk.

A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixassay.kernels.common.triton import Cut, half, operands, sum_dtype
from mixassay.kernels.gated_delta_rule.solve_triton import inverse_precision, precision, solve_kernel
from mixassay.kernels.log_linear_gated_delta_rule.chunk_triton import inputs_kernel, leaves_kernel, pairs_kernel
from mixassay.kernels.log_linear_gated_delta_rule.tree_triton import (
    gather_kernel,
    merge_kernel,
    pull_kernel,
    read_kernel,
    split_kernel,
)


class Launch(NamedTuple):
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers of a thread, at most


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    BLOCK: int  # columns of a tile
    BV: int  # value columns that a reader holds
    solve: Launch
    leaves: Launch
    merge: Launch
    read: Launch
    pull: Launch
    gather: Launch
    split: Launch
    pairs: Launch
    inputs: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process.

    Where tensor cores serve, no tile is narrower than 64: on Hopper, Triton 3.6 and 3.7 read past the end of shared
    memory at a width of 32.
    """
    one, four, eight = Launch(1, 1), Launch(4, 1), Launch(8, 1)
    if half(dtype):
        if K <= 128:
            BV = 64 if V <= 64 else 128
            pull = Launch(4, 2, 168) if K <= 64 else four  # three programs on a multiprocessor instead of two
            return Plan(64, 64, BV, one, four, four, four, pull, Launch(4, 3), four, four, four)
        return Plan(64, 64, 64, one, eight, four, eight, eight, eight, four, eight, eight)
    if precision(dtype, K) == "tf32":
        return Plan(64, 64, 64, one, eight, eight, eight, eight, eight, eight, eight, eight)
    return Plan(32, 32, 32, one, eight, eight, eight, eight, eight, eight, eight, eight)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """o, and M [B, T, H, C] for the backward."""
    call = _Call(q, k, v, beta, level_scale, log_decay, scale, cu_seqlens, how)
    M = call.inverse()
    o = torch.empty_like(call.v)
    x, F, N, totals = call.tree(M, o=o)
    if call.heights:
        call.read(x, F, N, totals, o=o)
    return o, M


def room(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `forward` returns, not filled in."""
    return torch.empty_like(v, memory_format=torch.contiguous_format), _kept(
        q, *v.shape[:3], plan(q.dtype, q.shape[-1], v.shape[-1]).C
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    M: Tensor,
    do: Tensor,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, beta, level_scale and log_decay; M by `forward` with the same plan."""
    call = _Call(q, k, v, beta, level_scale, log_decay, scale, cu_seqlens, how)
    do = do.to(v.dtype).contiguous()
    scores = torch.empty_like(M)
    tree = call.tree(M, scores=scores)
    dlevel = torch.zeros_like(call.level_scale)
    branch = call.nodes_gradients(tree, do, dlevel) if call.heights else (None,) * 5
    dq, dk, dv, dbeta, dg = call.inputs_gradients(M, scores, do, dlevel, *branch)
    dg = None if dg is None or log_decay is None else dg.to(log_decay.dtype)
    return dq, dk, dv, dbeta.to(beta.dtype), dlevel.to(level_scale.dtype), dg


def _kept(q: Tensor, *shape: int) -> Tensor:
    """Room for what kernels keep for one another, in the dtype of products."""
    return q.new_empty(shape, dtype=q.dtype)


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        level_scale: Tensor,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
    ) -> None:
        (B, T, self.groups, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, self.K, self.V)
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.beta, self.level_scale = (x.to(self.acc).contiguous() for x in (beta, level_scale))
        self.g = None if log_decay is None else log_decay.to(self.acc).contiguous()
        self.scale, self.rows = scale, B * T
        self.BK = max(self.how.BLOCK, triton.next_power_of_2(self.K))
        self.cut = Cut.of(B, T, cu_seqlens, 0, self.how.C)
        self.ends = None if cu_seqlens is None else cu_seqlens.long()
        self.heights = (triton.cdiv(T, self.how.C) - 1).bit_length()  # bits of the number of a chunk
        self.room = triton.cdiv(self.cut.segments, 1 << self.heights) << self.heights
        self.visits = self.cut.segments // 2

    def kept(self, *shape: int) -> Tensor:
        return _kept(self.q, *shape)

    def wide(self, *shape: int) -> Tensor:
        return self.q.new_empty(shape, dtype=self.acc)

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Room for F and N, or their gradients."""
        F = self.kept(2 * self.room, self.H, self.K, self.K)
        return F, self.kept(self.cut.segments, self.H, self.K, self.V)

    def inverse(self) -> Tensor:
        M = self.kept(*self.beta.shape, self.how.C)
        dot, acc, _ = operands(self.q.dtype)
        solve_kernel[(self.cut.segments * self.H,)](
            self.k,
            self.beta,
            None,
            M,
            self.wide(self.rows, self.H),
            self.cut.table,
            self.cut.T,
            self.cut.length,
            self.cut.P,
            self.H,
            self.H // self.groups,
            K=self.K,
            C=self.how.C,
            BK=min(self.BK, 64),
            DECAY=False,
            PACKED=self.cut.table is not None,
            DOT=dot,
            ACC=acc,
            SUM=acc,
            PREC=precision(self.q.dtype, self.K),
            EXACT=inverse_precision(self.q.dtype, self.K),
            num_warps=self.how.solve.num_warps,
            num_stages=self.how.solve.num_stages,
        )
        return M

    def tree(
        self, M: Tensor, o: Tensor | None = None, scores: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The first queries, and all nodes; if asked for, what chunks read of themselves into o, or P into scores."""
        x = F = N = totals = None
        if self.heights:
            x = self.kept(self.rows, self.H, self.K)
            F, N = self.nodes()
            totals = self.wide(2 * self.room, self.H)
        self.launch(
            leaves_kernel,
            self.how.leaves,
            self.cut.segments,
            (self.q, self.k, self.v, self.beta, self.level_scale, self.g, M, o, scores, x, F, N, totals),
            scale=self.scale,
            OUTPUT=o is not None,
            DECAY=self.g is not None,
            DEEP=self.heights > 0,
            SUM=sum_dtype(self.q.dtype),
        )
        for height in range(self.heights - 1):
            tiles = self.blocks(self.K) * (self.blocks(self.K) + self.blocks(self.V))
            self.launch(merge_kernel, self.how.merge, self.windows(height) * tiles, (F, N, totals), height=height)
        return x, F, N, totals

    def read(
        self,
        x: Tensor | None,
        F: Tensor | None,
        N: Tensor | None,
        totals: Tensor | None,
        o: Tensor | None = None,
        xs: Tensor | None = None,
    ) -> None:
        self.launch(
            read_kernel,
            self.how.read,
            self.cut.segments * (triton.cdiv(self.V, self.how.BV) if xs is None else 1),
            (x, F, N, totals, self.level_scale, o, xs),
            OUTPUT=xs is None,
            BV=self.how.BV,
        )

    def nodes_gradients(
        self, tree: tuple[Tensor | None, ...], do: Tensor, dlevel: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of the first queries, what decays get around them, of F, N and totals."""
        x, F, N, totals = tree
        lam = self.level_scale
        shape = (self.heights * self.visits, self.H, self.how.C, self.K)
        xs, dxs = self.kept(*shape), self.kept(*shape)
        self.read(x, F, N, totals, xs=xs)
        dx, around, past = self.kept(self.rows, self.H, self.K), self.wide(self.rows, self.H), self.wide(*shape[:2])
        tensors = (do, F, N, totals, lam, xs, dxs, dx, dlevel, around, past)
        self.launch(pull_kernel, self.how.pull, self.cut.segments, tensors)
        (dF, dN), dtotals = self.nodes(), self.wide(2 * self.room, self.H)
        columns = self.blocks(self.V) + self.blocks(self.K)
        tensors = (do, lam, xs, dxs, past, dF, dN, dtotals)
        self.launch(gather_kernel, self.how.gather, self.cut.segments * columns, tensors)
        for height in reversed(range(self.heights - 1)):
            tiles = 1 + 2 * self.blocks(self.K) ** 2
            tensors = (F, N, totals, dF, dN, dtotals)
            self.launch(split_kernel, self.how.split, self.windows(height) * tiles, tensors, height=height)
        return dx, around, dF, dN, dtotals

    def inputs_gradients(
        self,
        M: Tensor,
        scores: Tensor,
        do: Tensor,
        dlevel: Tensor,
        dx: Tensor | None,
        around: Tensor | None,
        dF: Tensor | None,
        dN: Tensor | None,
        dtotals: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        dA, dM, W = torch.empty_like(M), torch.empty_like(M), self.kept(self.rows, self.H, self.K)
        dv, dg = torch.empty_like(self.v), None if self.g is None else torch.empty_like(self.g)
        dbeta = self.wide(1 + self.blocks(self.K), self.rows, self.H)
        tensors: tuple[Tensor | None, ...]
        tensors = (self.k, self.v, self.beta, self.level_scale, self.g, M, scores, do, dx, around, dF, dN, dtotals)
        flags = {"DECAY": self.g is not None, "DEEP": self.heights > 0, "SUM": sum_dtype(self.q.dtype)}
        self.launch(
            pairs_kernel,
            self.how.pairs,
            self.cut.segments,
            (*tensors, dA, dM, W, dv, dbeta[0], dlevel, dg),
            scale=self.scale,
            **flags,
        )
        alone = self.groups == self.H
        dq, dk = (
            self.q.new_empty((self.rows, self.H, self.K), dtype=self.q.dtype if alone else self.acc) for _ in range(2)
        )
        self.launch(
            inputs_kernel,
            self.how.inputs,
            self.cut.segments * self.blocks(self.K),
            (self.q, self.k, self.v, self.beta, self.g, M, dx, dF, dN, dA, dM, W, dq, dk, dbeta[1:]),
            scale=self.scale,
            rows=self.rows,
            **flags,
        )
        if not alone:
            dq, dk = (x.unflatten(1, (self.groups, -1)).sum(2).to(self.q.dtype) for x in (dq, dk))
        return dq.view(self.q.shape), dk.view(self.k.shape), dv, dbeta.sum(0).view(self.beta.shape), dg

    def blocks(self, width: int) -> int:
        return triton.cdiv(width, self.how.BLOCK)

    def windows(self, height: int) -> int:
        return triton.cdiv(self.cut.segments, 2 << height)

    def launch(
        self, kernel: Any, launch: Launch, programs: int, tensors: tuple[Tensor | None, ...], **flags: Any
    ) -> None:
        """The sizes that a kernel asks for, by name."""
        dot, acc, _ = operands(self.q.dtype)
        sizes = {
            "heights": self.heights,
            "chunks": self.cut.segments,
            "room": self.room,
            "visits": self.visits,
            "R": self.H // self.groups,
            "L": self.level_scale.shape[-1],
            "BK": self.BK,
            "BLOCK": self.how.BLOCK,
            "LEVELS": self.how.C.bit_length(),
        }
        kernel[(programs * self.H,)](
            *tensors,
            table=self.cut.table,
            ends=self.ends,
            T=self.cut.T,
            P=self.cut.P,
            H=self.H,
            K=self.K,
            V=self.V,
            C=self.how.C,
            PACKED=self.cut.table is not None,
            DOT=dot,
            ACC=acc,
            PREC=precision(self.q.dtype, self.K),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            maxnreg=launch.maxnreg,
            **{name: size for name, size in sizes.items() if name in kernel.arg_names},
            **flags,
        )
