"""Parameters of M models in Triton: from rows [M, P], a model each, to blocks [M, size], a parameter each.

A row has its parameters one after another, so that an update is one pass. Kernels want those of all models side by
side, and would each copy what they use, forward and backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["P"])
def unpack_kernel(rows, starts, sizes, blocks, P, BLOCK: tl.constexpr):
    column, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = column < P
    start, size = tl.load(starts + column, mask=inside, other=0), tl.load(sizes + column, mask=inside, other=0)
    at = start.to(tl.int64) * tl.num_programs(1) + row * size + (column - start)
    tl.store(blocks + at, tl.load(rows + row * P + column, mask=inside), mask=inside)


def places(sizes: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 [P] each: for every number of a row, where its parameter starts and how long it is."""
    length = torch.tensor(sizes, device=device)
    start = length.cumsum(0) - length
    return start.repeat_interleave(length).int(), length.repeat_interleave(length).int()


def unpack(rows: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """[M P], for rows [M, P]: block after block."""
    (M, P), blocks = rows.shape, rows.new_empty(rows.numel())
    with torch.cuda.device(rows.device) if rows.is_cuda else torch.no_grad():
        unpack_kernel[(triton.cdiv(P, BLOCK), M)](rows.contiguous(), starts, sizes, blocks, P, BLOCK=BLOCK)
    return blocks
