"""What each operator of higher-order linear attention must and must not notice. Float64."""

import pytest
import torch
from torch import Tensor

from mixassay.kernels.hla import hla2
from mixassay.kernels.linear_attention import linear_attention
from mixassay.mixers.parts.rotary import rotate

from .contract import TOL, Inputs, error
from .hla import OPERATORS, Operator, make

T = 37
every = pytest.mark.parametrize("op", OPERATORS, ids=str)
backends = pytest.mark.parametrize("backend", ["reference", "torch"])


def run(op: Operator, inputs: Inputs, **changed: Tensor) -> Tensor:
    """With scale 1, in chunks of 8 tokens."""
    return op.call(**inputs | changed, scale=1.0, chunk_size=8)[0]


@every
@backends
def test_all_ones_count_index_tuples(op, backend):
    """With q = k = v = 1 the output is the number of tuples that are summed: by hand, for four tokens."""
    one = torch.ones(1, 4, 1, 1, dtype=torch.float64)
    o, _ = op.call(one, one, one, scale=1.0, backend=backend)
    counts = {
        "hla2": [1, 3, 6, 10],  # i <= j <= t
        "hla2_prefix": [1, 4, 9, 16],  # i, j <= t
        "ahla": [1, 3, 6, 10],  # j <= i <= t
        "hla3": [1, 5, 14, 30],  # i, j <= u <= t
        "hla3_paper": [1, 5, 12, 22],  # i, u, j <= t, the latest at least twice
    }
    assert o.flatten().tolist() == counts[op.name]


@every
def test_the_first_token_reads_itself_alone(op):
    inputs = make(op, T, heads=(4, 4))
    q, k, v = (inputs[n][:, 0] for n in "qkv")
    assert error(run(op, inputs)[:, 0], (q * k).sum(-1, keepdim=True) ** op.degree * v) <= TOL


@every
def test_the_degree_is_that_of_the_name(op):
    inputs = make(op, T)
    q, k, v = (inputs[n] for n in "qkv")
    p = op.degree
    assert error(run(op, inputs, q=2 * q, k=3 * k, v=5 * v), 2**p * 3**p * 5 * run(op, inputs)) <= TOL
    assert error(op.call(**inputs, scale=0.5)[0], 0.5**p * run(op, inputs)) <= TOL


@every
def test_q_and_k_may_be_turned_together_and_scaled_against_each_other(op):
    inputs = make(op, T)
    q, k = inputs["q"], inputs["k"]
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    assert error(run(op, inputs, q=q @ turn, k=k @ turn), run(op, inputs)) <= TOL
    assert error(run(op, inputs, q=4 * q, k=k / 4), run(op, inputs)) <= TOL


@every
def test_rotary_positions_matter_by_their_differences(op):
    inputs = make(op, T)
    rotated = []
    for start in (0, 11):
        at = start + torch.arange(T, dtype=torch.float64)
        rotated.append(run(op, inputs, **{n: rotate(inputs[n], at, 10.0) for n in "qk"}))
    assert error(rotated[1], rotated[0]) <= TOL
    assert error(rotated[0], run(op, inputs)) > 0.1


@every
def test_which_signs_are_seen(op):
    """Keys that only shape the metric S have no sign; where a key also addresses a value, k and v may flip together."""
    inputs = make(op, T)
    k, v = inputs["k"], inputs["v"]
    sign = torch.where(torch.rand(2, T, 2, 1, generator=torch.Generator().manual_seed(3)) < 0.5, 1.0, -1.0).double()
    same = {"k": error(run(op, inputs, k=sign * k), run(op, inputs)) <= TOL}
    same["k, v"] = error(run(op, inputs, k=sign * k, v=sign * v), run(op, inputs)) <= TOL
    second = op.name.startswith("hla2")
    third = op.name.startswith("hla3")
    assert same == {"k": second, "k, v": third}


@pytest.mark.parametrize("op", [op for op in OPERATORS if op.metric], ids=str)
def test_a_ridge_adds_a_multiple(op):
    inputs = make(op, T)
    plain, some, more = (op.call(**inputs, ridge=r)[0] for r in (0.0, 0.4, 4.0))
    assert error(more - plain, 10 * (some - plain)) <= TOL
    assert error(some, plain) > 0.01


def test_the_ridge_of_hla2_is_linear_attention_of_queries_to_queries():
    inputs = make(OPERATORS[0], T, heads=(2, 2))
    added = hla2(**inputs, ridge=0.4)[0] - hla2(**inputs)[0]
    q, v, outer = inputs["q"], inputs["v"], inputs["outer_log_decay"]
    assert error(added, 0.4 * linear_attention(q, q, v, outer, scale=1 / 4)[0]) <= TOL


def test_hla2_with_a_metric_of_one_is_linear_attention_of_queries_to_queries():
    """K basis keys first, seen by queries 0, then keys 0: from there on S = I."""
    inputs = make(OPERATORS[0], T, heads=(2, 2), gate="none")
    q, k = inputs["q"].clone(), torch.zeros_like(inputs["k"])
    q[:, :4] = 0
    k[:, :4] = torch.eye(4, dtype=torch.float64).unsqueeze(1)
    o = run(OPERATORS[0], inputs, q=q, k=k)
    assert error(o, linear_attention(q, q, inputs["v"], scale=1.0)[0]) <= TOL


def test_hla2_weighs_a_tokens_own_value_by_a_sum_of_squares():
    inputs = make(OPERATORS[0], T, B=1, heads=(1, 1), dims=(4, 1), gate="none")
    q, k = inputs["q"][0, :, 0], inputs["k"][0, :, 0]
    alone = torch.eye(T, dtype=torch.float64)  # value 1 at one token: T columns instead of T calls
    M = hla2(inputs["q"], inputs["k"], alone[None, :, None, :], scale=1.0)[0][0, :, 0]
    assert error(M.diagonal(), (q @ k.T).tril().square().sum(-1)) <= TOL
    assert M.min() < 0, "off the diagonal weights have any sign: a ratio needs a feature map"
