"""One token of linear attention, the gated delta rule and their log-linear forms, in one pass over the state.

A state has L slots S_l [K, V]; without levels L = 1 and t does not matter. At token t, with a the decay, b the write
strength (1 without beta), lambda the level weights and s the scale (Guo et al. 2025):

    all levels below lssb(t) + 1, or L - 1, become it                       then, in every slot:
    S_l <- a S_l - b k (k^T a S_l) (with beta)       S_0 <- S_0 + b k v^T       o = s sum_l lambda_l q^T S_l

A program has K rows and a block of columns of one head, and takes its slots in ascending order. A slot that holds no
tokens is zero: it is not read, and written as zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # numbers of a slot in a program's registers


@triton.jit
def holds(t, l, L: tl.constexpr):
    """Whether slot l holds tokens at token t: bit l - 1 of t, and always in the first slot and the last."""
    return (l == 0) | (l == L - 1) | (((2 * t) >> l) & 1 == 1)


@triton.jit(do_not_specialize=["q_row", "k_row", "v_row", "beta_row", "level_row", "decay_row", "H", "R"])
def step_kernel(
    q, k, v, beta, level_scale, log_decay, slots, position, o, new, scale,
    q_row, k_row, v_row, beta_row, level_row, decay_row, H, R,
    L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (V + BV - 1) // BV
    b, h = program // blocks // H, program // blocks % H
    row, column = tl.arange(0, BK), program % blocks * BV + tl.arange(0, BV)
    keep = (row < K)[:, None] & (column < V)[None, :]
    tile = program // blocks * L * K * V + row[:, None] * V + column[None, :]

    query = tl.load(q + b * q_row + h // R * K + row, mask=row < K, other=0.0).to(ACC)[:, None]
    key = tl.load(k + b * k_row + h // R * K + row, mask=row < K, other=0.0).to(ACC)[:, None]
    value = tl.load(v + b * v_row + h * V + column, mask=column < V, other=0.0).to(ACC)
    if beta is not None:
        strength = tl.load(beta + b * beta_row + h).to(ACC)
        value *= strength
    if log_decay is not None:
        decay = tl.exp(tl.load(log_decay + b * decay_row + h).to(ACC))
    if position is not None:
        t = tl.load(position + b)
    else:
        t = program * 0

    out = tl.zeros([BV], ACC)
    gathered = tl.zeros([BK, BV], ACC)  # from the levels that become a higher one
    for l in range(L):
        S = tl.load(slots + tile + l * K * V, mask=keep & holds(t - 1, l, L), other=0.0).to(ACC)
        if (t > 0) & (l < L - 1) & (((t >> l) << l) == t):
            gathered += S
            S = tl.zeros([BK, BV], ACC)
        else:
            S += gathered
            gathered = tl.zeros([BK, BV], ACC)
        if holds(t, l, L):
            if log_decay is not None:
                S *= decay
            write = tl.where(l == 0, value, 0.0)
            if beta is not None:
                write -= strength * tl.sum(key * S, axis=0)
            S += key * write[None, :]
            read = tl.sum(query * S, axis=0)
            if level_scale is not None:
                read *= tl.load(level_scale + b * level_row + h * L + l).to(ACC)
            out += read
        tl.store(new + tile + l * K * V, S.to(new.dtype.element_ty), mask=keep)
    tl.store(o + program // blocks * V + column, (out * scale).to(o.dtype.element_ty), mask=column < V)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    level_scale: Tensor | None,
    log_decay: Tensor | None,
    slots: Tensor,
    position: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q, k [B, G, K], v [B, H, V], beta and log_decay [B, H], level_scale [B, H, L], slots [B, H, L, K, V], position
    [B] -> o [B, H, V], new slots."""
    B, H, L, K, V = slots.shape
    o, new = v.new_empty(v.shape), slots.new_empty(slots.shape)
    BK = max(16, triton.next_power_of_2(K))
    BV = min(max(16, triton.next_power_of_2(V)), max(16, TILE // BK))
    rows = [None if x is None else _rows(x) for x in (q, k, v, beta, level_scale, log_decay)]
    wide = torch.float64 in (q.dtype, k.dtype, v.dtype, slots.dtype)
    step_kernel[(B * H * triton.cdiv(V, BV),)](
        *rows, slots.contiguous(), position, o, new, scale, *(0 if x is None else x.stride(0) for x in rows),
        H, H // q.shape[1], L=L, K=K, V=V, BK=BK, BV=BV, ACC=tl.float64 if wide else tl.float32, num_warps=4,
    )  # fmt: skip
    return o, new


def _rows(x: Tensor) -> Tensor:
    """As it is if each sequence's numbers lie side by side, as in a part of a wider projection."""
    return x if x[0].is_contiguous() else x.contiguous()
