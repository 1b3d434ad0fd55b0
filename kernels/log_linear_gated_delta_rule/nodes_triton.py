"""Where the chunks of the log-linear gated delta rule and the nodes of their tree lie, in Triton.

Chunk n reads at each set bit of n one block, the node r = (n without its lower bits): the chunks from r - lowbit(r) to
r - 1, as in a Fenwick tree.
"""

import triton
import triton.language as tl

# Compiled once, whatever the sizes: offsets are multiples of K and V, which are known.
kernel = triton.jit(
    do_not_specialize=["rows", "T", "P", "H", "R", "L", "chunks", "room", "visits", "height", "heights"]
)


@triton.jit
def chunk_of(index, table, ends, T, P, C: tl.constexpr, PACKED: tl.constexpr, DEEP: tl.constexpr):
    """First row of a chunk, tokens from there to its sequence's end, its number in the sequence, the chunks before the
    sequence, and the chunks of the sequence."""
    if PACKED:
        first = tl.load(table + 3 * index)
        if DEEP:
            sequence = tl.load(table + 3 * index + 2) - index
            begin, end = tl.load(ends + sequence), tl.load(ends + sequence + 1)
            n = (first - begin) // C
            count = (end - begin + C - 1) // C
        else:
            end = tl.load(table + 3 * index + 1)
            n = index * 0
            count = n + 1
        left = (end - first).to(tl.int32)
    else:
        n = index % P
        first = index // P * T + n * C
        left = (T - n * C).to(tl.int32)
        count = n * 0 + P
    return first, left, n, index - n, count


@triton.jit
def node_of(height, number, base, room):
    """Where F, g of the `number`-th block of 2^height chunks of a sequence lie. N of a block that ends before chunk r
    lies with chunk r - 1: a right half's is needed no more when that of the pair takes its place."""
    return 2 * (room - (room >> height)) + (base >> height) + number


@triton.jit
def visit_of(n, height, base, visits):
    """Where what chunk n brings to its node at this height lies."""
    return height * visits + (base >> 1) + ((n >> (height + 1)) << height) + n - ((n >> height) << height)


@triton.jit
def height_of(n):
    """The place of the highest bit of a number below 2^24, through the exponent of a float32."""
    return (n.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def bits_of(n):
    """How many bits of a number below 2^31 are set."""
    n = n.to(tl.int32)
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    n = n + (n >> 8)
    return (n + (n >> 16)) & 0x3F


@triton.jit
def pair_of(window, height, chunks, table, ends, T, P, C: tl.constexpr, PACKED: tl.constexpr):
    """Which pair of blocks of 2^height chunks a window of 2^(height + 1) chunk numbers stands for: its number in its
    sequence and the chunks before that, or a negative number. Only pairs that a later chunk follows are needed, so a
    sequence has fewer pairs than windows that end in it."""
    last = tl.minimum(((window + 1) << (height + 1)) - 1, chunks - 1)
    _, _, _, base, count = chunk_of(last, table, ends, T, P, C, PACKED, True)
    pair = window - (base >> (height + 1))
    return tl.where(pair < (count - 1) >> (height + 1), pair, -1), base
