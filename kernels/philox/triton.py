"""Philox4x32-10 in Triton: the words of `mixassay.draws`, bit for bit, in one launch.

Key = seed; counter = (index low, index high, word // 4, stream).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def block_of(seeds, indices, row, block, stream):
    """Four words each of a row's blocks."""
    seed = tl.load(seeds + row).to(tl.uint64)
    index = tl.load(indices + row)
    c0 = (index & 0xFFFFFFFF).to(tl.uint32) + block.to(tl.uint32) * 0
    c1 = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32) + block.to(tl.uint32) * 0
    return tl.philox(seed, c0, c1, block.to(tl.uint32), block.to(tl.uint32) * 0 + stream.to(tl.uint32), 10)


@triton.jit(do_not_specialize=["n", "start", "stream"])
def words_kernel(seeds, indices, words, stream, n, start, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    pieces = tl.cdiv(tl.cdiv(n, 4), BLOCK)
    row = program // pieces
    block = (program % pieces) * BLOCK + tl.arange(0, BLOCK)
    drawn = block_of(seeds, indices, row, start // 4 + block, stream)
    for j in tl.static_range(4):
        word = block * 4 + j
        tl.store(words + row * n + word, drawn[j].to(tl.int64), mask=word < n)


@triton.jit(do_not_specialize=["size", "stream", "share"])
def keep_kernel(seeds, indices, kept, stream, size, share, BLOCK: tl.constexpr):
    """Two decisions a word."""
    program = tl.program_id(0).to(tl.int64)
    pieces = tl.cdiv(tl.cdiv(size, 8), BLOCK)
    row = program // pieces
    block = (program % pieces) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = block_of(seeds, indices, row, block, stream)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [block, high, low] of the word's number
    low, high = (words & 0xFFFF).to(tl.int32), (words >> 16).to(tl.int32)
    decided = tl.reshape(tl.join(low < share, high < share), [BLOCK * 8])
    at = (program % pieces) * BLOCK * 8 + tl.arange(0, BLOCK * 8)
    tl.store(kept + row * size + at, decided, mask=at < size)


def words(seed: Tensor, index: Tensor, stream: int, n: int, start: int) -> Tensor:
    """int64 [N, n] for seeds and indices [N]."""
    drawn = index.new_empty((len(index), n))
    _launch(words_kernel, (n + 3) // 4, 128, seed, index, drawn, stream, n, start)
    return drawn


def keep(seed: Tensor, index: Tensor, stream: int, size: int, share: int) -> Tensor:
    """bool [M, size]: whether 16 random bits are below `share`."""
    kept = torch.empty((len(seed), size), dtype=torch.bool, device=seed.device)
    _launch(keep_kernel, (size + 7) // 8, 256, seed, index, kept, stream, size, share)
    return kept


def _launch(kernel: Any, blocks: int, block: int, seed: Tensor, index: Tensor, made: Tensor, *numbers: int) -> None:
    if made.numel():
        with torch.cuda.device(seed.device) if seed.is_cuda else torch.no_grad():
            grid = (len(seed) * triton.cdiv(blocks, block),)
            kernel[grid](seed.contiguous(), index.contiguous(), made, *numbers, BLOCK=block)
