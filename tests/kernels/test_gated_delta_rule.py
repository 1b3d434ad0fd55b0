"""The gated delta rule: the shared contract, keys that blow the inverse up, and its errors."""

from typing import Any

import pytest
import torch

from mixassay.errors import UserError
from mixassay.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from mixassay.kernels.gated_delta_rule.dense import gated_delta_rule as dense

from . import contract

OP = contract.Operator(gated_delta_rule, gated_delta_rule_step, dense, ("q", "k", "v", "beta", "log_decay"))


@pytest.mark.parametrize("case", list(contract.cases()), ids=str)
def test_recurrent_chunkwise_and_dense_agree(case):
    contract.check_forms_agree(OP, case)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_contract(check):
    check(OP)


@pytest.mark.parametrize("chunk", [8, 32])
def test_unstable_keys_stay_exact(chunk):
    """beta |k|^2 up to 18: states grow without bound, and so do the entries of (I + A)^-1."""
    inputs = OP.make(contract.Case(32, chunk))
    inputs["k"] = inputs["k"] * 3
    truth = contract.values(OP, inputs, "reference")
    assert truth["state"].abs().max() > 1e6
    contract.assert_close(contract.values(OP, inputs, "torch", chunk_size=chunk), truth)


def test_beta_zero_writes_nothing():
    inputs = OP.make(contract.Case(40, 16))
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    _, state = OP.run(inputs, "torch")
    decayed = inputs["log_decay"].sum(1).exp()[..., None, None] * inputs["initial_state"]
    assert contract.error(state, decayed) <= 1e-13


def test_a_unit_key_with_beta_one_is_overwritten():
    """The delta rule's reason to be: the second value under a key replaces the first."""
    k = torch.nn.functional.normalize(torch.tensor([[1.0, 2.0, 2.0]]), dim=-1).expand(1, 2, 1, 3)
    v = torch.tensor([[1.0, 2.0], [5.0, -3.0]]).view(1, 2, 1, 2)
    o, _ = gated_delta_rule(k, k, v, torch.ones(1, 2, 1), scale=1.0)
    assert torch.allclose(o, v, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("beta", (2, 5, 2), r"gated_delta_rule: beta has shape \[2, 5, 2\], expected \[B, T, H\] = \[2, 5, 4\]"),
        ("v", (2, 5, 3, 3), r"G = 2 heads, which must divide the H = 3 heads of v|beta has shape"),
        ("log_decay", (2, 5, 4, 1), r"log_decay has shape \[2, 5, 4, 1\], expected \[B, T, H\]"),
        ("initial_state", (2, 4, 3, 8), r"expected \[B, H, K, V\] = \[2, 4, 8, 3\]"),
    ],
)
def test_a_wrong_shape_is_named(name, shape, message):
    shapes = {"q": (2, 5, 2, 8), "k": (2, 5, 2, 8), "v": (2, 5, 4, 3), "beta": (2, 5, 4)} | {name: shape}
    given: dict[str, Any] = {n: torch.zeros(s) for n, s in shapes.items()}
    with pytest.raises(UserError, match=message):
        gated_delta_rule(**given)
