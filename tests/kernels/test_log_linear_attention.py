"""Log-linear attention: the shared contract, and what holds for log-linear operators."""

import pytest
import torch

from mixassay.kernels.linear_attention import linear_attention
from mixassay.kernels.linear_attention.dense import linear_attention as parents_dense
from mixassay.kernels.log_linear_attention import log_linear_attention, log_linear_attention_step
from mixassay.kernels.log_linear_attention.dense import log_linear_attention as matrix

from . import contract, log_linear

OP = log_linear.operator(
    log_linear_attention,
    log_linear_attention_step,
    matrix,
    linear_attention,
    parents_dense,
    ("q", "k", "v", "level_scale", "log_decay"),
)


@pytest.mark.parametrize("case", list(contract.cases()), ids=str)
def test_recurrent_chunkwise_and_dense_agree(case):
    contract.check_forms_agree(OP, case)


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # by the interpreter
@pytest.mark.parametrize("check", log_linear.CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_contract(check):
    check(OP)


def test_weights_of_one_are_linear_attention_written_out():
    q, k, v = torch.randn(3, 1, 40, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    o, _ = log_linear_attention(q, k, v, torch.ones(1, 40, 1, 7, dtype=torch.float64), scale=1.0)
    written_out = torch.einsum("btk,bsk->bts", q[:, :, 0], k[:, :, 0]).tril() @ v[:, :, 0]
    assert contract.error(o[:, :, 0], written_out) <= 1e-12
