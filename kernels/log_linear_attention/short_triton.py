"""Log-linear attention over short rows in Triton: one launch forward, three backward, all states in registers.

The equations are those of triton.py, for chunks of 16 tokens. A program has all the tokens of a few narrow heads, as in
linear_attention/short_triton.py. All four results are one operation: s times the sum over j <= i (or j >= i) of
lambda_max(i,j) e^{-|G_i - G_j|} (x_i . y_j) z_j.

           x   y   z     what the state of a node is
    o      q   k   v     S
    dq     do  v   k     S^T
    dk     v   do  q     dS^T
    dv     k   q   do    dS

`forwards_kernel` has one node of each height m, 2^m chunks, at a time: a chunk whose number has bit m clear is part of
it, one that has it set reads it, at level 5 + m. The state is decayed while it is made; afterwards a sum of log decays
says how old it is. `backwards_kernel` mirrors this: chunks with bit m set make the gradient of the node's state, those
before them take it.

The decay's gradient: dg_t = sum over s >= t of (q_s . dq_s - k_s . dk_s), each of a head alone and before rounding.
What pairs within a chunk add to both sides cancels: both ways round the same number, (v_s . do_t) e^{G_t - G_s}
lambda_ts, to an operand.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.fenwick import levels
from mixassay.kernels.common.short_triton import (
    Call,
    Launch,
    heads,
    lines,
    load,
    load_decay,
    padded,
    serves,
    store,
    tiles,
    turned,
    zeros,
)
from mixassay.kernels.common.triton import WEAKEST, weight

__all__ = ["Launch", "backward", "forward", "plan", "serves"]

INSIDE = tl.constexpr(5)  # levels of the pairs within a chunk of 16 tokens


@triton.jit
def _level(x):
    """The bit length of x < 16."""
    return (x > 0).to(tl.int32) + (x > 1) + (x > 3) + (x > 7)


@triton.jit
def _places(group, h, there, G, H, N: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BN: tl.constexpr,
            BM: tl.constexpr, HB: tl.constexpr, ADDED: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    """Of x (or y), z and the result in a chunk: offsets from its first row, and which there are. Then the strides of
    rows. `TURNED`: x is that of a head, z that of a group; `ADDED`: so is the result, one for all heads."""
    i, nn, mm = tl.arange(0, C)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, BM)[None, :]
    if TURNED:
        of_x, of_z = H * N, G * M
        at_x, at_z = tiles(h * N, HB) + (i * of_x + nn), tiles(group * M, HB) + (i * of_z + mm)
    else:
        of_x, of_z = G * N, H * M
        at_x, at_z = tiles(group * N, HB) + (i * of_x + nn), tiles(h * M, HB) + (i * of_z + mm)
    inputs, outputs = tiles(there, HB) & (nn < N), tiles(there, HB) & (mm < M)
    if ADDED:
        return at_x, inputs, at_z, outputs, tl.max(group, 0) * M + i * of_z + mm, mm < M, of_x, of_z
    else:
        return at_x, inputs, at_z, outputs, at_z, outputs, of_x, of_z


@triton.jit
def _decayed(S, exponent, cleared, HB: tl.constexpr, DECAY: tl.constexpr, ACC: tl.constexpr):
    """States, each with the log decay of its head; zeros if `cleared`."""
    if DECAY:
        return S * tiles(tl.where(cleared, 0.0, weight(exponent, ACC)), HB)
    else:
        return S * tl.where(cleared, 0.0, 1.0).to(ACC)


@triton.jit
def _forwards(outs, S, age, new, xs, ws, near, total, at_level, to_level, scale, keep, n,
              M: tl.constexpr, L: tl.constexpr, HB: tl.constexpr, TURNED: tl.constexpr, DECAY: tl.constexpr,
              DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Chunk n reads the state of height M, or is part of it."""
    reads = (n >> M) % 2
    if reads == 1:
        by = tl.load(at_level + min(INSIDE + M, L - 1), mask=keep, other=0.0).to(ACC)
        far = tl.dot(xs, S.to(DOT), input_precision=PREC, out_dtype=ACC)
        if TURNED:
            dlam = tl.sum(far * ws, -1) * scale
        if DECAY:
            w = weight(lines(age, HB) + near, ACC)
            by *= w
            if TURNED:
                dlam *= w
        if TURNED:
            tl.store(to_level + INSIDE + M, dlam, mask=keep)
        outs += tl.expand_dims(by, -1) * far
        age += total
    for _ in range(1 - reads):  # not a branch: Triton would lay the state out anew in it, and carry both
        S = new + _decayed(S, total, n % (2 << M) == 0, HB, DECAY, ACC)
        age = total * 0.0
        if TURNED:
            tl.store(to_level + INSIDE + M, near.to(ACC) * 0.0, mask=keep)
    return outs, S, age


@triton.jit
def forwards_kernel(
    x,  # [B T, G, N], or TURNED: [B T, G R, N]
    y,
    z,  # [B T, G R, M], or TURNED: [B T, G, M]
    w,  # as z, TURNED only: q
    g,  # [B T, G R]
    level_scale,  # [B T, G R, L]
    out,  # [parts, as z]
    dlevel,  # [B T, G R, W]
    read,  # [B T, G R]: out . w, of this program alone
    scale,
    rows,  # B T
    T,
    G,
    R,
    N: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,  # 16
    L: tl.constexpr,
    W: tl.constexpr,
    HEIGHTS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    HB: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    part, b, group, h, there = heads(G, R, HB, SHARED)
    i, j, H = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], G * R
    added: tl.constexpr = TURNED and SHARED and HB > 1
    at_x, inputs, at_z, outputs, to, whole, of_x, of_z = _places(
        group, h, there, G, H, N, M, C, BN, BM, HB, added, TURNED
    )
    at_g, mine = lines(h, HB) + tl.arange(0, C) * H, lines(there, HB)
    inside = tl.where(i >= j, _level(i ^ j), -1)
    at_pair = tiles(h * L, HB) + (i * (H * L) + tl.minimum(inside, L - 1))
    pairs = tiles(there, HB) & (i >= j)
    none = tl.sum(tl.sum(zeros(16, 16, HB, SUM), -1), -1)
    near, total = tl.sum(zeros(C, 16, HB, SUM), -1), none
    empty = zeros(BN, BM, HB, ACC)
    states, ages = (empty, empty, empty, empty), (none, none, none, none)
    for n in range(tl.cdiv(T, C)):
        row, live = b * T + n * C, tl.arange(0, C) < T - n * C
        keep, at_level, to_level = mine & live, level_scale + row * H * L + at_g * L, dlevel
        xs = load(x + row * of_x + at_x, inputs, live, DOT)
        ys = load(y + row * of_x + at_x, inputs, live, DOT)
        zs = load(z + row * of_z + at_z, outputs, live, DOT)
        lam = tl.load(level_scale + row * H * L + at_pair, mask=pairs & live[:, None], other=0.0).to(ACC)
        A = tl.dot(xs, turned(ys, HB), input_precision=PREC, out_dtype=ACC)
        kept, ws = zs, zs
        if DECAY:
            gs = load_decay(g + row * H + at_g, keep, SUM)
            near, total = tl.cumsum(gs, -1), tl.sum(gs, -1)
            A *= weight(tl.expand_dims(near, -1) - tl.expand_dims(near, -2), ACC)
            kept = (zs * tl.expand_dims(weight(lines(total, HB) - near, ACC), -1)).to(DOT)
        if TURNED:
            to_level = dlevel + row * H * W + at_g * W
            ws = load(w + row * of_z + at_z, outputs, live, DOT)
            P = A * tl.dot(ws, turned(zs, HB), input_precision=PREC, out_dtype=ACC) * scale
            for level in tl.static_range(INSIDE):
                tl.store(to_level + level, tl.sum(tl.where(inside == level, P, 0.0), -1), mask=keep)
            for level in tl.static_range(INSIDE + HEIGHTS, W):  # that rows of T tokens do not have
                tl.store(to_level + level, near.to(ACC) * 0.0, mask=keep)
        outs = zeros(C, BM, HB, ACC)
        if HEIGHTS > 0:
            new = tl.dot(turned(ys, HB), kept, input_precision=PREC, out_dtype=ACC)
        for m in tl.static_range(HEIGHTS):
            outs, S, age = _forwards(
                outs, states[m], ages[m], new, xs, ws, near, total, at_level, to_level, scale, keep, n, m, L, HB,
                TURNED, DECAY, DOT, ACC, PREC,
            )  # fmt: skip
            states, ages = states[:m] + (S,) + states[m + 1 :], ages[:m] + (age,) + ages[m + 1 :]
        outs = tl.dot((A * lam).to(DOT), zs, acc=outs, input_precision=PREC, out_dtype=ACC) * scale
        if TURNED:
            if DECAY:
                tl.store(read + row * H + at_g, tl.sum(outs * ws, -1), mask=keep)
            if added:
                outs = tl.sum(outs, 0)
        store(out + ((part * rows if TURNED else 0) + row) * of_z + to, outs, whole, live)


@triton.jit
def _backwards(dS, age, sum, ys, zs, near, total, at_level, keep, n,
               M: tl.constexpr, L: tl.constexpr, HB: tl.constexpr, DECAY: tl.constexpr,
               DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """Chunk n adds to the gradient of the state of height M, or takes it into the sum."""
    adds = (n >> M) % 2
    sum += _decayed(dS, age, adds == 1, HB, DECAY, ACC)
    age += total
    for _ in range(adds):
        by = tl.load(at_level + min(INSIDE + M, L - 1), mask=keep, other=0.0).to(ACC)
        if DECAY:
            by *= weight(near, ACC)
        scaled = (zs * tl.expand_dims(by, -1)).to(DOT)
        dS = _decayed(dS, total, n % (2 << M) == (2 << M) - 1, HB, DECAY, ACC)
        dS = tl.dot(turned(ys, HB), scaled, acc=dS, input_precision=PREC, out_dtype=ACC)
        age = total * 0.0
    return dS, age, sum


@triton.jit
def backwards_kernel(
    x,  # as in `forwards_kernel`
    y,
    z,
    w,  # k
    g,
    level_scale,
    out,
    dg,  # [B T, G R], TURNED only
    read,
    scale,
    rows,
    T,
    G,
    R,
    N: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,  # 16
    L: tl.constexpr,
    HEIGHTS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    HB: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    DECAY: tl.constexpr,
    DOT: tl.constexpr,
    SUM: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    part, b, group, h, there = heads(G, R, HB, SHARED)
    i, j, H = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], G * R
    added: tl.constexpr = TURNED and SHARED and HB > 1
    at_x, inputs, at_z, outputs, to, whole, of_x, of_z = _places(
        group, h, there, G, H, N, M, C, BN, BM, HB, added, TURNED
    )
    at_g, mine = lines(h, HB) + tl.arange(0, C) * H, lines(there, HB)
    pairs = tiles(there, HB) & (i <= j)
    at_pair = tiles(h * L, HB) + (j * (H * L) + tl.minimum(_level(i ^ j), L - 1))
    none = tl.sum(tl.sum(zeros(16, 16, HB, SUM), -1), -1)
    near, total = tl.sum(zeros(C, 16, HB, SUM), -1), none
    empty = zeros(BN, BM, HB, ACC)
    states, ages = (empty, empty, empty, empty), (none, none, none, none)
    later = none.to(ACC)
    for step in range(tl.cdiv(T, C)):
        n = tl.cdiv(T, C) - 1 - step
        row, live = b * T + n * C, tl.arange(0, C) < T - n * C
        keep, at_level = mine & live, level_scale + row * H * L + at_g * L
        xs = load(x + row * of_x + at_x, inputs, live, DOT)
        ys = load(y + row * of_x + at_x, inputs, live, DOT)
        zs = load(z + row * of_z + at_z, outputs, live, DOT)
        lam = tl.load(level_scale + row * H * L + at_pair, mask=pairs & live[None, :], other=0.0).to(ACC)
        A = tl.dot(xs, turned(ys, HB), input_precision=PREC, out_dtype=ACC)
        if DECAY:
            gs = load_decay(g + row * H + at_g, keep, SUM)
            near, total = tl.cumsum(gs, -1), tl.sum(gs, -1)
            A *= weight(tl.expand_dims(near, -2) - tl.expand_dims(near, -1), ACC)
        outs = zeros(C, BM, HB, ACC)
        if HEIGHTS > 0:
            sum = zeros(BN, BM, HB, ACC)
            for m in tl.static_range(HEIGHTS):
                dS, age, sum = _backwards(
                    states[m], ages[m], sum, ys, zs, near, total, at_level, keep, n, m, L, HB, DECAY, DOT, ACC, PREC
                )
                states, ages = states[:m] + (dS,) + states[m + 1 :], ages[:m] + (age,) + ages[m + 1 :]
            outs = tl.dot(xs, sum.to(DOT), input_precision=PREC, out_dtype=ACC)
            if DECAY:
                outs *= tl.expand_dims(weight(lines(total, HB) - near, ACC), -1)
        outs = tl.dot((A * lam).to(DOT), zs, acc=outs, input_precision=PREC, out_dtype=ACC) * scale
        if TURNED:
            if DECAY:
                ws = load(w + row * of_z + at_z, outputs, live, DOT)
                u = tl.load(read + row * H + at_g, mask=keep, other=0.0) - tl.sum(outs * ws, -1)
                raw = tl.load(g + row * H + at_g, mask=keep, other=0.0)
                sums = lines(later, HB) + tl.cumsum(u, -1, reverse=True)
                tl.store(dg + row * H + at_g, tl.where(raw < WEAKEST, 0.0, sums), mask=keep)
                later += tl.sum(u, -1)
            if added:
                outs = tl.sum(outs, 0)
        store(out + ((part * rows if TURNED else 0) + row) * of_z + to, outs, whole, live)


def plan(H: int, K: int, V: int) -> Launch:
    """A fixed table, not a search: the same call sums in the same order in every process. A warp has one head: with two
    there are fewer instructions, but they wait for each other, and fewer warps fit."""
    if max(K, V) > 16:
        return Launch(16, 4, 4, 1)
    return Launch(16, 8, 8, 1, 128 if H > 4 else 168)  # sixteen or twelve warps on a multiprocessor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    how: Launch | None = None,
) -> Tensor:
    """o of q, k [B, T, G, K], v [B, T, H, V], level_scale [B, T, H, L] and log_decay [B, T, H]."""
    call = Call(q, k, v, log_decay, how or plan(v.shape[2], q.shape[3], v.shape[3]))
    o = call.v.new_empty(v.shape)
    given = (call.q, call.k, call.v, None, call.g, level_scale.contiguous(), o, None, None)
    forwards_kernel[call.grid](*given, scale, W=0, **_shared(call, level_scale, turned=False))
    return o


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    do: Tensor,
    how: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, level_scale and log_decay."""
    call = Call(q, k, v, log_decay, how or plan(v.shape[2], q.shape[3], v.shape[3]))
    q, k, v, g, do, lam = call.q, call.k, call.v, call.g, do.to(v.dtype).contiguous(), level_scale.contiguous()
    alone = call.parts == 1  # else the sums of several programs are added
    dq, dk = (q.new_empty((call.parts, *q.shape), dtype=q.dtype if alone else call.acc) for _ in range(2))
    dv, dg, read = (None if like is None else torch.empty_like(like) for like in (v, g, g))
    straight, across = (_shared(call, lam, turned=turned) for turned in (False, True))
    L, W = lam.shape[-1], max(lam.shape[-1], INSIDE.value + across["HEIGHTS"])
    dlevel = lam.new_empty((*v.shape[:3], W), dtype=lam.dtype if W == L else call.acc)
    forwards_kernel[call.grid](do, v, k, q, g, lam, dq, dlevel, read, scale, W=W, **across)
    backwards_kernel[call.grid](v, do, q, k, g, lam, dk, dg, read, scale, **across)
    backwards_kernel[call.grid](k, q, do, None, g, lam, dv, None, None, scale, **straight)
    dq, dk = (x[0] if alone else x.sum(0).to(q.dtype) for x in (dq, dk))
    if W > L:  # levels that share the last weight
        dlevel = torch.cat([dlevel[..., : L - 1], dlevel[..., L - 1 :].sum(-1, keepdim=True)], -1)
    dg = dg if dg is None or log_decay is None else dg.to(log_decay.dtype)
    return dq, dk, dv, dlevel.to(lam.dtype), dg


def _shared(call: Call, level_scale: Tensor, *, turned: bool) -> dict[str, Any]:
    """What the launches have in common. `turned`: x and y are V wide, z is K wide."""
    B, T, _, L = level_scale.shape
    N, M = (call.V, call.K) if turned else (call.K, call.V)
    tree = {"L": L, "HEIGHTS": max(0, levels(T) - INSIDE.value)}
    widths = {"N": N, "M": M, "BN": padded(N), "BM": padded(M)}
    return {"rows": B * T, "TURNED": turned, **tree, **widths, **call.shared}
