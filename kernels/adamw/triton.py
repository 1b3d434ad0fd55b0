"""AdamW for a stack in Triton: one pass over parameters [M, P], gradients and both moments, each read and written once.

    g = factor g (0 in a row that stands still)      m += (1 - b1) (g - m)      v = b2 v + (1 - b2) g^2
    p -= p lr share wd mask;   p -= lr first m / (sqrt(v) / root + eps)

with lr, wd and factor of each row; share, first = share / (1 - b1^n) and root = sqrt(1 - b2^n) are the update's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["P"])
def update_kernel(
    weights, grads, mean, square, mask, lr, decay, factor, pace, P, rest1, b2, rest2, eps, BLOCK: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(P, BLOCK)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    keep = column < P
    at = row * P + column
    f = tl.load(factor + row + column * 0)
    g = tl.load(grads + at, mask=keep & (f != 0.0), other=0.0) * f  # not read where it may be inf: 0 * inf is nan
    m = tl.load(mean + at, mask=keep, other=0.0)
    v = tl.load(square + at, mask=keep, other=0.0)
    m += rest1 * (g - m)
    v = v * b2 + rest2 * (g * g)
    tl.store(mean + at, m, mask=keep)
    tl.store(square + at, v, mask=keep)
    p, rate = tl.load(weights + at, mask=keep, other=0.0), tl.load(lr + row)
    share, first, root = tl.load(pace), tl.load(pace + 1), tl.load(pace + 2)
    p -= p * (rate * share * tl.load(decay + row) * tl.load(mask + column, mask=keep, other=0.0))
    p -= rate * first * (m / (tl.sqrt(v) / root + eps))
    tl.store(weights + at, p, mask=keep & (f != 0.0))


def update(
    params: Tensor,
    grads: Tensor,
    mean: Tensor,
    square: Tensor,
    mask: Tensor,
    *,
    lr: Tensor,
    weight_decay: Tensor,
    factor: Tensor,
    pace: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Moves params, mean and square [M, P]. mask [P]; lr, weight_decay and factor [M], this 0 where nothing moves; pace
    [3], a row of `runners.optim.paces`."""
    (M, P), (b1, b2) = params.shape, betas
    block = 1024
    with torch.cuda.device(params.device) if params.is_cuda else torch.no_grad():
        update_kernel[(M * triton.cdiv(P, block),)](
            params, grads.contiguous(), mean, square, mask, lr, weight_decay, factor, pace.contiguous(), P, 1 - b1, b2,
            1 - b2, eps, BLOCK=block,
        )  # fmt: skip
