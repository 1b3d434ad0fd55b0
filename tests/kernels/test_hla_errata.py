"""docs/hla-errata.md, number by number: what the paper prints is computed here, and differs; the right form is ours.

Small examples are scalars, q = k = v = 1 and decays of 1/2, where float64 is exact. Others are random, in float64.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mixassay.kernels import hla
from mixassay.kernels.hla.segments import HLA3
from mixassay.kernels.linear_attention import linear_attention

from .contract import TOL, error

N, K, V, HALF = 24, 4, 3, 0.5
_draw = torch.Generator().manual_seed(0)
Q, KEYS = (torch.randn(N, K, generator=_draw, dtype=torch.float64) / 2 for _ in range(2))
VALUES = torch.randn(N, V, generator=_draw, dtype=torch.float64)
ONES = (torch.ones(3, 1, dtype=torch.float64),) * 3

Rows = tuple[Tensor, ...]  # q, k [n, K] and v [n, V]


def ours(op: Callable[..., Any], rows: Rows, decay: float = 1.0, **options: Any) -> Tensor:
    if decay < 1:
        options["log_decay"] = torch.tensor([decay], dtype=torch.float64).log()
    o, _ = op(*(x[None, :, None] for x in rows), scale=1.0, **options)
    return o[0, :, 0]


def differ(x: Tensor, y: Tensor) -> bool:
    return error(x, y) > 0.05


def scores(rows: Rows) -> Tensor:
    return (rows[0] @ rows[1].T).tril()


RANDOM: Rows = (Q, KEYS, VALUES)


# 1: the serial form of hla2 with decay


def serial(rows: Rows, g: float, of_G: float, of_C: float, ridge: float = 0.0) -> Tensor:
    """Algorithm 1: o = q (S + ridge I) C - q G, with G <- of_G G + k (k^T of_C C)."""
    q, k, v = rows
    S, C, G = (x.new_zeros(q.shape[1], n) for x, n in ((k, k.shape[1]), (q, v.shape[1]), (k, v.shape[1])))
    o = []
    for t in range(len(q)):
        G = of_G * G + torch.outer(k[t], k[t] @ (of_C * C))
        S = g * S + torch.outer(k[t], k[t])
        C = g * C + torch.outer(q[t], v[t])
        o.append(q[t] @ S @ C + ridge * q[t] @ C - q[t] @ G)
    return torch.stack(o)


def test_1_algorithm_1_takes_away_too_much():
    printed, right = serial(ONES, HALF, HALF, 1), serial(ONES, HALF, HALF**2, HALF)
    assert printed.flatten().tolist() == [1, 5 / 4, 17 / 16]
    assert right.flatten().tolist() == [1, 7 / 4, 35 / 16]
    assert error(ours(hla.hla2, ONES, HALF), right) <= TOL

    assert differ(serial(RANDOM, 0.9, 0.9, 1), ours(hla.hla2, RANDOM, 0.9))
    assert error(serial(RANDOM, 0.9, 0.81, 0.9), ours(hla.hla2, RANDOM, 0.9)) <= TOL
    assert error(serial(RANDOM, 1, 1, 1), ours(hla.hla2, RANDOM)) <= TOL


def test_1_what_algorithm_1_computes():
    """Pairs with the query before the key keep a weight, g^(2t - i - j) - g^(t - 1 - j), where none should be."""
    g, t, i, j = 0.9, *torch.meshgrid(*[torch.arange(N)] * 3, indexing="ij")
    kept = torch.where((i <= t) & (j <= t), g ** (2 * t - i - j).double(), 0)
    weight = kept - torch.where((j < i) & (i <= t), g ** (t - 1 - j).double(), 0)
    X = Q @ KEYS.T
    found = torch.einsum("tij,ti,ji,jv->tv", weight, X, X, VALUES)
    assert error(serial(RANDOM, g, g, 1), found) <= TOL


# 2: the associative operator of hla2 with decay

Segment = tuple[Tensor, ...]


def tokens(rows: Rows, g: float, kind: str) -> list[Segment]:
    """Paper's tuples: (S, C, G, rho) for hla2, (R, P, E, rho) for ahla."""
    out: list[Segment] = []
    for q, k, v in zip(*rows, strict=True):
        kv, rho = torch.outer(k, v), torch.tensor(g, dtype=torch.float64)
        if kind == "hla2":
            out.append((torch.outer(k, k), torch.outer(q, v), torch.zeros_like(kv), rho))
        else:
            out.append((torch.outer(k, q), kv, (q @ k) * kv, rho))
    return out


def hla2_then(a: Segment, b: Segment, power: int) -> Segment:
    """The printed operator has power 1: rho_B G_A."""
    rho = b[3]
    return rho * a[0] + b[0], rho * a[1] + b[1], rho**power * a[2] + b[2] + b[0] @ (rho * a[1]), a[3] * rho


def folds(xs: list[Segment], then: Callable[[Segment, Segment], Segment]) -> tuple[Segment, Segment]:
    """From the left and from the right."""
    return reduce(then, xs), reduce(lambda b, a: then(a, b), reversed(xs))


def test_2_the_decayed_operator_of_section_4_2_is_not_associative():
    read = lambda x: (x[0] @ x[1] - x[2]).item()  # noqa: E731
    small = tokens(ONES, HALF, "hla2")
    assert [read(x) for x in folds(small, lambda a, b: hla2_then(a, b, 1))] == [33 / 16, 35 / 16]
    assert [read(x) for x in folds(small, lambda a, b: hla2_then(a, b, 2))] == [35 / 16, 35 / 16]

    for power, same in ((1, False), (2, True)):
        left, right = folds(tokens(RANDOM, 0.9, "hla2"), lambda a, b, p=power: hla2_then(a, b, p))  # type: ignore[misc]
        assert (error(left[2], right[2]) <= TOL) == same
        assert (error(Q[-1] @ (left[0] @ left[1] - left[2]), ours(hla.hla2, RANDOM, 0.9)[-1]) <= TOL) == same


def test_2_one_token_at_a_time_it_is_not_algorithm_1_either():
    stepwise = serial(ONES, HALF, HALF, HALF)  # what the printed operator does to one token after another
    assert stepwise.flatten().tolist() == [1, 7 / 4, 33 / 16]
    assert differ(stepwise, serial(ONES, HALF, HALF, 1))


# 3: the associative operator of ahla with decay


def ahla_then(a: Segment, b: Segment, faded: bool) -> Segment:
    """The printed operator fades R."""
    rho = b[3]
    return (rho if faded else 1) * a[0] + b[0], rho * a[1] + b[1], rho * a[2] + b[2] + b[0] @ (rho * a[1]), a[3] * rho


def test_3_the_decayed_scan_of_ahla_must_not_fade_R():
    small = tokens(ONES, HALF, "ahla")
    assert [x[2].item() for x in folds(small, lambda a, b: ahla_then(a, b, True))] == [11 / 4, 21 / 8]
    assert [x[2].item() for x in folds(small, lambda a, b: ahla_then(a, b, False))] == [11 / 4, 11 / 4]
    assert error(ours(hla.ahla, ONES, HALF)[-1], torch.tensor(11 / 4)) <= TOL

    for faded, same in ((True, False), (False, True)):
        right = folds(tokens(RANDOM, 0.9, "ahla"), lambda a, b, f=faded: ahla_then(a, b, f))[1]  # type: ignore[misc]
        assert (error(Q[-1] @ right[2], ours(hla.ahla, RANDOM, 0.9)[-1]) <= TOL) == same


# 4, 5: the figures of the chunkwise forms


def second_chunk(rows: Rows, cut: int, figure: str) -> tuple[Tensor, Tensor]:
    """The outputs after `cut` as drawn, and the term that is missing."""
    a, b = tuple(x[:cut] for x in rows), tuple(x[cut:] for x in rows)
    (q, k, v), W = b, scores(b)
    if figure == "1C":
        S, F = a[1].T @ a[1], (scores(a) @ a[1]).T @ a[2]
        return q @ F + (W @ W.T).tril() @ v, (q @ S @ q.T).tril() @ v
    P, E = a[1].T @ a[2], a[1].T @ scores(a) @ a[2]
    own = (q * k).sum(-1, keepdim=True)
    earlier = W.tril(-1) @ q @ P  # q_t R_{<t} P, with R the sum of k q^T
    return q @ E + earlier + W @ W @ v, own * (q @ P)


def test_4_figure_1C_lacks_the_new_queries_seen_by_the_old_keys():
    assert [x.item() for x in second_chunk(tuple(x[:2] for x in ONES), 1, "1C")] == [2, 1]
    assert ours(hla.hla2, ONES)[1].item() == 3
    drawn, missing = second_chunk(RANDOM, 13, "1C")
    assert differ(drawn, ours(hla.hla2, RANDOM)[13:])
    assert error(drawn + missing, ours(hla.hla2, RANDOM)[13:]) <= TOL


def test_5_figure_2C_needs_R_with_the_token_itself():
    assert [x.item() for x in second_chunk(tuple(x[:2] for x in ONES), 1, "2C")] == [2, 1]
    assert ours(hla.ahla, ONES)[1].item() == 3
    drawn, missing = second_chunk(RANDOM, 13, "2C")
    assert differ(drawn, ours(hla.ahla, RANDOM)[13:])
    assert error(drawn + missing, ours(hla.ahla, RANDOM)[13:]) <= TOL


# 6: third order


def algorithm_3(rows: Rows, g: float = 1.0) -> Tensor:
    q, k, v = rows
    S, R, P = k.new_zeros(k.shape[1], k.shape[1]), k.new_zeros(k.shape[1], k.shape[1]), k.T @ v * 0
    G1, G2, G3 = P, P, P
    o = []
    for t in range(len(q)):
        seen = R @ k[t]
        G1 = g * G1 + torch.outer(k[t], seen @ P)
        G2 = g * G2 + torch.outer(S @ q[t], q[t] @ P)
        G3 = g * G3 + torch.outer(S @ seen, v[t])
        S, R, P = (g * M + torch.outer(x[t], y[t]) for M, x, y in ((S, k, k), (R, q, q), (P, k, v)))
        o.append(q[t] @ (S @ R @ P - G1 - G2 - G3))
    return torch.stack(o)


def test_6_algorithm_3_is_another_operator_than_theorem_7_1_says():
    assert algorithm_3(ONES).flatten().tolist() == [1, 5, 12]
    assert ours(hla.hla3, ONES).flatten().tolist() == [1, 5, 14]

    W = scores(RANDOM)
    assert error(ours(hla.hla3, RANDOM), (W @ W.T).tril() @ W @ VALUES) <= TOL
    assert differ(algorithm_3(RANDOM), ours(hla.hla3, RANDOM))
    assert error(algorithm_3(RANDOM), ours(hla.hla3_paper, RANDOM)) <= TOL
    assert differ(algorithm_3(RANDOM, 0.9), ours(hla.hla3, RANDOM, 0.9))


def test_6_it_sums_what_has_its_latest_token_twice():
    i, u, j = torch.meshgrid(*[torch.arange(N)] * 3, indexing="ij")
    latest = torch.maximum(torch.maximum(i, u), j)
    twice = (i == latest).long() + (u == latest) + (j == latest) >= 2
    X = Q @ KEYS.T
    for t in (0, 1, 7, N - 1):
        weight = (twice & (latest <= t)).double()
        o = torch.einsum("iuj,i,ui,uj,jv->v", weight, X[t], X, X, VALUES)
        assert error(ours(hla.hla3_paper, RANDOM)[t], o) <= TOL


# 7 to 10: sizes and costs


def test_7_causal_third_order_segments_are_matrices():
    """Section 7.3 takes maps of K^3 V numbers to be the price of exactness."""
    q, k, v = Q[0], KEYS[0], VALUES[0]
    one = torch.ones(1, 1, dtype=torch.float64)
    parts = HLA3.token(q, k, v, one, one)
    assert max(x.numel() for x in parts.then(parts)) == K * max(K, V)


def flops(f: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops()


def test_8_figures_1B_and_2B_cost_the_cube_of_the_length_as_drawn():
    """Twice the length: eight times the work for W W^T, four times for kappa = W K first."""

    def drawn(n: int) -> int:
        W, v = torch.zeros(n, n), torch.zeros(n, 8)
        return flops(lambda: (W @ W.T).tril() @ v)

    def reassociated(n: int) -> int:
        W, q, k, v = torch.zeros(n, n), *torch.zeros(3, n, 8)
        return flops(lambda: (q @ (W @ k).T).tril() @ v)

    assert round(drawn(1024) / drawn(512), 1) == 7.9
    assert reassociated(1024) / reassociated(512) == 4


def test_9_every_token_meets_the_state_not_every_chunk():
    """The printed cost N C (d + dv) + M (d^2 + d dv), M = N / C chunks, counts products with states once a chunk."""
    n, d = 512, 16
    x = torch.zeros(1, n, 1, d)
    count = {C: flops(lambda C=C: hla.hla2(x, x, x, chunk_size=C)) for C in (16, 32)}  # type: ignore[misc]
    within_chunks = {C: 8 * n * C * d for C in count}
    assert {C: count[C] - within_chunks[C] for C in count} == dict.fromkeys(count, 8 * n * d**2)


def test_10_the_output_is_as_wide_as_v():
    """Section 3 says n x d."""
    assert ours(hla.hla2, RANDOM).shape == (N, V) != (N, K)


# 11: the ridge


def test_11_the_ridge_of_algorithm_1_decays_otherwise():
    rows, g, ridge = RANDOM, 0.9, 0.3
    decay = torch.tensor([[[g]]], dtype=torch.float64).log().expand(1, N, 1)
    q, v = Q[None, :, None], VALUES[None, :, None]
    added = {p: ridge * linear_attention(q, q, v, p * decay, scale=1.0)[0][0, :, 0] for p in (1, 2)}
    plain = ours(hla.hla2, rows, g)
    assert error(serial(rows, g, g * g, g, ridge), plain + added[1]) <= TOL
    assert error(ours(hla.hla2, rows, g, ridge=ridge), plain + added[2]) <= TOL
    assert error(serial(rows, 1, 1, 1, ridge), ours(hla.hla2, rows, ridge=ridge)) <= TOL
