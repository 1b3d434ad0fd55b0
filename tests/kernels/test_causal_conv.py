"""The short convolution: definition, state hand-over, step, causality, stacks of models, errors."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch

from mixassay.errors import UserError
from mixassay.kernels.causal_conv import causal_conv, causal_conv_step

from .contract import error

TOL = 1e-13


def draw(B=2, T=9, D=6, W=4, bias=True, start=True, dtype=torch.float64, seed=0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (B, T, D), "weight": (D, W)}
    shapes |= {"bias": (D,)} if bias else {}
    shapes |= {"initial_state": (B, W - 1, D)} if start else {}
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for n, s in shapes.items()}


@pytest.mark.parametrize(
    ("T", "W", "bias", "start", "activation"),
    [
        *product((1, 2, 3, 9), (4,), (True, False), (True, False), (None, "silu")),
        *product((1, 5), (1, 2), (True,), (True, False), ("silu",)),
    ],
)
def test_all_forms_agree(T, W, bias, start, activation):
    """Forward, final state and all gradients through both, also when T is shorter than the state."""
    results = []
    for backend in ("torch", "reference"):
        given = draw(T=T, W=W, bias=bias, start=start)
        y, state = causal_conv(**given, activation=activation, backend=backend)
        loss = (y * y).sum() + (state * torch.arange(1.0, state.numel() + 1).view_as(state)).sum()
        results.append([y, state, *torch.autograd.grad(loss, list(given.values()))])
    assert max(error(a, b) for a, b in zip(*results, strict=True)) <= TOL


def test_it_equals_conv1d():
    """A definition from outside: torch's grouped convolution over the padded sequence."""
    x, weight, bias = (t.detach() for t in draw(start=False).values())
    padded = torch.nn.functional.pad(x.mT, (3, 0))
    truth = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=6).mT
    assert error(causal_conv(x, weight, bias)[0], truth) <= TOL


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("W", "start"), [(4, True), (4, False), (1, True)])
def test_packed_is_one_after_the_other(W, start, backend):
    """Sequences shorter than the state among them, and an empty one, which hands on its state."""
    bounds = (0, 1, 3, 3, 14, 16)
    given = draw(B=1, T=16, W=W)
    states = draw(B=5, W=W, seed=1)["initial_state"]
    results = []
    whole: dict[str, Any] = {n: given[n] for n in ("weight", "bias")} | {"activation": "silu"}
    y, last = causal_conv(
        given["x"],
        initial_state=states if start else None,
        cu_seqlens=torch.tensor(bounds),
        backend=backend,
        **whole,
    )
    ys, lasts = [], []
    kept = states if start else torch.zeros_like(states)
    for n, (begin, end) in enumerate(pairwise(bounds)):
        state = kept[n : n + 1]
        if end > begin:
            y_n, state = causal_conv(given["x"][:, begin:end], initial_state=state, backend="reference", **whole)
            ys.append(y_n)
        lasts.append(state)
    for o, state in ((y, last), (torch.cat(ys, 1), torch.cat(lasts))):
        leaves = [given["x"], given["weight"], given["bias"], *([states] if start and W > 1 else [])]
        results.append([o, state, *torch.autograd.grad(o.sin().sum() + state.cos().sum(), leaves)])
    assert max(error(a, b) for a, b in zip(*results, strict=True)) <= TOL


def test_wrong_bounds_and_states_of_packed_sequences_are_named():
    x, weight, cu = torch.zeros(1, 9, 6), torch.zeros(6, 4), torch.tensor([0, 4, 9])
    with pytest.raises(UserError, match=r"initial_state has shape \[1, 3, 6\], expected \[N, W - 1, D\] = \[2, 3, 6\]"):
        causal_conv(x, weight, initial_state=torch.zeros(1, 3, 6), cu_seqlens=cu)
    with pytest.raises(UserError, match="causal_conv: x has B = 2 rows, expected 1"):
        causal_conv(x.expand(2, 9, 6), weight, cu_seqlens=cu)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_two_calls_are_one(cut):
    given = draw()
    x, start = given.pop("x"), given.pop("initial_state")
    whole, last = causal_conv(x, initial_state=start, **given)
    first, state = causal_conv(x[:, :cut], initial_state=start, **given)
    second, state = causal_conv(x[:, cut:], initial_state=state, **given)
    assert error(torch.cat([first, second], dim=1), whole) <= TOL
    assert torch.equal(state, last)


def test_steps_are_the_whole():
    given = {n: t.detach() for n, t in draw().items()}
    whole, last = causal_conv(**given, activation="silu")
    state = given["initial_state"]
    for t in range(9):
        y, state = causal_conv_step(given["x"][:, t], given["weight"], given["bias"], state, activation="silu")
        assert error(y, whole[:, t]) <= TOL
    assert torch.equal(state, last)


def test_causal():
    given = {n: t.detach() for n, t in draw(dtype=torch.float32).items()}
    before, _ = causal_conv(**given)
    given["x"] = given["x"].index_fill(1, torch.tensor([4]), 7.0)
    after, _ = causal_conv(**given)
    changed = (after != before).all(-1).all(0)
    assert changed.tolist() == [False] * 4 + [True] * 4 + [False]


def test_vmap_is_a_loop():
    members = [draw(seed=s) for s in range(3)]
    stack = [torch.stack([m[n].detach() for m in members]).requires_grad_() for n in members[0]]

    def loss(x, weight, bias, initial_state):
        y, state = causal_conv(x, weight, bias, initial_state=initial_state, activation="silu")
        return (y * y).sum() + state.sin().sum()

    together = torch.autograd.grad(torch.func.vmap(loss)(*stack).sum(), stack)
    nested = torch.func.vmap(torch.func.grad(loss, (0, 1, 2, 3)))(*(t.detach() for t in stack))
    for m, member in enumerate(members):
        alone = torch.autograd.grad(loss(**member), list(member.values()))
        assert max(error(a[m], b) for a, b in zip(together, alone, strict=True)) <= TOL
        assert max(error(a[m], b) for a, b in zip(nested, alone, strict=True)) <= TOL


def test_any_strides_and_low_precision():
    given = draw(B=3, dtype=torch.bfloat16)
    plain = {n: t.detach() for n, t in given.items()}
    strided = plain | {"x": plain["x"].transpose(0, 1).contiguous().transpose(0, 1)}
    y, state = causal_conv(**strided)
    assert torch.equal(y, causal_conv(**plain)[0])
    wide, _ = causal_conv(**{n: t.float() for n, t in plain.items()})
    assert torch.equal(y, wide.to(torch.bfloat16))
    assert state.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("x", (2, 6), r"causal_conv: x has shape \[2, 6\], expected \[B, T, D\]"),
        ("weight", (5, 4), r"weight has shape \[5, 4\], expected \[D, W\] = \[6, W\]"),
        ("bias", (5,), r"bias has shape \[5\], expected \[D\] = \[6\]"),
        ("initial_state", (2, 4, 6), r"initial_state has shape \[2, 4, 6\], expected \[B, W - 1, D\] = \[2, 3, 6\]"),
    ],
)
def test_a_wrong_shape_is_named(name, shape, message):
    shapes = {"x": (2, 9, 6), "weight": (6, 4)} | {name: shape}
    given: dict[str, Any] = {n: torch.zeros(s) for n, s in shapes.items()}
    with pytest.raises(UserError, match=message):
        causal_conv(**given)


def test_an_unknown_activation_is_named():
    with pytest.raises(UserError, match='activation "relu", expected None or "silu"'):
        causal_conv(torch.zeros(1, 2, 3), torch.zeros(3, 2), activation="relu")  # type: ignore[arg-type]
