"""Second- and third-order linear attention in Triton: kernels and their launches, forward and backward.

With LA(x, y, z; M)_i = s sum_{j <= i} e^{G_i - G_j} (x_i . y_j) z_j, where M is the state that holds the tokens before
the present chunk, and LA' the same over j >= i, where it holds those after it, with a = kappa or k, b = nu or v:

    kappa = LA(q, k, k; S)       da = LA'(b, do, q; dF^T)       dq = LA(do, b, a; F^T) + LA(dkappa, k, k; S^T)
    nu    = LA(q, k, v; P)       db = LA'(a, q, do; dF)                                + LA(dnu, v, k; P^T)
    o     = LA(q, a, b; F)       dv = LA'(k, q, dnu; dP)        dk = LA'(k, q, dkappa; dS) + LA'(k, dkappa, q; dS^T)
                                                                     + LA'(v, dnu, q; dP^T)

`hla2` has kappa and v, `ahla` k and nu, `hla3` kappa and nu; F decays by the outer decay, S and P by the inner one. So
every result is a sum of up to three such terms, and `walk_kernel` computes it in one go: a program walks one segment of
one head with the terms' states in registers, cut into blocks of columns of z. Compared with calls of linear attention,
no addends of a gradient reach memory, and what terms have in common is read once.

Few heads: a sequence is cut into segments. Then the states at their borders come first: the walk from a state of zeros
without a result, and a scan. S and P must be done before F, whose addends need kappa and nu. Nothing of size
tokens x K x V reaches memory.

The decays' gradients are those of the terms, see linear_attention/triton.py: a decay's `read` and `written` parts come
from the walks that read its state and from those that write it.

A product is never transposed after it was computed: where a transposed one is needed, its operands are swapped.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import (
    Cut,
    load_log_decay,
    load_rows,
    operands,
    segment_of,
    store_rows,
    sum_dtype,
    weight,
)
from mixassay.kernels.linear_attention.triton import block, decay_kernel, scan_kernel


@triton.jit
def _tile(x, row, h, H, R, i, live, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr):
    """Rows of x [rows, H / R, WIDTH], of the head that serves h."""
    stride = (H // R) * WIDTH
    return load_rows(x + row * stride + (h // R) * WIDTH, i, live, columns, stride, WIDTH, BLOCK).to(DOT)


@triton.jit
def _at_state(at, mm, SN, SM, N: tl.constexpr, M: tl.constexpr, BN: tl.constexpr):
    """Pointers to a block [BN, BM] of a state, and which of them exist."""
    nn = tl.arange(0, BN)
    return at + nn[:, None] * SN + mm[None, :] * SM, (nn < N)[:, None] & (mm < M)[None, :]


@triton.jit
def _entered(states, head, mm, SN, SM, N: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, ACC):
    """The state with which a term's walk begins."""
    if states is None:
        return tl.zeros([BN, BM], dtype=ACC)
    else:
        at, keep = _at_state(states + head * N * M, mm, SN, SM, N, M, BN)
        return tl.load(at, mask=keep, other=0.0)


@triton.jit
def _term(
    outs,
    S,
    S2,
    x,
    y,
    x2,
    y2,
    z,
    g,
    w,
    part,
    row,
    h,
    i,
    left,
    mm,
    scale,
    H,
    RX,
    RY,
    RX2,
    RY2,
    RZ,
    RW,
    N: tl.constexpr,
    N2: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    BN2: tl.constexpr,
    BM: tl.constexpr,
    REVERSE: tl.constexpr,
    BORDER: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """`outs` and a term's share of a chunk, and its states behind the chunk. States of a reverse walk hold the scale,
    those of a forward one do not."""
    nn = tl.arange(0, BN)
    nn2 = tl.arange(0, BN2)
    ys = _tile(y, row, h, H, RY, i, left, nn, N, BN, DOT)
    zs = _tile(z, row, h, H, RZ, i, left, mm, M, BM, DOT)
    if x2 is not None:
        ys2 = _tile(y2, row, h, H, RY2, i, left, nn2, N2, BN2, DOT)
    if g is not None:
        gs = load_log_decay(g + row * H + h, i, left, H, SUM)
        near = tl.cumsum(gs)  # decay since the walk entered the chunk
        total = tl.sum(gs)
        if REVERSE:
            near = total - near
    if not BORDER:
        xs = _tile(x, row, h, H, RX, i, left, nn, N, BN, DOT)
        A = tl.dot(xs, tl.trans(ys), input_precision=PREC, out_dtype=ACC)
        if x2 is not None:
            xs2 = _tile(x2, row, h, H, RX2, i, left, nn2, N2, BN2, DOT)
            A = tl.dot(xs2, tl.trans(ys2), acc=A, input_precision=PREC, out_dtype=ACC)
        A *= scale
        if g is not None:
            A *= weight(near[:, None] - near[None, :], ACC)
        A = tl.where(i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :], A, 0.0)
        if part is not None:
            ws = _tile(w, row, h, H, RW, i, left, mm, M, BM, DOT)
            pairs = A * tl.dot(ws, tl.trans(zs), input_precision=PREC, out_dtype=ACC)
            parts = tl.sum(tl.where(i[:, None] == i[None, :], 0.0, pairs), 1)
        outs = tl.dot(A.to(DOT), zs, acc=outs, input_precision=PREC, out_dtype=ACC)
        read = tl.dot(xs, S.to(DOT), input_precision=PREC, out_dtype=ACC)
        if x2 is not None:
            read = tl.dot(xs2, S2.to(DOT), acc=read, input_precision=PREC, out_dtype=ACC)
        if not REVERSE:
            read *= scale
        if g is not None:
            read *= weight(near, ACC)[:, None]
        if part is not None:
            parts += tl.sum(read * ws, 1)
            tl.store(part + row + i, -parts if REVERSE else parts, mask=i < left)
        outs += read
    if REVERSE:
        zs = (zs * scale).to(ACC)
    if g is not None:
        zs = zs * weight(total - near, ACC)[:, None]
        S *= weight(total, ACC)
        if x2 is not None:
            S2 *= weight(total, ACC)
    zs = zs.to(DOT)
    S = tl.dot(tl.trans(ys), zs, acc=S, input_precision=PREC, out_dtype=ACC)
    if x2 is not None:
        S2 = tl.dot(tl.trans(ys2), zs, acc=S2, input_precision=PREC, out_dtype=ACC)
    return outs, S, S2


@triton.jit
def walk_kernel(
    x0,  # [rows, H / RX0, N0]
    y0,
    states0,  # [slots, H, N0, M] (strides SN0, SM0) where segments begin in the direction of the walk
    x1,
    y1,
    states1,
    x2,
    y2,
    states2,
    z0,  # [rows, H / RZ0, M]
    g0,  # [rows, H]
    part0,  # [blocks, H, rows]: what a token's pairs with those before it add to u
    z1,
    g1,
    part1,
    w,  # as z: what parts multiply
    out,  # [rows, H, M]
    final,  # the first state after the walk: of a sequence that is one segment, or (BORDER) at the border it flows to
    totals,  # [slots, H]: a segment's log decay in base 2
    table,
    scale,
    rows,
    T,
    length,
    P,
    H,
    RX0,
    RY0,
    RX1,
    RY1,
    RX2,
    RY2,
    RZ0,
    RZ1,
    RW,
    SN0,
    SM0,
    SN1,
    SM1,
    SN2,
    SM2,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BN0: tl.constexpr,
    BN1: tl.constexpr,
    BN2: tl.constexpr,
    BM: tl.constexpr,
    REVERSE: tl.constexpr,
    BORDER: tl.constexpr,
    OUTER: tl.constexpr,  # the border that ends (reverse: begins) a sequence is wanted too
    INTO: tl.constexpr,  # add to `out`
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    """The first term has the pair x0, y0 and perhaps x1, y1; the second, if there is one, x2, y2."""
    index = tl.program_id(0).to(tl.int64)
    mb, index = (index % tl.cdiv(M, BM)).to(tl.int32), index // tl.cdiv(M, BM)
    segment, h = index // H, index % H
    first, live, slot = segment_of(segment, table, T, length, P, table is not None)
    wanted = live > 0
    if BORDER and table is None and not OUTER:
        wanted = (segment % P) != (0 if REVERSE else P - 1)
    elif final is not None and not BORDER:  # an empty sequence hands its state on
        wanted = True
    if wanted:
        i = tl.arange(0, C)
        mm = mb * BM + tl.arange(0, BM)
        at_part = (mb * H + h) * rows
        head = slot * H + h
        S0 = _entered(states0, head, mm, SN0, SM0, N0, M, BN0, BM, ACC)
        S1 = _entered(states1, head, mm, SN1, SM1, N1, M, BN1, BM, ACC) if x1 is not None else 0.0
        S2 = _entered(states2, head, mm, SN2, SM2, N2, M, BN2, BM, ACC) if x2 is not None else 0.0
        walked = tl.zeros([], dtype=SUM)
        last = (live - 1) // C * C
        for step in range(0, live, C):
            start = last - step if REVERSE else step
            row = first + start
            left = live - start
            at_out = out if BORDER else out + (row * H + h) * M
            if INTO:
                outs = load_rows(at_out, i, left, mm, H * M, M, BM).to(ACC)
            else:
                outs = tl.zeros([C, BM], dtype=ACC)
            part = None if part0 is None else part0 + at_part
            outs, S0, S1 = _term(
                outs, S0, S1, x0, y0, x1, y1, z0, g0, w, part, row, h, i, left, mm, scale,
                H, RX0, RY0, RX1, RY1, RZ0, RW, N0, N1, M, BN0, BN1, BM, REVERSE, BORDER, DOT, SUM, ACC, PREC,
            )  # fmt: skip
            if x2 is not None:
                part = None if part1 is None else part1 + at_part
                outs, S2, _ = _term(
                    outs, S2, 0.0, x2, y2, None, None, z1, g1, w, part, row, h, i, left, mm, scale,
                    H, RX2, RY2, 1, 1, RZ1, RW, N2, 1, M, BN2, 16, BM, REVERSE, BORDER, DOT, SUM, ACC, PREC,
                )  # fmt: skip
            if not BORDER:
                store_rows(at_out, outs, i, left, mm, H * M, M, BM)
            elif g0 is not None:
                walked += tl.sum(load_log_decay(g0 + row * H + h, i, left, H, SUM))
        if BORDER and g0 is not None:
            tl.store(totals + head, walked)
        if final is not None:
            to = head + H if BORDER and not REVERSE else head
            at, keep = _at_state(final + to * N0 * M, mm, SN0, SM0, N0, M, BN0)
            tl.store(at, S0, mask=keep)


class Launch(NamedTuple):
    C: int  # tokens in a chunk
    columns: int  # largest block of columns of z
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    programs: int  # cut sequences until there are about as many programs
    border: Launch
    walks: tuple[Launch, ...]  # that hold one state, two, ...; terms with more than that take two walks


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if dtype != torch.bfloat16:  # in Triton's interpreter
        return Plan(264, Launch(16, 64, 4, 1), (Launch(16, 64, 4, 1),) * 3)
    if max(K, V) > 64:
        return Plan(528, Launch(64, 128, 4, 3), (Launch(64, 64, 4, 2), Launch(64, 64, 4, 1)))
    return Plan(264, Launch(128, 64, 4, 3), (Launch(64, 64, 4, 3), Launch(64, 64, 4, 2), Launch(64, 64, 4, 1)))


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
    part: bool = False  # the tokens' parts of u are wanted, if there is a decay


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
    of_b = Term([Pair(a, q, F.dend)], do, call.outer, part=True)
    of_a = Term([Pair(b, do, F.dend, turned=True)], q, call.outer)
    db, (wrote_F,) = call.walk([of_b], b, reverse=True, w=b, final=F.unwritten)
    dv, last_k, to_k, to_q = db, of_a, [], []
    if kappa is not None:
        dkappa, _ = call.walk([of_a], kappa, reverse=True)
        S = call.adjoint(dkappa, g, states.S, first.S, last.S)
        last_k = Term([Pair(k, q, S.dend)], dkappa, g, part=True)
        to_k.append(Pair(k, dkappa, S.dend, turned=True))
        to_q.append(Pair(dkappa, k, S.start, turned=True))
    if nu is not None:
        P = call.adjoint(db, g, states.P, first.P, last.P)
        of_v = Term([Pair(k, q, P.dend)], db, g, part=True)
        dv, (wrote_P,) = call.walk([of_v], v, reverse=True, w=v, final=P.unwritten)
        to_k.append(Pair(v, db, P.dend, turned=True))
        to_q.append(Pair(db, v, P.start, turned=True))
    last_q = Term([Pair(do, b, F.start, turned=True)], a, call.outer, part=True)
    dk, (_, wrote_S) = call.walk(
        [Term(to_k, q, g), last_k], k, reverse=True, w=k, final=None if S is None else S.unwritten
    )
    dq, (read, read_F) = call.walk([Term(to_q, k, g, part=True), last_q], q, w=q)
    if dkappa is not None and ridge:
        dq.add_(dkappa, alpha=scale * ridge)

    douter = None if outer is None else call.decay(F, call.outer, wrote_F, read_F).to(outer.dtype)
    dinner = None
    if inner is not None:
        parts = [(S, wrote_S)] if S else []
        parts += [(P, wrote_P)] if P else []
        found = [call.decay(x, g, wrote, None if n else read) for n, (x, wrote) in enumerate(parts)]
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
        blocks = triton.cdiv(max(K, V), self.how.walks[0].columns)
        self.cut = Cut.of(self.B, self.T, cu_seqlens, self.how.programs // (self.H * blocks), length)

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
        out, _ = self.walk([Term([Pair(self.q, y, start)], z, g)], self.q, final=to_write)
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
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The sum of the terms, for the heads and in the dtype of `like`, and the parts of u of those that want them.

        `final`: where the first term's state after the walk goes.
        """
        M, alone = terms[0].z.shape[-1], like.shape[2] == self.H
        out = self.q.new_empty((self.B, self.T, self.H, M), dtype=like.dtype if alone else self.acc)
        parts: list[Tensor | None] = []
        into, left = False, terms
        while left:
            both = len(left) == 2 and sum(len(t.pairs) for t in left) <= len(self.how.walks)
            now, left = (left, []) if both else (left[:1], left[1:])
            how = self.how.walks[sum(len(t.pairs) for t in now) - 1]
            size = (triton.cdiv(M, block(M, how.columns)), self.H, self.rows)
            new = [self.q.new_empty(size, dtype=self.acc) if t.part and t.g is not None else None for t in now]
            self.launch(how, now, new, w, out, None if into else final, None, reverse=reverse, into=into)
            into, parts = True, parts + new
        return out if alone else self.grouped(out, 2).to(like.dtype), parts

    def borders(
        self, y: Tensor, z: Tensor, g: Tensor | None, outer: Tensor | None, far: Tensor | None, reverse: bool = False
    ) -> Tensor:
        """The states at the segments' borders, or with `reverse` their gradients, from `outer` on; `far`: room for the
        last one."""
        borders = self.q.new_empty((self.cut.borders, self.H, y.shape[-1], z.shape[-1]), dtype=self.acc)
        totals = self.q.new_empty((self.cut.borders, self.H), dtype=self.acc)
        term = Term([Pair(y, y, None)], z, g)
        self.launch(
            self.how.border, [term], [None], None, None, borders, totals, reverse=reverse, outer=far is not None
        )
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
        parts: list[Tensor | None],
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
        for n in range(2):
            z, g = (terms[n].z, terms[n].g) if n < len(terms) else (None, None)
            named |= {
                f"z{n}": z,
                f"g{n}": g,
                f"RZ{n}": self.serves(z),
                f"part{n}": parts[n] if n < len(terms) else None,
            }
        walk_kernel[(self.cut.segments * self.H * triton.cdiv(M, BM),)](
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
            DOT=dot,
            SUM=sum_dtype(self.q.dtype),
            ACC=acc,
            PREC=precision,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )

    def serves(self, x: Tensor | None) -> int:
        """How many heads of q a head of x serves."""
        return 1 if x is None else self.H // x.shape[2]

    def decay(self, of: Adjoint, g: Tensor | None, written: Tensor | None, read: Tensor | None) -> Tensor:
        """The gradient of a state's log decay, per head of q."""
        assert written is not None
        dg = self.q.new_empty((self.B, self.T, self.H), dtype=self.acc)
        decay_kernel[(self.cut.segments * self.H,)](
            of.start,
            of.dstart,
            read,
            written,
            g,
            dg,
            self.cut.table,
            self.rows,
            self.cut.T,
            self.cut.length,
            self.cut.P,
            self.H,
            SIZE=0 if of.start is None else of.start.shape[-2] * of.start.shape[-1],
            READ=0 if read is None else read.shape[0],
            WRITTEN=written.shape[0],
            BLOCK=2048,
            HAS_STATE=of.start is not None,
            PACKED=self.cut.table is not None,
            ACC=operands(self.q.dtype)[1],
            num_warps=8,
        )
        return dg
