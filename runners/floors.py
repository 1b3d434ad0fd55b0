"""The least time that an operator can take: the work that it cannot avoid, over what the device can do.

Two terms, and the larger counts: bytes, each input read once and each output written once, over the rate of a copy;
and the floating-point operations of the chunkwise form (chunks of C = 64 tokens) over the rate of a matrix product.
Both rates are measured in the process that is judged. FLOPs per token and head, keys K and values V wide, n = half of
log2(T / C), the mean number of inter-chunk levels that a token sees:

    linear_attention              2C(K+V) + 4KV                  backward 10KV + 6CK + 4CV
    gated_delta_rule              6CK + 4CV + 6KV + C^2/3        backward 16KV + 18CK + 10CV + 4C^2
    log_linear_attention          2C(K+V) + 2KV(1+n)             backward 6CK + 4CV + 6KV + 4KVn
    log_linear_gated_delta_rule   8CK + 4CV + 2.3C^2 + 2KV + 6KVn     backward 24CK + 10CV + 10C^2 + 6KV + 18KVn
    softmax_attention             T(K+V), half of all pairs      backward 2.5 times as much
    hla2                          linear_attention of widths (K, K) and (K, V)
    ahla                          linear_attention of (K, V) twice, the products q.k once
    hla3                          linear_attention of (K, K), (K, V) and again (K, V), the products q.k of two once
    dla                           log_linear_attention, n the mean number of slots closed before a token's chunk; and
                                  its schedule, forward only: a chunk's k.k and v.v, k and v against the open segment's
                                  state and into it, which is linear_attention's forward

The backward recomputes what it needs, which is counted. A kernel that stores more than its results is slower than
this; none is faster.
"""

import math
from typing import NamedTuple

from mixassay.runners.operators import REGIME, SLOTS

C = 64


class Work(NamedTuple):
    """Per token and head."""

    flops: float
    bytes: float


class Rates(NamedTuple):
    """What the device was measured to do."""

    bytes_per_s: float
    flops_per_s: float


def ms(work: Work, rates: Rates, token_heads: int) -> float:
    return 1e3 * token_heads * max(work.bytes / rates.bytes_per_s, work.flops / rates.flops_per_s)


def forward(op: str, T: int, K: int, V: int, *, width: int = 2, gates: int = 0) -> Work:
    """`width` bytes for each number of q, k, v and o; `gates` bytes in all for the decay, beta and level weights."""

    def linear(K: int, V: int) -> float:
        return 2 * C * (K + V) + 4 * K * V

    n, slots = _levels(T), _slots(T)
    flops = {
        "linear_attention": linear(K, V),
        "hla2": linear(K, K) + linear(K, V),
        "ahla": 2 * linear(K, V) - 2 * C * K,
        "hla3": linear(K, K) + 2 * linear(K, V) - 2 * C * K,
        "dla": 2 * C * (K + V) + 2 * K * V * (1 + slots) + linear(K, V),
        "gated_delta_rule": 6 * C * K + 4 * C * V + 6 * K * V + C**2 / 3,
        "log_linear_attention": 2 * C * (K + V) + 2 * K * V * (1 + n),
        "log_linear_gated_delta_rule": 8 * C * K + 4 * C * V + 2.3 * C**2 + 2 * K * V + 6 * K * V * n,
        "softmax_attention": T * (K + V),
    }
    return Work(flops[op], width * 2 * (K + V) + gates)


def backward(op: str, T: int, K: int, V: int, *, width: int = 2, gates: int = 0) -> Work:
    """Reads q, k, v, the output's gradient and the gates; writes the gradients of all inputs."""

    def linear(K: int, V: int) -> float:
        return 10 * K * V + 6 * C * K + 4 * C * V

    n, slots = _levels(T), _slots(T)
    flops = {
        "linear_attention": linear(K, V),
        "hla2": linear(K, K) + linear(K, V),
        "ahla": 2 * linear(K, V) - 2 * C * K,
        "hla3": linear(K, K) + 2 * linear(K, V) - 2 * C * K,
        "dla": 6 * C * K + 4 * C * V + 6 * K * V + 4 * K * V * slots,
        "gated_delta_rule": 16 * K * V + 18 * C * K + 10 * C * V + 4 * C**2,
        "log_linear_attention": 6 * C * K + 4 * C * V + 6 * K * V + 4 * K * V * n,
        "log_linear_gated_delta_rule": 24 * C * K + 10 * C * V + 10 * C**2 + 6 * K * V + 18 * K * V * n,
        "softmax_attention": 2.5 * T * (K + V),
    }
    return Work(flops[op], width * (2 * (K + V) + 2 * K + V) + 2 * gates)


def _levels(T: int) -> float:
    return max(0.0, math.log2(T / C) / 2)


def _slots(T: int) -> float:
    """One a regime, until there are as many as slots."""
    regimes = max(0, T - C) / REGIME
    return regimes / 2 if regimes <= SLOTS else SLOTS - SLOTS**2 / (2 * regimes)
