"""Linear attention with scalar decay: the shared contract, and its errors."""

from typing import Any

import pytest
import torch

from mixassay.errors import UserError
from mixassay.kernels.linear_attention import linear_attention, linear_attention_step
from mixassay.kernels.linear_attention.dense import linear_attention as dense

from . import contract

OP = contract.Operator(linear_attention, linear_attention_step, dense, ("q", "k", "v", "log_decay"))


@pytest.mark.parametrize("case", list(contract.cases()), ids=str)
def test_recurrent_chunkwise_and_dense_agree(case):
    contract.check_forms_agree(OP, case)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_contract(check):
    check(OP)


def test_many_chunks_go_block_after_block():
    """More chunks than one block holds, with the state handed on between blocks."""
    inputs = OP.make(contract.Case(100, 2))
    truth = contract.values(OP, inputs, "reference")
    contract.assert_close(contract.values(OP, inputs, "torch", chunk_size=2), truth)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (2, 5, 8), r"linear_attention: q has shape \[2, 5, 8\], expected \[B, T, G, K\]"),
        ("k", (2, 5, 2, 7), r"k has shape \[2, 5, 2, 7\], expected \[B, T, G, K\] = \[2, 5, 2, 8\]"),
        ("v", (2, 6, 4, 3), r"v has shape \[2, 6, 4, 3\], expected \[B, T, H, V\] = \[2, 5, H, V\]"),
        ("v", (2, 5, 3, 3), r"G = 2 heads, which must divide the H = 3 heads of v"),
        ("log_decay", (2, 5, 2), r"log_decay has shape \[2, 5, 2\], expected \[B, T, H\] = \[2, 5, 4\]"),
        ("initial_state", (2, 4, 3, 8), r"expected \[B, H, K, V\] = \[2, 4, 8, 3\]"),
    ],
)
def test_a_wrong_shape_is_named(name, shape, message):
    shapes = {"q": (2, 5, 2, 8), "k": (2, 5, 2, 8), "v": (2, 5, 4, 3)} | {name: shape}
    given: dict[str, Any] = {n: torch.zeros(s) for n, s in shapes.items()}
    with pytest.raises(UserError, match=message):
        linear_attention(**given)


def test_other_wrong_arguments_are_named():
    x = torch.zeros(2, 5, 2, 8)
    with pytest.raises(UserError, match=r"k has dtype torch.int64, expected a floating type"):
        linear_attention(x, x.long(), x)
    with pytest.raises(UserError, match="chunk_size = 0, expected at least 1"):
        linear_attention(x, x, x, chunk_size=0)
    with pytest.raises(UserError, match="T = 0, expected at least 1"):
        linear_attention(x[:, :0], x[:, :0], x[:, :0])
    with pytest.raises(UserError, match=r"linear_attention_step: state has shape \[2, 2, 8\]"):
        linear_attention_step(x[:, 0], x[:, 0], x[:, 0], None, torch.zeros(2, 2, 8))
