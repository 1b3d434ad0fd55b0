"""The short convolution in Triton: one pass over memory forward, one backward.

A program walks a segment of one sequence, a block of channels wide, with each channel's last W inputs in registers: an
input is read once, and nothing is exchanged between threads. With z the sum before the activation, and x_{-1} ... the
initial state,

    y_t = act(z_t),  z_t = sum_w weight_w x_{t - (W - 1) + w} + bias        dz_t = dy_t act'(z_t)
    dx_s = sum_w weight_w dz_{s + (W - 1) - w}                              dweight_w = sum_t dz_t x_{t - (W - 1) + w}

The backward recomputes z, and walks W - 1 tokens past its segment: dx_{t - (W - 1)} is complete when dz_t is known. The
first W - 1 steps of a sequence complete the gradients of its initial state. Gradients of weights are sums over segments
of one row each, added up in a fixed order.

A batch may hold several models, one after the other in equal shares, each with its own weight.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import packed

ROWS = tl.constexpr(8)  # tokens loaded together: loads cannot move up past an earlier token's store
kernel = triton.jit(do_not_specialize=["T", "rows", "segments", "blocks", "share", "N"])


@triton.jit
def segment(index, table, cu_seqlens, T, rows, PACKED: tl.constexpr):
    """First row of a segment and the row after its last, the same of its sequence, and which sequence that is."""
    if PACKED:
        first, last = tl.load(table + 3 * index), tl.load(table + 3 * index + 1)
        n = tl.load(table + 3 * index + 2) - index
        begin, end = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    else:
        first, n, begin = index * rows, index * 0, index * 0
        last, end = tl.minimum(first + rows, T), begin + T
    return first, last, begin, end, n


@triton.jit
def start(x, x_row, state, first, begin, end, d, keep, W: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr):
    """The W - 1 inputs before row `first`: rows of x, and of the initial state (or zeros) before row `begin`. A
    superfluous segment may lie behind the end."""
    window = ()
    for i in tl.static_range(W - 1):
        row = first - (W - 1) + i
        past = tl.load(x + row * x_row + d, mask=keep & (row >= begin) & (row < end), other=0.0).to(ACC)
        if state is not None:
            kept = tl.load(state + (row - begin + (W - 1)) * D + d, mask=keep & (row < begin), other=0.0)
            past += kept.to(ACC)
        window = window + (past,)
    return window


@triton.jit
def coefficients(weight, bias, member, d, keep, W: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr):
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight + (member * D + d) * W + w, mask=keep, other=0.0).to(ACC),)
    if bias is not None:
        offset = tl.load(bias + member * D + d, mask=keep, other=0.0).to(ACC)
    else:
        offset = taps[0] * 0.0
    return taps, offset


@triton.jit
def load_rows(x, x_row, row, end, d, keep):
    """ROWS rows from `row` on, as many as lie before row `end`."""
    loaded = ()
    for r in tl.static_range(ROWS):
        loaded = loaded + (tl.load(x + (row + r) * x_row + d, mask=keep & (row + r < end), other=0.0),)
    return loaded


@triton.jit
def weighted(window, taps, offset, W: tl.constexpr):
    z = offset
    for w in tl.static_range(W):
        z += window[w] * taps[w]
    return z


@kernel
def forward_kernel(
    x, weight, bias, state, y, table, cu_seqlens, x_batch, x_row, T, rows, segments, blocks, share, N,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    d = (program % blocks) * BD + tl.arange(0, BD)
    keep = d < D
    b = program // blocks // segments
    first, last, begin, end, n = segment(program // blocks % segments, table, cu_seqlens, T, rows, table is not None)
    x += b * x_batch
    y += b * T * D
    if state is not None:
        state += (b * N + n) * (W - 1) * D
    taps, offset = coefficients(weight, bias, b // share, d, keep, W, D, ACC)
    window = start(x, x_row, state, first, begin, end, d, keep, W, D, ACC)
    for row in range(first, last, ROWS):
        new = load_rows(x, x_row, row, last, d, keep)
        for r in tl.static_range(ROWS):
            window = window + (new[r].to(ACC),)
            z = weighted(window, taps, offset, W)
            window = window[1:]
            if SILU:
                z = z / (1.0 + tl.exp(-z))
            tl.store(y + (row + r) * D + d, z.to(y.dtype.element_ty), mask=keep & (row + r < last))


@kernel
def backward_kernel(
    x, weight, bias, state, dy, dx, sums, dstate, table, cu_seqlens, x_batch, x_row, dy_batch, dy_row,
    T, rows, segments, blocks, share, N,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    d = (program % blocks) * BD + tl.arange(0, BD)
    keep = d < D
    b = program // blocks // segments
    first, last, begin, end, n = segment(program // blocks % segments, table, cu_seqlens, T, rows, table is not None)
    x += b * x_batch
    dy += b * dy_batch
    dx += b * T * D
    if state is not None:
        state += (b * N + n) * (W - 1) * D
        dstate += (b * N + n) * (W - 1) * D
    taps, offset = coefficients(weight, bias, b // share, d, keep, W, D, ACC)
    window = start(x, x_row, state, first, begin, end, d, keep, W, D, ACC)
    zero = tl.zeros([BD], ACC)
    later = ()  # the last W - 1 of dz
    for _ in tl.static_range(W - 1):
        later = later + (zero,)
    dweight, dbias = later + (zero,), zero
    for row in range(first, last + (W - 1), ROWS):
        new = load_rows(x, x_row, row, end, d, keep)
        given = load_rows(dy, dy_row, row, end, d, keep)
        for r in tl.static_range(ROWS):
            t = row + r
            window = window + (new[r].to(ACC),)
            dz = given[r].to(ACC)
            if SILU:
                z = weighted(window, taps, offset, W)
                gate = 1.0 / (1.0 + tl.exp(-z))
                dz *= gate * (1.0 + z * (1.0 - gate))
            own = tl.where(t < last, dz, 0.0)
            more = ()
            for w in tl.static_range(W):
                more = more + (dweight[w] + own * window[w],)
            dweight, dbias = more, dbias + own
            window = window[1:]
            later = later + (dz,)
            done = zero  # the gradient of row t - (W - 1)
            for w in tl.static_range(W):
                done += taps[w] * later[W - 1 - w]
            later = later[1:]
            s = t - (W - 1)
            tl.store(dx + s * D + d, done.to(dx.dtype.element_ty), mask=keep & (s >= first) & (s < last))
            if dstate is not None:
                inside = (s < first) & (first == begin)
                tl.store(dstate + (t - begin) * D + d, done.to(dstate.dtype.element_ty), mask=keep & inside)
    sums += program // blocks * (W + 1) * D + d
    for w in tl.static_range(W):
        tl.store(sums + w * D, dweight[w], mask=keep)
    tl.store(sums + W * D, dbias, mask=keep)


class Walk(NamedTuple):
    """How the work is cut."""

    rows: int  # tokens a segment
    segments: int  # of each row of the batch
    blocks: int  # of channels
    channels: int  # a block
    warps: int
    sequences: int  # in each row of the batch
    table: Tensor | None

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor | None, halo: int, rows: int | None = None) -> "Walk":
        """Few programs are given shorter segments, to fill a GPU: 128 tokens and the halo, or 64, 32, 16."""
        B, T, D = x.shape
        channels = min(triton.next_power_of_2(D), 512)
        blocks = triton.cdiv(D, channels)
        steps = 128 if rows is None else rows
        while rows is None and steps > 16 and B * blocks * (T // steps) < 1024:
            steps //= 2
        rows = max(steps - halo, 1)
        N = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        segments = triton.cdiv(T, rows) if cu_seqlens is None else T // rows + N
        table = None if cu_seqlens is None else packed(cu_seqlens, rows, segments, True)[0]
        return cls(rows, segments, blocks, channels, max(1, min(4, channels // 128)), N, table)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    *,
    rows: int | None = None,
) -> Tensor:
    """x [B, T, D], weight [M, D, W], bias [M, D]; M divides B, and row b of x belongs to model b // (B / M).

    initial_state [B N, W - 1, D], with N sequences in each row of x, the same in all (no cu_seqlens: one).
    """
    x, walk = dense(x), Walk.of(x, cu_seqlens, 0, rows)
    B, T, D = x.shape
    y = x.new_empty(x.shape)
    forward_kernel[(B * walk.segments * walk.blocks,)](
        x, weight.contiguous(), _contiguous(bias), _contiguous(initial_state), y, walk.table, cu_seqlens,
        x.stride(0), x.stride(1), T, walk.rows, walk.segments, walk.blocks, B // weight.shape[0], walk.sequences,
        D=D, W=weight.shape[2], BD=walk.channels, SILU=silu, ACC=_accumulator(x), num_warps=walk.warps,
    )  # fmt: skip
    return y


def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    silu: bool,
    *,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial_state."""
    B, T, D = x.shape
    M, _, W = weight.shape
    x, dy, walk = dense(x), dense(dy), Walk.of(x, cu_seqlens, W - 1, rows)
    dx = x.new_empty(x.shape)
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = x.new_empty((M, B // M * walk.segments, W + 1, D), dtype=acc)
    dstate = None
    if initial_state is not None:  # an empty sequence may have no program
        dstate = (torch.empty_like if cu_seqlens is None else torch.zeros_like)(initial_state.contiguous())
    backward_kernel[(B * walk.segments * walk.blocks,)](
        x, weight.contiguous(), _contiguous(bias), _contiguous(initial_state), dy, dx, sums, dstate,
        walk.table, cu_seqlens, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1),
        T, walk.rows, walk.segments, walk.blocks, B // M, walk.sequences,
        D=D, W=W, BD=walk.channels, SILU=silu, ACC=_accumulator(x), num_warps=walk.warps,
    )  # fmt: skip
    total = sums.sum(1)
    dbias = None if bias is None else total[:, W].to(bias.dtype)
    return dx, total[:, :W].mT.to(weight.dtype).contiguous(), dbias, dstate


def dense(x: Tensor) -> Tensor:
    """Neighbouring channels lie side by side; the other strides are free."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _accumulator(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
