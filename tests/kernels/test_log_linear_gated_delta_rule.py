"""The log-linear gated delta rule: the shared contract, log-linear operators', and the delta rule's own tests."""

import pytest
import torch

from mixassay.kernels.gated_delta_rule import gated_delta_rule
from mixassay.kernels.gated_delta_rule.dense import gated_delta_rule as parents_dense
from mixassay.kernels.log_linear_gated_delta_rule import log_linear_gated_delta_rule, log_linear_gated_delta_rule_step
from mixassay.kernels.log_linear_gated_delta_rule.dense import log_linear_gated_delta_rule as matrix

from . import contract, log_linear

OP = log_linear.operator(
    log_linear_gated_delta_rule,
    log_linear_gated_delta_rule_step,
    matrix,
    gated_delta_rule,
    parents_dense,
    ("q", "k", "v", "beta", "level_scale", "log_decay"),
)


@pytest.mark.parametrize("case", list(contract.cases()), ids=str)
def test_recurrent_chunkwise_and_dense_agree(case):
    contract.check_forms_agree(OP, case)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # by the interpreter
@pytest.mark.parametrize("check", log_linear.CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_contract(check):
    check(OP)


@pytest.mark.parametrize("chunk", [8, 32])
def test_unstable_keys_stay_exact(chunk):
    """beta |k|^2 up to 18: states grow without bound, and so do the entries of (I + A)^-1 and of the transitions."""
    inputs = OP.make(contract.Case(32, chunk))
    inputs["k"] = inputs["k"] * 3
    truth = contract.values(OP, inputs, "reference")
    assert truth["state"].abs().max() > 1e6
    contract.assert_close(contract.values(OP, inputs, "torch", chunk_size=chunk), truth)


def test_beta_zero_writes_nothing():
    given = OP.without_state(contract.Case(40, 16, start=False)) | {"beta": torch.zeros(2, 40, 4)}
    o, final = OP.public(**given, output_final_state=True)
    assert not o.any()
    assert not final.slots.any()


def test_orthonormal_keys_are_recalled_exactly():
    """Eight keys with beta 1; asked for the first, the answer is its value times the weight of its level."""
    k = torch.cat([torch.eye(8), torch.eye(8)[:1]]).view(1, 9, 1, 8)
    v = torch.randn(1, 9, 1, 3, generator=torch.Generator().manual_seed(0))
    level_scale = torch.arange(1.0, 6.0).expand(1, 9, 1, 5)
    beta = torch.ones(1, 9, 1).index_fill(1, torch.tensor(8), 0)
    o, _ = log_linear_gated_delta_rule(k, k, v, beta, level_scale, scale=1.0)
    assert torch.allclose(o[:, 8], 5 * v[:, 0], atol=1e-6)
