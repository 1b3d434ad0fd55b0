"""Second- and third-order linear attention in Triton: how a call is spread over the machine, and its launches.

With LA(x, y, z; M)_i = s sum_{j <= i} e^{G_i - G_j} (x_i . y_j) z_j, where M is the state that holds the tokens before
the present chunk, and LA' the same over j >= i, where it holds those after it, with a = kappa or k, b = nu or v:

    kappa = LA(q, k, k; S)       da = LA'(b, do, q; dF^T)       dq = LA(do, b, a; F^T) + LA(dkappa, k, k; S^T)
    nu    = LA(q, k, v; P)       db = LA'(a, q, do; dF)                                + LA(dnu, v, k; P^T)
    o     = LA(q, a, b; F)       dv = LA'(k, q, dnu; dP)        dk = LA'(k, q, dkappa; dS) + LA'(k, dkappa, q; dS^T)
                                                                     + LA'(v, dnu, q; dP^T)

`hla2` has kappa and v, `ahla` k and nu, `hla3` kappa and nu; with a = k, da is a term of dk instead of dkappa's, with
b = nu, db is dnu, else dv. F decays by the outer decay, S and P by the inner one. So every result is a sum of up to
three such terms, which `walk_triton.py` computes.

Few heads: a sequence is cut into segments. Then the states at their borders come first: the walk from a state of zeros
without a result, and a scan. S and P must be done before F, whose addends need kappa and nu. Nothing of size
tokens x K x V reaches memory.

The decays' gradients are those of the terms, with u as in linear_attention/segments_triton.py: its parts come from the
walks that read a state and from those that write it.

A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mixassay.kernels.common.triton import Cut, operands, sum_dtype
from mixassay.kernels.hla.walk_triton import walk_kernel
from mixassay.kernels.linear_attention.segments_triton import LONGEST, decay_kernel, scan_kernel
from mixassay.kernels.linear_attention.triton import block


class Launch(NamedTuple):
    C: int  # tokens in a chunk
    columns: int  # largest block of columns of z
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    programs: int  # cut sequences until there are about as many programs
    border: Launch
    walk: Launch
    loads: int  # a walk of more than so many tensors has a stage less: two programs still fit on a multiprocessor
    together: bool  # the states of a sum fit into registers; else it takes walks that add to one another


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if dtype != torch.bfloat16:  # in Triton's interpreter
        return Plan(264, border=Launch(16, 64, 4, 1), walk=Launch(16, 64, 4, 1), loads=9, together=True)
    if max(K, V) > 64:
        return Plan(528, border=Launch(64, 128, 4, 3), walk=Launch(64, 64, 4, 2), loads=9, together=False)
    return Plan(264, border=Launch(128, 64, 4, 3), walk=Launch(64, 64, 4, 3), loads=6, together=True)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor
    states: Tensor | None  # where segments begin in the direction of the walk
    turned: bool = False  # states are [columns of z, columns of x and y]


class Term(NamedTuple):
    """The sum of LA(x, y, z), or LA' in a reverse walk, over pairs x, y."""

    pairs: list[Pair]
    z: Tensor
    g: Tensor | None
    u: list[Tensor] | None = None  # takes the tokens' parts of u, if there is a decay


class States(NamedTuple):
    """Of S and P, per head of k, and of F, per head of q; None for what an operator does not have."""

    S: Tensor | None
    P: Tensor | None
    F: Tensor | None


class Kept(NamedTuple):
    """What the backward reads: kappa, nu, and the states at borders (all per head of q) if sequences were cut."""

    kappa: Tensor | None
    nu: Tensor | None
    states: States


class Adjoint(NamedTuple):
    """A state and its gradient, where walks need them."""

    start: Tensor | None  # the state at segments' starts
    dstart: Tensor | None  # its gradient there
    dend: Tensor | None  # and at their ends
    dinitial: Tensor | None
    unwritten: Tensor | None  # dinitial, if a walk has to write it


def sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Cut, torch.dtype]:
    """How a call's sequences are cut, and the dtype of its states."""
    call = _Call(q, q, v, None, None, 1.0, cu_seqlens, None, None)
    return call.cut, call.acc


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inner: Tensor | None,
    outer: Tensor | None,
    initial: States,
    cu_seqlens: Tensor | None,
    scale: float,
    ridge: float,
    metric: bool,
    values: bool,
    output_final_state: bool,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, States, Kept]:
    """o, the final states if asked for, and what the backward needs. `metric`: there is a kappa; `values`: a nu."""
    call = _Call(q, k, v, inner, outer, scale, cu_seqlens, how, length)
    q, k, v, first = call.q, call.k, call.v, call.per_head(initial)
    kappa, S, lastS = call.along(k, k, call.inner, first.S, output_final_state) if metric else (None, None, None)
    if kappa is not None and ridge:
        kappa.add_(q, alpha=scale * ridge)
    nu, P, lastP = call.along(k, v, call.inner, first.P, output_final_state) if values else (None, None, None)
    a, b = k if kappa is None else kappa, v if nu is None else nu
    o, F, lastF = call.along(a, b, call.outer, first.F, output_final_state)
    lastS, lastP = (None if x is None else x[:, :: call.R].contiguous() for x in (lastS, lastP))
    return o, States(lastS, lastP, lastF), Kept(kappa, nu, States(S, P, F))


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inner: Tensor | None,
    outer: Tensor | None,
    initial: States,
    cu_seqlens: Tensor | None,
    kept: Kept,
    do: Tensor,
    dfinal: States,
    scale: float,
    ridge: float,
    how: Plan | None = None,
    length: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, States]:
    """Gradients of q, k, v, the decays and the initial states; `kept` as returned by `forward` with the same plan."""
    call = _Call(q, k, v, inner, outer, scale, cu_seqlens, how, length)
    q, k, v, do, g = call.q, call.k, call.v, do.to(q.dtype).contiguous(), call.inner
    first, last = call.per_head(initial), call.per_head(dfinal, once=True)
    (kappa, nu, states), dkappa, S, P = kept, None, None, None
    a, b = k if kappa is None else kappa, v if nu is None else nu

    F = call.adjoint(do, call.outer, states.F, first.F, last.F)
    u: list[Tensor] = []
    u_outer: list[Tensor] = []
    of_b = Term([Pair(a, q, F.dend)], do, call.outer, u_outer)
    of_a = Term([Pair(b, do, F.dend, turned=True)], q, call.outer)
    dv = db = call.walk([of_b], b, reverse=True, w=b, final=F.unwritten)
    last_k, to_k, to_q = of_a, [], []
    if kappa is not None:
        dkappa = call.walk([of_a], kappa, reverse=True)
        S = call.adjoint(dkappa, g, states.S, first.S, last.S)
        last_k = Term([Pair(k, q, S.dend)], dkappa, g, u)
        to_k.append(Pair(k, dkappa, S.dend, turned=True))
        to_q.append(Pair(dkappa, k, S.start, turned=True))
    if nu is not None:
        P = call.adjoint(db, g, states.P, first.P, last.P)
        dv = call.walk([Term([Pair(k, q, P.dend)], db, g, u)], v, reverse=True, w=v, final=P.unwritten)
        to_k.append(Pair(v, db, P.dend, turned=True))
        to_q.append(Pair(db, v, P.start, turned=True))
    last_q = Term([Pair(do, b, F.start, turned=True)], a, call.outer, u_outer)
    dk = call.walk([Term(to_k, q, g), last_k], k, reverse=True, w=k, final=None if S is None else S.unwritten)
    dq = call.walk([Term(to_q, k, g, u), last_q], q, w=q)
    if dkappa is not None and ridge:
        dq.add_(dkappa, alpha=scale * ridge)

    douter = None if outer is None else call.decay(F, call.outer, u_outer).to(outer.dtype)
    dinner = None
    if inner is not None:  # one u for S and P, which decay alike
        found = [call.decay(x, g, [] if n else u) for n, x in enumerate(x for x in (S, P) if x is not None)]
        dinner = call.grouped(sum(found[1:], found[0]), 2).to(inner.dtype)
    dS, dP = (None if x is None or x.dinitial is None else call.grouped(x.dinitial, 1) for x in (S, P))
    made = (
        None if x is None or y is None else x.to(y.dtype) for x, y in zip((dS, dP, F.dinitial), initial, strict=True)
    )
    return dq, dk, dv, dinner, douter, States(*made)


class _Call:
    """The sizes of one call, its operands made contiguous, and its launches. Decays and states are per head of q."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inner: Tensor | None,
        outer: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        how: Plan | None,
        length: int | None,
    ) -> None:
        (self.B, self.T, self.H, K), (self.G, V) = q.shape, v.shape[2:]
        self.R, self.rows, self.scale = self.H // self.G, self.B * self.T, scale
        self.how = how or plan(q.dtype, K, V)
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.inner = self.wide(inner if inner is None or self.R == 1 else inner.repeat_interleave(self.R, 2))
        self.outer = self.wide(outer)
        blocks = triton.cdiv(max(K, V), self.how.walk.columns)
        self.cut = Cut.of(self.B, self.T, cu_seqlens, self.how.programs // (self.H * blocks), length, LONGEST)

    def wide(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(self.acc).contiguous()

    def per_head(self, states: States, once: bool = False) -> States:
        """S and P for each head of q that their head of k serves; `once`: for the first, and zeros for the others."""

        def each(x: Tensor | None) -> Tensor | None:
            if x is None or self.R == 1:
                return x
            if not once:
                return x.repeat_interleave(self.R, 1)
            wide = x.new_zeros((x.shape[0], self.H, *x.shape[2:]))
            wide[:, :: self.R] = x
            return wide

        S, P, F = map(self.wide, states)
        return States(each(S), each(P), F)

    def grouped(self, x: Tensor, dim: int) -> Tensor:
        """Summed over the heads of q that one head of k serves."""
        return x if self.R == 1 else x.unflatten(dim, (self.G, self.R)).sum(dim + 1)

    def along(
        self, y: Tensor, z: Tensor, g: Tensor | None, initial: Tensor | None, last: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """LA(q, y, z) per head of q, the states at borders if sequences are cut, and the last state if wanted."""
        final = self.state(y, z) if last else None
        states = self.borders(y, z, g, initial, final) if self.cut.inner else None
        start, to_write = (initial, final) if states is None else (states, None)
        out = self.walk([Term([Pair(self.q, y, start)], z, g)], self.q, final=to_write)
        return out, states, final

    def adjoint(
        self, z: Tensor, g: Tensor | None, states: Tensor | None, initial: Tensor | None, last: Tensor | None
    ) -> Adjoint:
        """Of a state that q reads, z being the gradient of what it reads; `last`: of the state at the end."""
        dinitial = None if initial is None else torch.empty_like(initial)
        if states is None:
            return Adjoint(initial, dinitial, last, dinitial, dinitial)
        dstates = self.borders(self.q, z, g, last, dinitial, reverse=True)
        return Adjoint(states, dstates, dstates[1:], dinitial, None)

    def state(self, y: Tensor, z: Tensor) -> Tensor:
        return self.q.new_empty((self.cut.sequences, self.H, y.shape[-1], z.shape[-1]), dtype=self.acc)

    def walk(
        self,
        terms: list[Term],
        like: Tensor,
        *,
        reverse: bool = False,
        w: Tensor | None = None,
        final: Tensor | None = None,
    ) -> Tensor:
        """The sum of the terms, for the heads and in the dtype of `like`. `final`: where the state of the first pair
        goes after the walk."""
        alone = like.shape[2] == self.H
        shape = (self.B, self.T, self.H, terms[0].z.shape[-1])
        out = self.q.new_empty(shape, dtype=like.dtype if alone else self.acc)
        walks = [terms] if self.how.together else [[t._replace(pairs=[p])] for t in terms for p in t.pairs]
        for n, now in enumerate(walks):
            self.launch(self.how.walk, now, w, out, None if n else final, None, reverse=reverse, into=n > 0)
        return out if alone else self.grouped(out, 2).to(like.dtype)

    def borders(
        self, y: Tensor, z: Tensor, g: Tensor | None, outer: Tensor | None, far: Tensor | None, reverse: bool = False
    ) -> Tensor:
        """The states at the segments' borders, or with `reverse` their gradients, from `outer` on; `far`: room for the
        last one."""
        borders = self.q.new_empty((self.cut.borders, self.H, y.shape[-1], z.shape[-1]), dtype=self.acc)
        totals = self.q.new_empty((self.cut.borders, self.H), dtype=self.acc)
        term = Term([Pair(y, y, None)], z, g)
        self.launch(self.how.border, [term], None, None, borders, totals, reverse=reverse, outer=far is not None)
        size, BLOCK = y.shape[-1] * z.shape[-1], 1024
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
            DECAY=g is not None,
            GRADIENT=reverse,
            HAS_OUTER=outer is not None,
            HAS_FAR=far is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
        )
        return borders

    def launch(
        self,
        how: Launch,
        terms: list[Term],
        w: Tensor | None,
        out: Tensor | None,
        final: Tensor | None,
        totals: Tensor | None,
        *,
        reverse: bool,
        outer: bool = False,
        into: bool = False,
    ) -> None:
        """`totals` are there if states at borders are wanted, and no result."""
        dot, acc, precision = operands(self.q.dtype)
        M = terms[0].z.shape[-1]
        BM = block(M, how.columns)
        named: dict[str, Any] = {}
        first, second = terms[0], terms[1] if len(terms) > 1 else None
        pairs = [*first.pairs, *[None] * (2 - len(first.pairs)), *(second.pairs if second else [None])]
        for n, p in enumerate(pairs):
            N = 1 if p is None else p.x.shape[-1]
            x, y, states, turned = p or (None, None, None, False)
            named |= {f"x{n}": x, f"y{n}": y, f"states{n}": states, f"RX{n}": self.serves(x), f"RY{n}": self.serves(y)}
            named |= {f"N{n}": N, f"BN{n}": block(N, 128), f"SN{n}": 1 if turned else M, f"SM{n}": N if turned else 1}
        blocks = triton.cdiv(M, BM)
        for n, t in enumerate((first, second)):
            part = None
            if t is not None and t.u is not None and t.g is not None:
                part = self.q.new_empty((blocks, self.H, self.rows), dtype=self.acc)
                t.u.append(part)
            z, g = (None, None) if t is None else (t.z, t.g)
            named |= {f"z{n}": z, f"g{n}": g, f"part{n}": part, f"RZ{n}": self.serves(z)}
        w = w if named["part0"] is not None or named["part1"] is not None else None
        a, c = pairs[0], pairs[2]
        read = [w, *(x for p in pairs if p for x in p[:2]), *(x for t in terms for x in (t.z, t.g))]
        loads = len({id(x) for x in read if x is not None})
        whole = block(a.x.shape[-1], 128) == BM  # a tile of z is as wide as one of x and y
        walk_kernel[(self.cut.segments * self.H * blocks,)](
            **named,
            w=w,
            out=out,
            final=final,
            totals=totals,
            table=self.cut.table,
            scale=self.scale,
            rows=self.rows,
            T=self.cut.T,
            length=self.cut.length,
            P=self.cut.P,
            H=self.H,
            RW=self.serves(w),
            M=M,
            C=how.C,
            BM=BM,
            REVERSE=reverse,
            BORDER=totals is not None,
            OUTER=outer,
            INTO=into,
            Z_IS_Y=whole and first.z is a.y,
            W_IS_X=whole and w is a.x,
            SAME_X=c is not None and c.x is a.x,
            SAME_Z=second is not None and second.z is first.z,
            SWAPPED=whole and c is not None and c.y is first.z and second.z is a.y,
            DOT=dot,
            SUM=sum_dtype(self.q.dtype),
            ACC=acc,
            PREC=precision,
            num_warps=how.num_warps,
            num_stages=how.num_stages - (loads > self.how.loads),
        )

    def serves(self, x: Tensor | None) -> int:
        """How many heads of q a head of x serves."""
        return 1 if x is None else self.H // x.shape[2]

    def decay(self, of: Adjoint, g: Tensor | None, u: list[Tensor]) -> Tensor:
        """The gradient of a state's log decay, per head of q."""
        dg = self.q.new_empty((self.B, self.T, self.H), dtype=self.acc)
        parts = torch.cat(u) if u else None
        decay_kernel[(self.cut.segments * self.H,)](
            of.start,
            of.dstart,
            parts,
            None,
            g,
            dg,
            self.cut.table,
            self.rows,
            self.cut.T,
            self.cut.length,
            self.cut.P,
            self.H,
            SIZE=0 if of.start is None else of.start.shape[-2] * of.start.shape[-1],
            READ=0 if parts is None else parts.shape[0],
            WRITTEN=0,
            BLOCK=2048,
            HAS_STATE=of.start is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
            num_warps=8,
        )
        return dg
