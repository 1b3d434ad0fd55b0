"""A linear head and its cross-entropy in Triton, for a stack of M models; equations and the plan are in README.md.

Sums of exponentials are held in base 2, so that exp2 serves; factors of log2(e) go into its argument, one instruction.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import LOG2_E, load_rows, operands, store_rows, tile

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rows_kernel(
    h,  # [M, R, D], in DOT or wider
    weight,  # [M, V, D], in DOT: the loop reads it
    labels,  # [M, R]
    loss,  # [M, R]
    lse,  # [M, R], base 2
    dh,  # [M, R, D], for a gradient of 1
    right,  # [M, R], whether the label is the likeliest word
    R,
    V,
    ignore,
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    EVEN: tl.constexpr,  # whether BV divides V
    GRADIENT: tl.constexpr,  # else score
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(R, BR)
    m, first = index // blocks, (index % blocks) * BR
    r, d, w = tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, BV)
    live = R - first
    at = m * R + first
    hs = load_rows(h + at * D, r, live, d, D, D, BD).to(DOT)
    y = tl.load(labels + at + r, mask=r < live, other=ignore)
    labelled = y != ignore
    y = tl.where(labelled, y, 0)
    words = weight + m * V * D
    top = tl.full([BR], float("-inf"), dtype=ACC)
    total = tl.zeros([BR], dtype=ACC)
    best = tl.zeros([BR], dtype=tl.int32)
    mean = tl.zeros([BR, BD], dtype=ACC)  # sum_v e^{l_v - top} E_v
    for start in range(0, V, BV):
        es = load_rows(words + start * D, w, BV if EVEN else V - start, d, D, D, BD).to(DOT)
        logits = tl.dot(hs, tl.trans(es), input_precision=PREC, out_dtype=ACC)
        if not EVEN:
            logits = tl.where((w < V - start)[None, :], logits, float("-inf"))
        if GRADIENT:
            higher = tl.maximum(top, tl.max(logits, 1))
        else:
            block, place = tl.max(logits, 1, return_indices=True, return_indices_tie_break_left=True)
            best = tl.where(block > top, place + start, best)
            higher = tl.maximum(top, block)
        p = tl.exp2(logits * LOG2_E - (higher * LOG2_E)[:, None])
        shrink = tl.exp2((top - higher) * LOG2_E)
        total = total * shrink + tl.sum(p, 1)
        if GRADIENT:
            mean = tl.dot(p.to(DOT), es, acc=mean * shrink[:, None], input_precision=PREC, out_dtype=ACC)
        top = higher
    inside = (labelled & (r < live))[:, None] & (d < D)[None, :]
    ey = tl.load(words + y[:, None] * D + d[None, :], mask=inside, other=0.0).to(ACC)
    own = tl.sum(hs.to(ACC) * ey, 1)  # the label's logit
    log_total = top * LOG2_E + tl.log2(total)
    tl.store(loss + at + r, tl.where(labelled, log_total * LN_2 - own, 0.0), mask=r < live)
    if GRADIENT:
        tl.store(lse + at + r, log_total, mask=r < live)
        dhs = tl.where(labelled[:, None], mean / total[:, None] - ey, 0.0)
        store_rows(dh + at * D, dhs, r, live, d, D, D, BD)
    else:
        tl.store(right + at + r, labelled & (best == y), mask=r < live)


@triton.jit
def words_kernel(
    h,  # in DOT: the loop reads it
    weight,  # in DOT or wider
    labels,
    lse,
    dloss,  # [M, R]
    size,  # [M], the largest |dloss|
    dweight,  # [M, splits, V, D]
    R,
    V,
    length,  # rows of a split, a multiple of BR
    splits,
    ignore,
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    EVEN: tl.constexpr,  # whether BR divides the rows of all splits
    DOT: tl.constexpr,
    ACC: tl.constexpr,
    PREC: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    split, index = index % splits, index // splits
    blocks = tl.cdiv(V, BV)
    m, first = index // blocks, (index % blocks) * BV
    r, d, w = tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, BV)
    es = load_rows(weight + (m * V + first) * D, w, V - first, d, D, D, BD).to(DOT)
    # Words across: what belongs to a row is then in few registers, and more programs fit on a multiprocessor.
    des = tl.zeros([BD, BV], dtype=ACC)
    largest = tl.maximum(tl.load(size + m), 1e-30)
    begin = split * length
    for start in range(begin, tl.minimum(begin + length, R), BR):
        at = m * R + start
        live = R - start
        hs = load_rows(h + at * D, r, BR if EVEN else live, d, D, D, BD).to(DOT)
        y = tl.load(labels + at + r, mask=r < live, other=ignore)
        # A row without a label has no gradient, and one past the end no sum.
        log_total = tl.load(lse + at + r, mask=r < live, other=float("inf"))
        scale = tl.where(y != ignore, tl.load(dloss + at + r, mask=r < live, other=0.0) / largest, 0.0)
        logits = tl.dot(hs, tl.trans(es), input_precision=PREC, out_dtype=ACC)
        p = tl.exp2(logits * LOG2_E - log_total[:, None])
        dl = p * scale[:, None] - tl.where((w + first)[None, :] == y[:, None], scale[:, None], 0.0)
        des = tl.dot(tl.trans(hs), dl.to(DOT), acc=des, input_precision=PREC, out_dtype=ACC)
    to = dweight + ((m * splits + split) * V + first) * D + w[None, :] * D + d[:, None]
    tl.store(to, des * largest, mask=(d < D)[:, None] & (w < V - first)[None, :])


class Launch(NamedTuple):
    BR: int  # rows
    BV: int  # words
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers of a thread, at most: as many programs on a multiprocessor as that leaves


class Plan(NamedTuple):
    """A fixed table, not a search: the same call sums in the same order in every process."""

    rows: Launch
    words: Launch
    programs: int  # split the rows of `words` until there are about as many programs


def plan(dtype: torch.dtype, D: int) -> Plan:
    if dtype.itemsize == 2 and D <= 64:
        return Plan(Launch(64, 64, 4, 3, 128), Launch(64, 64, 4, 3, 128 if tile(D) == D else 160), 264)
    if dtype.itemsize == 2:
        return Plan(Launch(64, 64, 4, 2), Launch(64, 64, 4, 2), 264)
    if operands(dtype)[2] == "tf32":
        return Plan(Launch(64, 64, 4, 2), Launch(64, 64, 4, 2), 264)
    return Plan(Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), 264)


def arithmetic(dtype: torch.dtype) -> tuple[Any, Any, str]:
    """As `operands`, but float16 stays: nothing here is out of its range."""
    return (tl.float16, tl.float32, "ieee") if dtype == torch.float16 else operands(dtype)


def rows(
    h: Tensor, weight: Tensor, labels: Tensor, ignore: int, gradient: bool, how: Plan | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """loss [M, R], then lse and the gradient of h (for a gradient of 1), or whether rows are right and nothing; in
    float32 or wider. Products are of weight's dtype, of which h may have more digits."""
    (M, R, D), V = h.shape, weight.shape[1]
    launch = (how or plan(weight.dtype, D)).rows
    dot, acc, precision = arithmetic(weight.dtype)
    wide = torch.float64 if h.dtype == torch.float64 else torch.float32
    loss = h.new_empty((M, R), dtype=wide)
    lse = h.new_empty((M, R) if gradient else (0,), dtype=wide)
    dh = h.new_empty(h.shape if gradient else (0,), dtype=wide)
    right = h.new_empty((0,) if gradient else (M, R), dtype=torch.bool)
    rows_kernel[(M * triton.cdiv(R, launch.BR),)](
        h,
        weight,
        labels,
        loss,
        lse,
        dh,
        right,
        R,
        V,
        ignore,
        D=D,
        BD=tile(D),
        BR=launch.BR,
        BV=launch.BV,
        EVEN=V % launch.BV == 0,
        GRADIENT=gradient,
        DOT=dot,
        ACC=acc,
        PREC=precision,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.maxnreg,
    )
    return (loss, lse, dh) if gradient else (loss, right, dh)


def words(
    h: Tensor, weight: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, ignore: int, how: Plan | None = None
) -> Tensor:
    """The gradient of weight, in float32 or wider. Products are of h's dtype, of which weight may have more digits."""
    (M, R, D), V = h.shape, weight.shape[1]
    how = how or plan(h.dtype, D)
    launch = how.words
    dot, acc, precision = arithmetic(h.dtype)
    blocks = M * triton.cdiv(V, launch.BV)
    splits = max(1, min(how.programs // blocks, triton.cdiv(R, 8 * launch.BR)))
    length = triton.cdiv(triton.cdiv(R, splits), launch.BR) * launch.BR
    splits = triton.cdiv(R, length)
    parts = lse.new_empty((M, splits, V, D))
    words_kernel[(blocks * splits,)](
        h,
        weight,
        labels,
        lse,
        dloss,
        torch.linalg.vector_norm(dloss, float("inf"), dim=1),
        parts,
        R,
        V,
        length,
        splits,
        ignore,
        D=D,
        BD=tile(D),
        BR=launch.BR,
        BV=launch.BV,
        EVEN=R % launch.BR == 0,
        DOT=dot,
        ACC=acc,
        PREC=precision,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.maxnreg,
    )
    return parts[:, 0] if splits == 1 else parts.sum(1)
