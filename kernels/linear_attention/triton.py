"""Linear attention with a scalar decay in Triton: how a call is spread over the machine, and its launches.

With G the inclusive cumulative log decay, s the scale, S the state before a chunk of C tokens and dS the gradient of
the state after it (equations: README.md), all four results are one operation: s times the sum over j <= i (or j >= i)
of e^{-|G_i - G_j|} (x_i . y_j) z_j, where what lies outside of the chunk is read from a state.

           x   y   z     the state    after the chunk, or before it
    o      q   k   v     S            e^{G_C} S + (e^{G_C - G} K)^T V
    dq     do  v   k     S^T          the same
    dk     v   do  q     dS^T         the same as for dv
    dv     k   q   do    dS           e^{G_C} dS + (s e^G Q)^T dO

`walk_triton.py` is that operation, forwards or backwards, along one segment of one head. Few heads: a sequence is cut
into segments, and a first pass gives every segment its border states (`segments_triton.py`, with the decay's gradient).
Nothing of size tokens x K x V reaches memory. A state is cut into blocks of at most `inner` x `outer`: columns of z are
independent of each other, results of blocks of columns of x and y are added in order.

A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixassay.kernels.common.triton import Cut, half, operands, sum_dtype, tile
from mixassay.kernels.linear_attention import short_triton
from mixassay.kernels.linear_attention.segments_triton import LONGEST, border_kernel, decay_kernel, scan_kernel
from mixassay.kernels.linear_attention.walk_triton import walk_kernel


class Launch(NamedTuple):
    C: int  # tokens in a chunk
    inner: int  # largest block of a state's rows, the columns of x and y
    outer: int  # and of its columns, those of z
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    programs: int  # cut sequences until there are about as many programs
    border: Launch
    walk: Launch


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if half(dtype) and max(K, V) > 64:
        return Plan(528, border=Launch(64, 128, 128, 4, 3), walk=Launch(64, 128, 64, 4, 2))
    if half(dtype):
        return Plan(264, border=Launch(128, 64, 64, 4, 3), walk=Launch(64, 64, 64, 4, 3))
    exact = operands(dtype)[2] == "ieee"  # without tensor cores, whose chunks want more rows
    other = Launch(16, 64, 64, 8, 1) if exact else Launch(32, 64, 64, 4, 1)
    return Plan(264, border=other, walk=other)


def sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Cut, tuple[int, int, int], torch.dtype]:
    """How a call's sequences are cut, and the shape and dtype of a state."""
    call = _Call(q, q, v, None, 1.0, cu_seqlens, None, None)
    return call.cut, (call.H, call.K, call.V), call.acc


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o, the final state if asked for, and the states at the borders of segments if sequences were cut."""
    if how is None and initial_state is None and not output_final_state and _short(q, v, cu_seqlens):
        return short_triton.forward(q, k, v, log_decay, scale), None, None
    call = _Call(q, k, v, log_decay, scale, cu_seqlens, how, length)
    cut = call.cut.inner
    initial = call.wide(initial_state)
    final = call.state() if output_final_state else None
    states = call.borders(call.k, call.v, initial, final, gradient=False) if cut else None
    start = states if cut else initial
    o, _ = call.walk(call.q, call.k, call.v, start, final=None if cut else final)
    return o, final, states


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor | None,
    do: Tensor,
    dfinal: Tensor | None,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, log_decay and initial_state; `states` as returned by `forward` with the same plan."""
    if how is None and initial_state is None and dfinal is None and _short(q, v, cu_seqlens):
        return *short_triton.backward(q, k, v, log_decay, scale, do), None
    call = _Call(q, k, v, log_decay, scale, cu_seqlens, how, length)
    q, k, v, do = call.q, call.k, call.v, do.to(v.dtype).contiguous()
    initial, dfinal = call.wide(initial_state), call.wide(dfinal)
    dinitial = None if initial is None else call.state()
    if states is None:
        start, dstart, dend = initial, dinitial, dfinal
    else:
        dstates = call.borders(q, do, dfinal, dinitial, gradient=True)
        start, dstart, dend = states, dstates, dstates[1:]
    far = dinitial if states is None else None
    dv, written = call.walk(k, q, do, dend, reverse=True, final=far, w=v)
    dk, _ = call.walk(v, do, q, dend, reverse=True, turned=True)
    dq, read = call.walk(do, v, k, start, turned=True, w=q)
    dg = None if log_decay is None else call.decay(start, dstart, read, written).to(log_decay.dtype)
    if dinitial is not None and initial_state is not None:
        dinitial = dinitial.to(initial_state.dtype)
    return dq, dk, dv, dg, dinitial


def _short(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    return cu_seqlens is None and short_triton.serves(q.dtype, q.shape[1], q.shape[3], v.shape[3])


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
        length: int | None,
    ) -> None:
        (self.B, self.T, self.G, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, self.K, self.V)
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.g = self.wide(log_decay)
        self.scale, self.rows = scale, self.B * self.T
        blocks = self.H * triton.cdiv(self.K, self.how.walk.inner) * triton.cdiv(self.V, self.how.walk.outer)
        self.cut = Cut.of(self.B, self.T, cu_seqlens, self.how.programs // blocks, length, LONGEST)

    def wide(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.acc).contiguous()

    def state(self) -> Tensor:
        return self.q.new_empty((self.cut.sequences, self.H, self.K, self.V), dtype=self.acc)

    def walk(
        self,
        x: Tensor,
        y: Tensor,
        z: Tensor,
        states: Tensor | None,
        *,
        reverse: bool = False,
        turned: bool = False,
        final: Tensor | None = None,
        w: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The result, shaped as z, and with `w` and decays its tokens' parts of u. `turned`: x and y are V wide."""
        how = self.how.walk
        N, M = (self.V, self.K) if turned else (self.K, self.V)
        BN, BM = block(N, how.inner), block(M, how.outer)
        parts, blocks = triton.cdiv(N, BN), triton.cdiv(N, BN) * triton.cdiv(M, BM)
        alone = parts == 1 and z.shape[2] == self.H  # else parts, or the heads that share one of z, are added
        out = z.new_empty((parts, self.rows, self.H, M), dtype=z.dtype if alone else self.acc)
        part = None
        if w is not None and self.g is not None:
            part = z.new_empty((blocks, self.H, self.rows), dtype=self.acc)
        walk_kernel[(self.cut.segments * self.H * blocks,)](
            x,
            y,
            z,
            self.g,
            w,
            states,
            out,
            final,
            part,
            scale=self.scale,
            rows=self.rows,
            RX=self.H // x.shape[2],
            RZ=self.H // z.shape[2],
            N=N,
            M=M,
            SN=1 if turned else self.V,
            SM=self.V if turned else 1,
            C=how.C,
            BN=BN,
            BM=BM,
            REVERSE=reverse,
            HAS_STATE=states is not None,
            HAS_FINAL=final is not None,
            PART=part is not None,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
            **self.shared(),
        )
        if not alone:
            out = out.unflatten(2, (z.shape[2], -1)).sum((0, 3))
        return out.view(z.shape).to(z.dtype), part

    def borders(self, x: Tensor, y: Tensor, outer: Tensor | None, far: Tensor | None, *, gradient: bool) -> Tensor:
        """States at the segments' borders (of k and v), or their gradients (of q and do)."""
        how, size = self.how.border, self.K * self.V
        BK, BV = block(self.K, how.inner), block(self.V, how.outer)
        borders = x.new_empty((self.cut.borders, self.H, self.K, self.V), dtype=self.acc)
        totals = x.new_empty((self.cut.borders, self.H), dtype=self.acc)
        border_kernel[(self.cut.segments * self.H * triton.cdiv(self.K, BK) * triton.cdiv(self.V, BV),)](
            x,
            y,
            self.g,
            borders,
            totals,
            scale=self.scale,
            R=self.H // self.G,
            K=self.K,
            V=self.V,
            C=how.C,
            BK=BK,
            BV=BV,
            GRADIENT=gradient,
            OUTER=far is not None,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
            **self.shared(),
        )
        BLOCK = 1024
        scan_kernel[(self.cut.sequences * self.H * triton.cdiv(size, BLOCK),)](
            borders,
            totals,
            outer,
            far,
            self.cut.slots,
            self.cut.P,
            self.H,
            SIZE=size,
            BLOCK=BLOCK,
            DECAY=self.g is not None,
            GRADIENT=gradient,
            HAS_OUTER=outer is not None,
            HAS_FAR=far is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
        )
        return borders

    def decay(self, states: Tensor | None, dstates: Tensor | None, read: Any, written: Any) -> Tensor:
        """The gradient of log_decay from states, their gradients, and the parts of u by the readers and the writers."""
        dg = self.q.new_empty((self.B, self.T, self.H), dtype=self.acc)
        decay_kernel[(self.cut.segments * self.H,)](
            states,
            dstates,
            read,
            written,
            self.g,
            dg,
            self.cut.table,
            self.rows,
            self.cut.T,
            self.cut.length,
            self.cut.P,
            self.H,
            SIZE=self.K * self.V,
            READ=read.shape[0],
            WRITTEN=written.shape[0],
            BLOCK=2048,
            HAS_STATE=states is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
            num_warps=8,
        )
        return dg

    def shared(self) -> dict[str, Any]:
        """What the kernels that walk segments have in common."""
        dot, acc, precision = operands(self.q.dtype)
        return {
            "table": self.cut.table,
            "T": self.cut.T,
            "length": self.cut.length,
            "P": self.cut.P,
            "H": self.H,
            "DECAY": self.g is not None,
            "PACKED": self.cut.table is not None,
            "DOT": dot,
            "SUM": sum_dtype(self.q.dtype),
            "ACC": acc,
            "PREC": precision,
        }


def block(width: int, largest: int) -> int:
    return min(largest, tile(width))
