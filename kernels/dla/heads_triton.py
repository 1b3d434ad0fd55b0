"""Rows of one head in tensors [tokens, heads, width], in Triton."""

import triton
import triton.language as tl

from mixassay.kernels.common.triton import load_rows, store_rows


@triton.jit
def load_heads(x, row, h, i, left, H, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows `row` + i of head h, zeros for i >= left and in columns past WIDTH: [i, BLOCK]."""
    return load_rows(x + (row * H + h) * WIDTH, i, left, tl.arange(0, BLOCK), H * WIDTH, WIDTH, BLOCK)


@triton.jit
def store_heads(x, rows, row, h, i, left, H, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    store_rows(x + (row * H + h) * WIDTH, rows, i, left, tl.arange(0, BLOCK), H * WIDTH, WIDTH, BLOCK)
