"""Short sequences of dynamic linear attention in Triton: all pairs of tiles, with the mask as a matrix.

With s the scale and M the mask, weights times decay (`mask_triton.py`):

    o = (s Q K^T . M) V        dQ = (s dO V^T . M) K        dK = (s V dO^T . M^T) Q        dV = (s K Q^T . M^T) dO
    E^T = s (K Q^T) . (V dO^T)    the transposed gradient of M

o and dQ are one form with other operands. Transposed products are computed anew, never transposed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import half, operands, tile
from mixassay.kernels.dla.heads_triton import load_heads, store_heads
from mixassay.kernels.dla.mask_triton import mask_kernel, rank_kernel, sums

PAIRS = 2**29
"""Numbers of a matrix that are held at a time: with bfloat16, 1 GiB for M and, in the backward, 2 for E."""


@triton.jit(do_not_specialize=["first", "T", "NT", "H", "RX", "RZ"])
def read_kernel(
    x, y, z, M, o, scale, first, T, NT, H, RX, RZ, side,
    X: tl.constexpr, Z: tl.constexpr, BX: tl.constexpr, BZ: tl.constexpr,
    C: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """o_t = scale sum over j of (x_t . y_j) M[t, j] z_j. RX heads share x and y, RZ share z."""
    index = tl.program_id(0).to(tl.int64)
    n = (NT - 1 - index % NT).to(tl.int32)  # those with most to read come first
    head = first + index // NT
    row, h = head // H * T, head % H
    i = tl.arange(0, C)
    M += index // NT * side * side + n * C
    xs = load_heads(x, row + n * C, h // RX, i, T - n * C, H // RX, X, BX).to(DOT)
    out = tl.zeros([C, BZ], dtype=ACC)
    for p in range(n + 1):
        j = p * C
        ys = load_heads(y, row + j, h // RX, i, T - j, H // RX, X, BX).to(DOT)
        zs = load_heads(z, row + j, h // RZ, i, T - j, H // RZ, Z, BZ).to(DOT)
        m = tl.load(M + j.to(tl.int64) * side + i[None, :] * side + i[:, None])
        A = tl.dot(xs, tl.trans(ys), input_precision=PREC, out_dtype=ACC) * m
        out = tl.dot(A.to(DOT), zs, acc=out, input_precision=PREC, out_dtype=ACC)
    store_heads(o, out * scale, row + n * C, h, i, T - n * C, H, Z, BZ)


@triton.jit(do_not_specialize=["first", "T", "NT", "H", "R"])
def key_kernel(
    q, k, v, do, M, E, dk, dv, scale, first, T, NT, H, R, side,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    m = (index % NT).to(tl.int32)
    head = first + index // NT
    row, h = head // H * T, head % H
    i = tl.arange(0, C)
    block = index // NT * side * side + (m * C).to(tl.int64) * side
    at = i[:, None] * side + i[None, :]
    ks = load_heads(k, row + m * C, h // R, i, T - m * C, H // R, K, BK).to(DOT)
    vs = load_heads(v, row + m * C, h, i, T - m * C, H, V, BV).to(DOT)
    dks = tl.zeros([C, BK], dtype=ACC)
    dvs = tl.zeros([C, BV], dtype=ACC)
    for n in range(m, NT):
        t = n * C
        qs = load_heads(q, row + t, h // R, i, T - t, H // R, K, BK).to(DOT)
        dos = load_heads(do, row + t, h, i, T - t, H, V, BV).to(DOT)
        A = tl.dot(ks, tl.trans(qs), input_precision=PREC, out_dtype=ACC) * scale  # [j, t]
        dA = tl.dot(vs, tl.trans(dos), input_precision=PREC, out_dtype=ACC)
        tl.store(E + block + t + at, A * dA)
        w = tl.load(M + block + t + at).to(ACC)
        dvs = tl.dot((A * w).to(DOT), dos, acc=dvs, input_precision=PREC, out_dtype=ACC)
        dks = tl.dot((dA * w).to(DOT), qs, acc=dks, input_precision=PREC, out_dtype=ACC)
    store_heads(dk, dks * scale, row + m * C, h, i, T - m * C, H, K, BK)
    store_heads(dv, dvs, row + m * C, h, i, T - m * C, H, V, BV)


class Plan(NamedTuple):
    """How a call is spread over the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a tile
    rows: int  # of a program of the mask, a multiple of C; fewer where a sequence has fewer
    num_warps: int
    num_stages: int


def tile_beside(width: int, C: int) -> int:
    """Of a tile, where chunks have C tokens. With chunks of 64 no tile is narrower: of 16 columns, the eight warps of
    delta_pairs_triton.py's `column_kernel` take 8 each, which Triton multiplies wrongly in half precision (its issue
    7830): on an H200 gradients of keys were nan or inf, with Triton 3.6."""
    return max(64, tile(width)) if C == 64 else tile(width)


def plan(dtype: torch.dtype, K: int, V: int) -> Plan:
    """A fixed table, not a search: the same call sums in the same order in every process."""
    if half(dtype):
        return Plan(32, 128, 2, 3) if max(K, V) <= 16 else Plan(64, 128, 8 if max(K, V) > 64 else 4, 2)
    exact = operands(dtype)[2] == "ieee"  # without tensor cores, whose tiles want more rows
    return Plan(16, 128, 8, 1) if exact else Plan(32, 128, 4, 1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    scale: float,
    how: Plan | None = None,
) -> Tensor:
    """o; rank_scale and log_decay in the accumulator's dtype or narrower, `until` of the schedule."""
    call = Call(q, k, v, rank_scale, until, log_decay, scale, how)
    o = torch.empty_like(call.v)
    M = call.matrix(call.dot)
    for part in call.parts():
        call.mask(part, M)
        call.read(part, M, call.q, call.k, call.v, o)
    return o


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    gated: bool,
    do: Tensor,
    scale: float,
    how: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, rank_scale, log_decay and, where there is one, of the boundaries' gate."""
    call = Call(q, k, v, rank_scale, until, log_decay, scale, how)
    do = do.to(v.dtype).contiguous()
    alone = call.R == 1  # else the heads that share a key are added
    dq, dk = (call.new(call.B, call.T, call.H, call.K, dtype=q.dtype if alone else call.acc) for _ in range(2))
    dv, dweights = torch.empty_like(call.v), torch.zeros_like(call.rank_scale)
    terms = 3 if gated else 1
    u, columns = call.new(terms, call.N, call.T), call.new(terms, call.N, call.blocks, call.side)
    M, E = call.matrix(call.dot), call.matrix(call.acc)
    for part in call.parts():
        call.mask(part, M)
        call.read(part, M, do, call.v, call.k, dq)
        call.keys(part, M, E, do, dk, dv)
        call.ranks(part, E, dweights, u, columns, gated)
    dg, dgate = sums(u, columns, call.log_decay, call.until, gated)
    if not alone:
        dq, dk = (x.unflatten(2, (-1, call.R)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dweights, dg, dgate


class Call:
    """The sizes of one call, its operands made contiguous, and its launches, for some heads at a time."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rank_scale: Tensor,
        until: Tensor,
        log_decay: Tensor | None,
        scale: float,
        how: Plan | None,
    ) -> None:
        (self.B, self.T, G, self.K), (self.H, self.V) = q.shape, v.shape[2:]
        self.how = how or plan(q.dtype, self.K, self.V)
        self.N, self.R, self.NT = self.B * self.H, self.H // G, triton.cdiv(self.T, self.how.C)
        rows = min(self.how.rows, max(32, self.how.C, triton.next_power_of_2(self.T)))
        self.blocks = triton.cdiv(self.T, rows)
        self.side = self.blocks * rows
        self.heads = min(self.N, max(1, PAIRS // self.side**2))
        self.q, self.k, self.v, self.scale = q.contiguous(), k.contiguous(), v.contiguous(), scale
        DOT, ACC, PREC = operands(q.dtype)
        self.acc = torch.promote_types(q.dtype, torch.float32)
        self.dot = q.dtype if half(q.dtype) else self.acc
        self.rank_scale, self.until = rank_scale.to(self.acc).contiguous(), until.contiguous()
        self.log_decay = None if log_decay is None else log_decay.to(self.acc).contiguous()
        self.tiles: dict[str, Any] = {"C": self.how.C, "DOT": DOT, "ACC": ACC, "PREC": PREC}
        self.tiles |= {"num_warps": self.how.num_warps, "num_stages": self.how.num_stages}
        self.rows = {"SLOTS": rank_scale.shape[3], "ROWS": rows, "DECAY": log_decay is not None}

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.q.new_empty(shape, dtype=dtype or self.acc)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return self.new(self.heads, self.side, self.side, dtype=dtype)

    def parts(self) -> Iterator[tuple[int, int]]:
        """The first head, and how many."""
        for first in range(0, self.N, self.heads):
            yield first, min(self.heads, self.N - first)

    def mask(self, part: tuple[int, int], M: Tensor) -> None:
        first, heads = part
        given = (self.rank_scale, self.until, self.log_decay, M, first, self.T, self.H, self.side)
        mask_kernel[(heads * self.blocks,)](*given, **self.rows, num_warps=1)

    def ranks(
        self, part: tuple[int, int], E: Tensor, dweights: Tensor, u: Tensor, columns: Tensor, gated: bool
    ) -> None:
        first, heads = part
        given = (E, self.rank_scale, self.until, self.log_decay, dweights, u, columns)
        sizes = (first, self.T, self.H, self.N, self.side)
        rank_kernel[(heads * self.blocks,)](*given, *sizes, GATE=gated, **self.rows, num_warps=1)

    def read(self, part: tuple[int, int], M: Tensor, x: Tensor, y: Tensor, z: Tensor, o: Tensor) -> None:
        first, heads = part
        RX, RZ, X, Z = self.H // x.shape[2], self.H // z.shape[2], x.shape[3], z.shape[3]
        sizes = (self.scale, first, self.T, self.NT, self.H, RX, RZ, self.side)
        widths = {"X": X, "Z": Z, "BX": tile_beside(X, self.how.C), "BZ": tile_beside(Z, self.how.C)}
        read_kernel[(heads * self.NT,)](x, y, z, M, o, *sizes, **widths, **self.tiles)

    def keys(self, part: tuple[int, int], M: Tensor, E: Tensor, do: Tensor, dk: Tensor, dv: Tensor) -> None:
        first, heads = part
        sizes = (self.scale, first, self.T, self.NT, self.H, self.R, self.side)
        widths = {
            "K": self.K,
            "V": self.V,
            "BK": tile_beside(self.K, self.how.C),
            "BV": tile_beside(self.V, self.how.C),
        }
        key_kernel[(heads * self.NT,)](self.q, self.k, self.v, do, M, E, dk, dv, *sizes, **widths, **self.tiles)
