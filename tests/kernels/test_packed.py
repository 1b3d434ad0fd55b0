"""Packed sequences: `cu_seqlens` is one call for each sequence, in every backend, empty ones included."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.gated_delta_rule import gated_delta_rule
from mixassay.kernels.linear_attention import linear_attention

from . import contract

OPS = {"linear_attention": linear_attention, "gated_delta_rule": gated_delta_rule}
BOUNDS = (0, 1, 18, 18, 40, 41)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 5e-5) if GPU else (torch.float64, 1e-11)


def inputs(name: str, start: bool = True) -> dict[str, Any]:
    names = ("q", "k", "v", "log_decay") + (("beta",) if name == "gated_delta_rule" else ())
    maker = contract.Operator(OPS[name], lambda: None, lambda: None, names)  # type: ignore[arg-type]
    made = maker.make(contract.Case(BOUNDS[-1], None, B=1, gate="mixed"), DTYPE)
    states = torch.randn(len(BOUNDS) - 1, 4, 4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    made["initial_state"] = states.to(DTYPE) if start else None
    return {n: None if x is None else x.to(DEVICE).requires_grad_() for n, x in made.items()}


def gradients(o: Tensor, state: Tensor, given: dict[str, Any]) -> list[Tensor]:
    leaves = [x for x in given.values() if x is not None]
    return list(torch.autograd.grad(o.sin().sum() + state.cos().sum(), leaves))


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # by the interpreter
@pytest.mark.parametrize("start", [True, False], ids=["S0", "zero"])
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("name", OPS)
def test_packed_is_one_after_the_other(name, backend, start):
    if backend == "triton":
        pytest.importorskip("triton")
    op, given = OPS[name], inputs(name, start)
    os, states = [], []
    for n, (begin, end) in enumerate(pairwise(BOUNDS)):
        first = given["initial_state"]
        first = None if first is None else first[n : n + 1]
        if end == begin:
            states.append(torch.zeros(1, 4, 4, 3, dtype=DTYPE, device=DEVICE) if first is None else first)
            continue
        tokens = {m: x[:, begin:end] for m, x in given.items() if m != "initial_state"}
        o, state = op(**tokens, initial_state=first, output_final_state=True, backend="reference")
        os.append(o)
        assert state is not None
        states.append(state)
    truth_o, truth_state = torch.cat(os, 1), torch.cat(states)
    truth = [truth_o, truth_state, *gradients(truth_o, truth_state, given)]

    packed = torch.tensor(BOUNDS, device=DEVICE)
    o, state = op(**given, cu_seqlens=packed, output_final_state=True, backend=backend)
    assert state is not None
    found = [o, state, *gradients(o, state, given)]
    contract.assert_close(dict(enumerate(found)), dict(enumerate(truth)), TOL)  # type: ignore[arg-type]
    alone, none = op(**given, cu_seqlens=packed, backend=backend)
    assert none is None
    contract.assert_close({"o": alone}, {"o": o}, 1e-12)


@pytest.mark.parametrize("name", OPS)
def test_wrong_bounds_are_named(name):
    op, given = OPS[name], inputs(name)
    two = {n: x if n == "initial_state" else x.expand(2, *x.shape[1:]) for n, x in given.items()}
    good = torch.tensor(BOUNDS, device=DEVICE)
    fewer = torch.cat([good[:1], good[2:]])
    for wrong, message in (
        (good.int(), r"cu_seqlens has shape \[6\] and dtype torch.int32, expected int64 \[N \+ 1\]"),
        (good[:1], r"cu_seqlens has shape \[1\]"),
        (fewer, r"initial_state has shape \[5, 4, 4, 3\], expected \[N, H, K, V\] = \[4, 4, 4, 3\]"),
    ):
        with pytest.raises(UserError, match=f"{name}: {message}"):
            op(**given, cu_seqlens=wrong)
    with pytest.raises(UserError, match="q has B = 2 rows, expected 1"):
        op(**two, cu_seqlens=good)


@pytest.mark.skipif(GPU, reason="on a GPU the values are checked there, and end the program")
@pytest.mark.parametrize("wrong", [(1, 5, 41), (0, 9, 5, 41), (0, 40)])
def test_wrong_values_are_shown(wrong):
    given = inputs("linear_attention", start=False)
    message = rf"cu_seqlens is \[{', '.join(map(str, wrong))}\], expected to start at 0, never to fall and to end at T"
    with pytest.raises(UserError, match=message):
        linear_attention(**given, cu_seqlens=torch.tensor(wrong))
