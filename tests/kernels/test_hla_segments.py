"""The paper's central claim: what a stretch of tokens does can be combined in any bracketing, so the operators can be
scanned in parallel and give the activations of the serial recurrence. Float64."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.kernels.hla.segments import AHLA, HLA2, HLA3, HLA2Paper, neutral

from .contract import TOL, error
from .hla import OPERATORS, make

T = 37
KINDS = {"hla2 as in the paper": HLA2Paper, "hla2": HLA2, "ahla": AHLA, "hla3": HLA3}
DECAYS = ("none", "one", "free", "per token")
CASES = [(name, decay) for name in KINDS for decay in DECAYS if name != "hla2 as in the paper" or decay in DECAYS[:2]]
every = pytest.mark.parametrize(("name", "decay"), CASES, ids=[f"{n}-{d}" for n, d in CASES])


def serial_and_tokens(name: str, decay: str) -> tuple[Tensor, Tensor, list[Any]]:
    """The recurrence's outputs, the queries, and the segment of each token; both [B, T, H, .]."""
    kind = KINDS[name]
    op = next(op for op in OPERATORS if op.name == name.split()[0])
    gate = {"none": "none", "one": "inner", "free": "heads", "per token": "both"}[decay]
    inputs = make(op, T, heads=(2, 2), dims=(4, 3), gate=gate)
    if decay == "one":
        inputs["log_decay"] = inputs["log_decay"][0, 0].clone()
    o, _ = op.call(**inputs, scale=1.0, backend="reference")
    q, k, v = (inputs[n] for n in "qkv")
    inner = inputs.get("log_decay", torch.zeros(2)).expand(2, T, 2)
    outer = inputs["outer_log_decay"].expand(2, T, 2) if "outer_log_decay" in inputs else op.power * inner
    gates = [inner] if kind is HLA2Paper else [inner, outer]
    factors = [g.exp()[..., None, None].double() for g in gates]
    return o, q, [kind.token(q[:, t], k[:, t], v[:, t], *(f[:, t] for f in factors)) for t in range(T)]


def left(xs: list[Any]) -> Any:
    a = xs[0]
    for b in xs[1:]:
        a = a.then(b)
    return a


def right(xs: list[Any]) -> Any:
    b = xs[-1]
    for a in xs[-2::-1]:
        b = a.then(b)
    return b


def balanced(xs: list[Any]) -> Any:
    return xs[0] if len(xs) == 1 else balanced(xs[: len(xs) // 2]).then(balanced(xs[len(xs) // 2 :]))


def at_random(xs: list[Any], draw: random.Random | None = None) -> Any:
    draw = draw or random.Random(0)
    if len(xs) == 1:
        return xs[0]
    cut = draw.randrange(1, len(xs))
    return at_random(xs[:cut], draw).then(at_random(xs[cut:], draw))


def exclusive_scan(xs: list[Any]) -> list[Any]:
    """Blelloch (1990): up a binary tree with what each half does, then down with what comes before it."""
    n = 1 << (len(xs) - 1).bit_length()
    none = neutral(xs[0])
    tree = (
        [none] * n + xs + [none] * (n - len(xs))
    )  # node i has the children 2 i and 2 i + 1; the leaves are n ... 2 n - 1
    for i in range(n - 1, 0, -1):
        tree[i] = tree[2 * i].then(tree[2 * i + 1])
    before = [none] * (2 * n)
    for i in range(1, n):
        before[2 * i], before[2 * i + 1] = before[i], before[i].then(tree[2 * i])
    return before[n : n + len(xs)]


@every
def test_any_bracketing_of_segments_is_the_serial_recurrence(name, decay):
    truth, q, tokens = serial_and_tokens(name, decay)
    bracketings: list[Callable[[list[Any]], Any]] = [left, right, balanced, at_random]
    for bracketing in bracketings:
        for t in (0, 1, 2, 15, T - 1):
            assert error(bracketing(tokens[: t + 1]).read(q[:, t]), truth[:, t]) <= TOL


@every
def test_an_exclusive_blelloch_scan_of_segments_is_the_serial_recurrence(name, decay):
    truth, q, tokens = serial_and_tokens(name, decay)
    states = [before.then(token) for before, token in zip(exclusive_scan(tokens), tokens, strict=True)]
    o = torch.stack([state.read(q[:, t]) for t, state in enumerate(states)], dim=1)
    assert error(o, truth) <= TOL


@every
def test_all_parts_of_a_segment_are_associative_and_neutral_is_neutral(name, decay):
    _, _, tokens = serial_and_tokens(name, decay)
    a, b, c = left(tokens[:5]), left(tokens[5:6]), left(tokens[6:20])
    none = neutral(a)
    for x, y in ((a.then(b).then(c), a.then(b.then(c))), (none.then(c), c), (c.then(none), c)):
        for field, found, truth in zip(x._fields, x, y, strict=True):
            assert error(found, truth) <= 1e-13, field
