"""The gated delta rule in Triton: how a call is spread over the machine, and its launches, forward and backward.

Within a chunk of C tokens, with G the inclusive cumulative log decay, Gam_ij = e^{G_i - G_j} for j <= i (else 0), b the
write strengths, s the scale, S the state before the chunk, dS the gradient of the state after it (Yang et al. 2025):

    A  = strictly lower part of (b K K^T) . Gam             M  = (I + A)^-1
    u  = M b (V - e^G K S)                                  what the chunk writes under its keys
    O  = s ((Q K^T) . Gam u + e^G Q S)                      S' = e^{G_C} S + (e^{G_C - G} K)^T u

`solve_triton.py` has M and G of all chunks at once; `walk_triton.py` goes along the chunks, for S forward and dS
backward; `gradients_triton.py` then takes all chunks at once.

A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import Cut, half, operands, sum_dtype
from mixassay.kernels.gated_delta_rule.gradients_triton import gradients_kernel
from mixassay.kernels.gated_delta_rule.solve_triton import inverse_precision, precision, solve_kernel
from mixassay.kernels.gated_delta_rule.walk_triton import forward_kernel, join_kernel, reverse_kernel


class Launch(NamedTuple):
    num_warps: int
    num_stages: int
    registers: int | None = None  # that a thread may use


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    BV: int  # value columns that a walker holds, or `gradients` at a time
    BK: int  # key columns in a program of `gradients`
    programs: int  # cut sequences until there are about as many walkers
    solve: Launch
    forward: Launch
    reverse: Launch
    join: Launch
    gradients: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process.

    Where tensor cores serve, no tile is narrower than 64: on Hopper, Triton 3.6 and 3.7 read past the end of shared
    memory at a width of 32. Keys wider than 128 and wide dtypes do without segments: `join` has no room for them.
    """
    one, four, eight = Launch(1, 1), Launch(4, 1), Launch(8, 1)
    if half(dtype):
        solve = Launch(1, 1, registers=168)  # twelve warps on a multiprocessor instead of eight
        if K <= 64 or (V <= 64 and K <= 128):
            return Plan(64, 64, 64, 264, solve, Launch(4, 2), Launch(4, 2), eight, four)
        if K <= 128:
            return Plan(64, 128, 64, 132, solve, Launch(8, 2), Launch(8, 2), eight, four)
        return Plan(64, 64, 64, 1, one, eight, eight, eight, four)
    if precision(dtype, K) == "tf32":
        return Plan(64, 64, 64, 1, one, eight, eight, eight, eight)
    return Plan(32, 32, 32, 1, one, eight, eight, eight, eight)


class Saved(NamedTuple):
    """What the backward reads besides the inputs."""

    M: Tensor  # [B, T, H, C]
    G: Tensor  # [B, H, T], log decays since the chunk began, in base 2
    starts: Tensor | None  # [slots, H, K, V], if sequences were cut
    transitions: Tensor | None  # [slots, H, K, K]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor | None, Saved]:
    """o and, if asked for, the final state. `length` is that of segments, a multiple of the chunk, for tests."""
    call = _Call(q, k, v, beta, log_decay, scale, cu_seqlens, how, length)
    M, G, starts, transitions = saved = call.saved()
    call.solve(M, G)
    initial = call.wide(initial_state)
    final = call.slots(call.cut.sequences, V=True) if output_final_state else None
    if starts is not None and transitions is not None:
        call.forward(M, G, contributions=starts, transitions=transitions, outermost=final is not None)
        call.join(starts, transitions, initial, final, gradient=False)
    o = torch.empty_like(call.v)
    call.forward(M, G, starts=initial if starts is None else starts, o=o, final=final if starts is None else None)
    return o, final, saved


def room(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor | None, Saved]:
    """What `forward` returns, not filled in."""
    call = _Call(q, q, v, v.new_empty(v.shape[:3]), None, 1.0, cu_seqlens, None, None)
    final = call.slots(call.cut.sequences, V=True) if output_final_state else None
    return torch.empty_like(call.v), final, call.saved()


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Saved,
    do: Tensor,
    dfinal: Tensor | None,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, beta, log_decay and initial_state; `saved` by `forward` with the same plan."""
    call = _Call(q, k, v, beta, log_decay, scale, cu_seqlens, how, length)
    M, G, starts, transitions = saved
    initial, dfinal = call.wide(initial_state), call.wide(dfinal)
    do = do.to(v.dtype).contiguous()
    u, z, states, dstates = call.kept()
    call.forward(M, G, starts=initial if starts is None else starts, u=u, states=states)
    dinitial = None if initial is None else call.slots(call.cut.sequences, V=True)
    ends = dfinal
    if transitions is not None:
        borders = call.slots(call.cut.borders, V=True)
        call.reverse(M, G, do, contributions=borders, outermost=dinitial is not None)
        call.join(borders, transitions, dfinal, dinitial, gradient=True)
        ends = borders[1:]
    call.reverse(M, G, do, ends=ends, dinitial=None if transitions is not None else dinitial, z=z, dstates=dstates)
    dq, dk, dv, dbeta, dg = call.gradients(G, do, u, z, states, dstates)
    return dq, dk, dv, dbeta.to(beta.dtype), _like(dg, log_decay), _like(dinitial, initial_state)


def _like(x: Tensor | None, original: Tensor | None) -> Tensor | None:
    return None if x is None or original is None else x.to(original.dtype)


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
        length: int | None,
    ) -> None:
        (B, T, self.groups, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, self.K, self.V)
        self.precision = precision(q.dtype, self.K)
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.dot = q.dtype if half(q.dtype) else self.acc  # what the kernels keep for one another
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.beta = self.wide(beta)
        self.sum = torch.float32 if sum_dtype(q.dtype) == tl.float32 else torch.float64
        self.g = self.wide(log_decay)
        self.scale, self.rows = scale, B * T
        self.BK = max(64, triton.next_power_of_2(self.K))
        self.values = triton.cdiv(self.V, self.how.BV)
        self.cut = Cut.of(B, T, cu_seqlens, self.how.programs // (self.H * self.values), length)
        self.chunks = Cut.of(B, T, cu_seqlens, 0, self.how.C)
        self.ends = None if cu_seqlens is None else cu_seqlens[1:].long()

    def wide(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.acc).contiguous()

    def slots(self, n: int, *, V: bool) -> Tensor:
        return self.q.new_empty((n, self.H, self.K, self.V if V else self.K), dtype=self.acc)

    def kept(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Room for u, z and the states and gradients of states at every chunk."""
        chunks = self.rows // self.how.C + self.cut.sequences
        values = (self.rows, self.H, self.V)
        states = (chunks, self.H, self.V, self.K)
        u, z, S, dS = (self.q.new_empty(shape, dtype=self.dot) for shape in (values, values, states, states))
        return u, z, S, dS

    def saved(self) -> Saved:
        B, T = self.q.shape[:2]
        M = self.q.new_empty((B, T, self.H, self.how.C), dtype=self.dot)
        G = self.q.new_empty((B, self.H, T), dtype=self.sum)
        if not self.cut.inner:
            return Saved(M, G, None, None)
        borders = self.cut.borders
        return Saved(M, G, self.slots(borders, V=True), self.slots(borders, V=False))

    def solve(self, M: Tensor, G: Tensor) -> None:
        self.launch(
            solve_kernel,
            self.how.solve,
            self.chunks,
            1,
            (self.k, self.beta, self.g, M, G),
            BK=min(self.BK, 64),
            DECAY=self.g is not None,
            SUM=sum_dtype(self.q.dtype),
            EXACT=inverse_precision(self.q.dtype, self.K),
        )

    def forward(
        self,
        M: Tensor,
        G: Tensor,
        *,
        starts: Tensor | None = None,
        o: Tensor | None = None,
        final: Tensor | None = None,
        u: Tensor | None = None,
        states: Tensor | None = None,
        contributions: Tensor | None = None,
        transitions: Tensor | None = None,
        outermost: bool = True,
    ) -> None:
        columns = self.values + (0 if transitions is None else triton.cdiv(self.K, self.how.BV))
        tensors = (self.q, self.k, self.v, self.beta, G, M, starts, o, final, u, states, contributions, transitions)
        self.launch(
            forward_kernel,
            self.how.forward,
            self.cut,
            columns,
            tensors,
            sequences=self.sequences(self.cut),
            scale=self.scale,
            V=self.V,
            BK=self.BK,
            BV=self.how.BV,
            HAS_START=starts is not None,
            HAS_FINAL=final is not None,
            BORDERS=transitions is not None,
            OUTERMOST=outermost,
            OUTPUT=o is not None,
            KEEP=states is not None,
        )

    def reverse(
        self,
        M: Tensor,
        G: Tensor,
        do: Tensor,
        *,
        ends: Tensor | None = None,
        dinitial: Tensor | None = None,
        z: Tensor | None = None,
        dstates: Tensor | None = None,
        contributions: Tensor | None = None,
        outermost: bool = True,
    ) -> None:
        self.launch(
            reverse_kernel,
            self.how.reverse,
            self.cut,
            self.values,
            (self.q, self.k, self.beta, G, M, do, ends, dinitial, z, dstates, contributions),
            sequences=self.sequences(self.cut),
            scale=self.scale,
            V=self.V,
            BK=self.BK,
            BV=self.how.BV,
            HAS_END=ends is not None,
            HAS_INITIAL=dinitial is not None,
            BORDERS=contributions is not None,
            OUTERMOST=outermost,
        )

    def join(
        self, borders: Tensor, transitions: Tensor, outer: Tensor | None, far: Tensor | None, *, gradient: bool
    ) -> None:
        BV = 64
        join_kernel[(self.cut.sequences * self.H * triton.cdiv(self.V, BV),)](
            borders,
            transitions,
            outer,
            far,
            self.cut.slots,
            self.cut.P,
            self.H,
            K=self.K,
            V=self.V,
            BK=self.BK,
            BV=BV,
            GRADIENT=gradient,
            HAS_OUTER=outer is not None,
            HAS_FAR=far is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
            EXACT="tf32x3" if half(self.dot) else self.precision,
            num_warps=self.how.join.num_warps,
            num_stages=self.how.join.num_stages,
        )

    def gradients(
        self, G: Tensor, do: Tensor, u: Tensor, z: Tensor, states: Tensor, dstates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        keys = triton.cdiv(self.K, self.how.BK)
        alone = self.groups == self.H
        dq, dk = (
            self.q.new_empty((self.rows, self.H, self.K), dtype=self.q.dtype if alone else self.acc) for _ in range(2)
        )
        dv = torch.empty_like(self.v)
        dbeta = self.q.new_empty((keys, self.rows, self.H), dtype=self.acc)
        dg = None if self.g is None else torch.empty_like(dbeta)
        self.launch(
            gradients_kernel,
            self.how.gradients,
            self.chunks,
            keys,
            (self.q, self.k, self.v, self.beta, self.g, G, do, u, z, states, dstates, dq, dk, dv, dbeta, dg),
            sequences=self.sequences(self.chunks),
            rows=self.rows,
            scale=self.scale,
            V=self.V,
            BK=self.how.BK,
            BV=self.how.BV,
            DECAY=dg is not None,
        )
        if not alone:
            dq, dk = (x.unflatten(1, (self.groups, -1)).sum(2).to(self.q.dtype) for x in (dq, dk))
        small = self.beta.shape
        return (
            dq.view(self.q.shape),
            dk.view(self.k.shape),
            dv,
            dbeta.sum(0).view(small),
            None if dg is None else dg.sum(0).view(small),
        )

    def sequences(self, cut: Cut) -> Tensor | None:
        """The sequence of every packed segment: how many of them end at or before its first row."""
        if self.ends is None or cut.table is None:
            return None
        return torch.searchsorted(self.ends, cut.table[:, 0].contiguous(), right=True)

    def launch(
        self, kernel: Any, launch: Launch, cut: Cut, columns: int, tensors: tuple[Tensor | None, ...], **flags: Any
    ) -> None:
        dot, acc, _ = operands(self.q.dtype)
        kernel[(cut.segments * self.H * columns,)](
            *tensors,
            table=cut.table,
            T=cut.T,
            length=cut.length,
            P=cut.P,
            H=self.H,
            R=self.H // self.groups,
            K=self.K,
            C=self.how.C,
            PACKED=cut.table is not None,
            DOT=dot,
            ACC=acc,
            PREC=self.precision,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            maxnreg=launch.registers,
            **flags,
        )
