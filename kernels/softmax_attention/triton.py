"""Causal softmax attention of packed projections in Triton (the plan of FlashAttention-2, Dao 2023).

    S = s q k^T, causal      P = e^{S - lse}      o = P v
    delta = rowsum(do o)     dS = P (do v^T - delta)      dq = s dS k      dk = s dS^T q      dv = P^T do

q, k and v lie side by side in one tensor [B, T, 3, H, K], and so do their gradients: nothing is copied. A program has a
block of queries of one head and walks over the keys before them, forward and for dq; for dk and dv it has a block of
keys and walks over the queries behind them, with transposed scores. Exponents are in base 2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import LOG2_E, half, load_rows, operands, store_rows, tile


@triton.jit
def place(T, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """First token of this program's block; its head's first element in [B, T, 3, H, K], in [B, T, H, K] and in
    [B, H, T]. Late blocks of queries have most to do, and come first."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(T, BLOCK)
    head = program // blocks
    b, h = head // H, head % H
    first = ((blocks - 1 - program % blocks) * BLOCK).to(tl.int32)
    return first, b * T * 3 * H * K + h * K, b * T * H * K + h * K, head * T


@triton.jit
def scores(x, y, scale, PREC: tl.constexpr, ACC: tl.constexpr):
    """x y^T in base 2."""
    return tl.dot(x, tl.trans(y), input_precision=PREC, out_dtype=ACC) * (scale * LOG2_E)


@triton.jit
def attend(
    q, kv, i, start, best, total, o, scale, T, H, rows, columns,
    MASK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One block of keys and values joins the running softmax."""
    width = 3 * H * K
    k = load_rows(kv, start + rows, T, columns, width, K, BK).to(DOT)
    v = load_rows(kv + H * K, start + rows, T, columns, width, K, BK).to(DOT)
    S = scores(q, k, scale, PREC, ACC)
    if MASK:
        S = tl.where(i[:, None] >= (start + rows)[None, :], S, float("-inf"))
    higher = tl.maximum(best, tl.max(S, 1))
    P = tl.exp2(S - higher[:, None])
    shrink = tl.exp2(best - higher)
    o = tl.dot(P.to(DOT), v, acc=o * shrink[:, None], input_precision=PREC, out_dtype=ACC)
    return higher, total * shrink + tl.sum(P, 1), o


@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    qkv, o, lse, scale, T, H,
    K: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    first, packed, plain, line = place(T, H, K, BQ)
    i, rows, columns = first + tl.arange(0, BQ), tl.arange(0, BN).to(tl.int64), tl.arange(0, BK)
    width = 3 * H * K
    q = load_rows(qkv + packed + first.to(tl.int64) * width, tl.arange(0, BQ), T - first, columns, width, K, BK).to(DOT)
    best = tl.full([BQ], float("-inf"), dtype=ACC)
    total = tl.zeros([BQ], dtype=ACC)
    out = tl.zeros([BQ, BK], dtype=ACC)
    kv = qkv + packed + H * K
    for start in range(0, first, BN):
        best, total, out = attend(
            q, kv, i, start, best, total, out, scale, T, H, rows, columns, False, K, BK, DOT, ACC, PREC
        )
    for start in range(first, tl.minimum(first + BQ, T), BN):
        best, total, out = attend(
            q, kv, i, start, best, total, out, scale, T, H, rows, columns, True, K, BK, DOT, ACC, PREC
        )
    to = o + plain + first.to(tl.int64) * (H * K)
    store_rows(to, out / total[:, None], tl.arange(0, BQ), T - first, columns, H * K, K, BK)
    tl.store(lse + line + i, best + tl.log2(total), mask=i < T)


@triton.jit
def query_gradient(
    q, do, kv, i, start, log_total, delta, dq, scale, T, H, rows, columns,
    MASK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    width = 3 * H * K
    k = load_rows(kv, start + rows, T, columns, width, K, BK).to(DOT)
    v = load_rows(kv + H * K, start + rows, T, columns, width, K, BK).to(DOT)
    S = scores(q, k, scale, PREC, ACC) - log_total[:, None]
    if MASK:
        S = tl.where(i[:, None] >= (start + rows)[None, :], S, float("-inf"))
    dP = tl.dot(do, tl.trans(v), input_precision=PREC, out_dtype=ACC)
    dS = tl.exp2(S) * (dP - delta[:, None])
    return tl.dot(dS.to(DOT), k, acc=dq, input_precision=PREC, out_dtype=ACC)


@triton.jit(do_not_specialize=["T"])
def queries_kernel(
    qkv, o, lse, do, dqkv, deltas, scale, T, H,
    K: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq, and delta for the other kernel."""
    first, packed, plain, line = place(T, H, K, BQ)
    r, rows, columns = tl.arange(0, BQ), tl.arange(0, BN).to(tl.int64), tl.arange(0, BK)
    i, width, live = first + r, 3 * H * K, T - first
    q = load_rows(qkv + packed + first.to(tl.int64) * width, r, live, columns, width, K, BK).to(DOT)
    dos = load_rows(do + plain + first.to(tl.int64) * (H * K), r, live, columns, H * K, K, BK)
    os = load_rows(o + plain + first.to(tl.int64) * (H * K), r, live, columns, H * K, K, BK)
    delta = tl.sum(dos.to(ACC) * os.to(ACC), 1)
    tl.store(deltas + line + i, delta, mask=i < T)
    dos = dos.to(DOT)
    log_total = tl.load(lse + line + i, mask=i < T, other=float("inf"))
    dq = tl.zeros([BQ, BK], dtype=ACC)
    kv = qkv + packed + H * K
    for start in range(0, first, BN):
        dq = query_gradient(
            q, dos, kv, i, start, log_total, delta, dq, scale, T, H, rows, columns, False, K, BK, DOT, ACC, PREC
        )
    for start in range(first, tl.minimum(first + BQ, T), BN):
        dq = query_gradient(
            q, dos, kv, i, start, log_total, delta, dq, scale, T, H, rows, columns, True, K, BK, DOT, ACC, PREC
        )
    store_rows(dqkv + packed + first.to(tl.int64) * width, dq * scale, r, live, columns, width, K, BK)


@triton.jit
def key_gradient(
    k, v, qs, dos, lse, deltas, j, start, dk, dv, scale, T, H, rows, columns,
    MASK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    i = start + rows
    q = load_rows(qs, i, T, columns, 3 * H * K, K, BK).to(DOT)
    do = load_rows(dos, i, T, columns, H * K, K, BK).to(DOT)
    log_total = tl.load(lse + i, mask=i < T, other=float("inf"))  # no weight for queries past the end
    delta = tl.load(deltas + i, mask=i < T, other=0.0)
    S = scores(k, q, scale, PREC, ACC) - log_total[None, :]  # [key, query]
    if MASK:
        S = tl.where(i[None, :] >= j[:, None], S, float("-inf"))
    P = tl.exp2(S)
    dv = tl.dot(P.to(DOT), do, acc=dv, input_precision=PREC, out_dtype=ACC)
    dP = tl.dot(v, tl.trans(do), input_precision=PREC, out_dtype=ACC)
    dS = P * (dP - delta[None, :])
    return tl.dot(dS.to(DOT), q, acc=dk, input_precision=PREC, out_dtype=ACC), dv


@triton.jit(do_not_specialize=["T"])
def keys_kernel(
    qkv, lse, do, deltas, dqkv, scale, T, H,
    K: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk and dv of BQ keys, from BN queries at a time."""
    first, packed, plain, line = place(T, H, K, BQ)
    r, rows, columns = tl.arange(0, BQ), tl.arange(0, BN).to(tl.int64), tl.arange(0, BK)
    j, width, live = first + r, 3 * H * K, T - first
    at = packed + first.to(tl.int64) * width + H * K
    k = load_rows(qkv + at, r, live, columns, width, K, BK).to(DOT)
    v = load_rows(qkv + at + H * K, r, live, columns, width, K, BK).to(DOT)
    dk = tl.zeros([BQ, BK], dtype=ACC)
    dv = tl.zeros([BQ, BK], dtype=ACC)
    for start in range(first, tl.minimum(first + BQ, T), BN):
        dk, dv = key_gradient(
            k, v, qkv + packed, do + plain, lse + line, deltas + line, j, start, dk, dv, scale, T, H, rows, columns,
            True, K, BK, DOT, ACC, PREC,
        )  # fmt: skip
    for start in range(first + BQ, T, BN):
        dk, dv = key_gradient(
            k, v, qkv + packed, do + plain, lse + line, deltas + line, j, start, dk, dv, scale, T, H, rows, columns,
            False, K, BK, DOT, ACC, PREC,
        )  # fmt: skip
    store_rows(dqkv + at, dk * scale, r, live, columns, width, K, BK)
    store_rows(dqkv + at + H * K, dv, r, live, columns, width, K, BK)


class Launch(NamedTuple):
    BQ: int  # tokens that a program has, a multiple of BN
    BN: int  # tokens that it takes at a time
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers of a thread, at most: as many programs on a multiprocessor as that leaves


class Plan(NamedTuple):
    """A fixed table, not a search: the same call sums in the same order in every process."""

    forward: Launch
    queries: Launch
    keys: Launch


def plan(dtype: torch.dtype, K: int) -> Plan:
    if half(dtype) and K <= 64:
        few = Launch(64, 64, 4, 2, maxnreg=128)
        return Plan(few, few, Launch(64, 64, 4, 2, maxnreg=168 if tile(K) == K else None))
    launch = Launch(64, 64, 4, 2) if half(dtype) else Launch(32, 16, 4, 1)
    return Plan(launch, launch, launch)


def forward(qkv: Tensor, scale: float, how: Plan | None = None) -> tuple[Tensor, Tensor]:
    """o [B, T, H, K], and for the backward the logarithms, in base 2, of the sums of weights [B, H, T]."""
    B, T, _, H, K = qkv.shape
    how = how or plan(qkv.dtype, K)
    qkv = qkv.contiguous()
    o = qkv.new_empty((B, T, H, K))
    lse = qkv.new_empty((B, H, T), dtype=wide(qkv))
    _launch(forward_kernel, how.forward, qkv, qkv, o, lse, scale)
    return o, lse


def backward(qkv: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float, how: Plan | None = None) -> Tensor:
    """The gradient of qkv."""
    how = how or plan(qkv.dtype, qkv.shape[-1])
    qkv, o, lse, do = qkv.contiguous(), o.contiguous(), lse.contiguous(), do.contiguous()
    dqkv, deltas = torch.empty_like(qkv), torch.empty_like(lse)
    _launch(queries_kernel, how.queries, qkv, qkv, o, lse, do, dqkv, deltas, scale)
    _launch(keys_kernel, how.keys, qkv, qkv, lse, do, deltas, dqkv, scale)
    return dqkv


def wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _launch(kernel: object, launch: Launch, qkv: Tensor, *args: object) -> None:
    B, T, _, H, K = qkv.shape
    dot, acc, precision = operands(qkv.dtype)
    kernel[(B * H * triton.cdiv(T, launch.BQ),)](
        *args, T, H, K=K, BK=tile(K), BQ=launch.BQ, BN=launch.BN,
        DOT=dot, ACC=acc, PREC=precision, num_warps=launch.num_warps, num_stages=launch.num_stages,
        maxnreg=launch.maxnreg,
    )  # fmt: skip
