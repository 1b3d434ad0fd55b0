"""The step kernel against one token of each definition: in the interpreter, or on a GPU where there is one."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.errors import UserError
from mixassay.kernels import use_backend
from mixassay.kernels.common.fenwick import FenwickState
from mixassay.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from mixassay.kernels.linear_attention import linear_attention, linear_attention_step
from mixassay.kernels.log_linear_attention import reference as log_linear_attention
from mixassay.kernels.log_linear_attention.op import log_linear_attention_step
from mixassay.kernels.log_linear_gated_delta_rule import reference as log_linear_gated_delta_rule
from mixassay.kernels.log_linear_gated_delta_rule.op import log_linear_gated_delta_rule_step
from mixassay.kernels.recurrent_step import registered

from . import contract

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 1e-5) if GPU else (torch.float64, 1e-12)  # there are no float64 kernels for a GPU
POSITIONS = (0, 1, 2, 3, 4, 7, 8, 12, 16, 31, 32, 1000)  # of the sequences of a batch
SIZES = (((1, 1), (3, 5)), ((1, 3), (20, 18)), ((2, 4), (16, 40)))  # (G, H), (K, V)


@pytest.fixture(autouse=True)
def poisoned():
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(B: int, heads: tuple[int, int], dims: tuple[int, int], L: int | None, beta: bool, gate: bool) -> list[Any]:
    """q, k, v, beta, level_scale, log_decay, slots, position; keys of length below 1, beta in (0, 2)."""
    g = torch.Generator().manual_seed(B + dims[1])
    (G, H), (K, V) = heads, dims
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE)  # noqa: E731
    k = torch.nn.functional.normalize(normal(B, G, K), dim=-1)
    strength = 2 * normal(B, H).sigmoid() if beta else None
    decay = -normal(B, H).abs() if gate else None
    q, v, slots = normal(B, G, K), normal(B, H, V), normal(B, H, L or 1, K, V)
    if L is None:
        return [q, k, v, strength, None, decay, slots, None]
    position = torch.tensor(POSITIONS[:B], device=DEVICE)
    return [q, k, v, strength, normal(B, H, L), decay, filled(slots, position, 0.0), position]


def filled(slots: Tensor, position: Tensor, other: float) -> Tensor:
    """`other` in the slots that hold no tokens after `position` of them."""
    L = slots.shape[2]
    slots = slots.clone()
    for b, p in enumerate(position.tolist()):
        for l in range(L):
            if p == 0 or not (l in (0, L - 1) or (p - 1) >> (l - 1) & 1):
                slots[b, :, l] = other
    return slots


def truth(given: list[Any], scale: float) -> tuple[Tensor, Tensor]:
    """One token of the definition, in float64."""
    wide: list[Any] = [x.double() if x is not None and x.is_floating_point() else x for x in given]
    tokens: list[Any] = [None if x is None else x.unsqueeze(1) for x in wide[:6]]
    q, k, v, beta, levels, decay = tokens
    slots, position = wide[6:]
    if position is None:
        options: Any = {"initial_state": slots[:, :, 0], "output_final_state": True, "scale": scale}
        options["backend"] = "reference"
        if beta is None:
            o, state = linear_attention(q, k, v, decay, **options)
        else:
            o, state = gated_delta_rule(q, k, v, beta, decay, **options)
        assert state is not None
        return o[:, 0], state.unsqueeze(2)
    start = FenwickState(slots, position)
    if beta is None:
        o, last = log_linear_attention.log_linear_attention(q, k, v, levels, decay, scale, start)
    else:
        o, last = log_linear_gated_delta_rule.log_linear_gated_delta_rule(q, k, v, beta, levels, decay, scale, start)
    return o[:, 0], last.slots


def check(given: list[Any]) -> None:
    o, slots = registered.step(*given, 0.3)
    true_o, true_slots = truth(given, 0.3)
    contract.assert_close({"o": o, "slots": slots}, {"o": true_o, "slots": true_slots}, TOL)


@pytest.mark.parametrize(("heads", "dims"), SIZES)
@pytest.mark.parametrize(("beta", "gate"), [*product((True, False), repeat=2)])
def test_one_state(heads, dims, beta, gate):
    check(draw(2, heads, dims, None, beta, gate))


@pytest.mark.parametrize(("L", "beta", "gate"), [(1, True, True), (2, False, True), (4, True, False), (12, True, True)])
def test_levels(L, beta, gate):
    """Sequences at different places, of more tokens than the slots have levels among them."""
    check(draw(len(POSITIONS), (1, 2), (3, 5), L, beta, gate))


def test_slots_without_tokens_are_not_read():
    given = draw(len(POSITIONS), (1, 2), (3, 5), 6, True, True)
    expected = registered.step(*given, 0.3)
    slots, position = given[6:]
    started = (position > 0).view(-1, 1, 1, 1, 1)
    poison = torch.where(started, filled(slots, position, torch.nan), slots)
    assert poison.isnan().any()
    found = registered.step(*given[:6], poison, position, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_parts_of_a_wider_projection():
    given = draw(3, (1, 2), (20, 18), 4, True, True)
    expected = registered.step(*given, 0.3)
    apart = lambda x: torch.nn.functional.pad(x.flatten(1), (3, 5), value=torch.nan)[:, 3:-5].view(x.shape)  # noqa: E731
    views = [apart(x) for x in given[:6]]
    assert not views[0].is_contiguous()
    found = registered.step(*views, given[6].mT.contiguous().mT, given[7], 0.3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_opcheck():
    for L, beta in ((None, False), (3, True)):
        torch.library.opcheck(registered.step, (*draw(2, (1, 2), (3, 5), L, beta, True), 0.3))


def test_vmap_is_a_loop():
    given = draw(4, (1, 2), (3, 5), 3, True, True)
    stack = [torch.stack([x, x.flip(0)]) for x in given]
    together = torch.func.vmap(lambda *xs: registered.step(*xs, 0.3))(*stack)
    for m in range(2):
        alone = registered.step(*(x[m] for x in stack), 0.3)
        assert all(torch.equal(x[m], y) for x, y in zip(together, alone, strict=True))


STEPS: dict[str, tuple[Any, str]] = {
    "linear_attention": (linear_attention_step, "qkvg"),
    "gated_delta_rule": (gated_delta_rule_step, "qkvbg"),
    "log_linear_attention": (log_linear_attention_step, "qkvlg"),
    "log_linear_gated_delta_rule": (log_linear_gated_delta_rule_step, "qkvblg"),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_step_functions_use_it(name, monkeypatch):
    """Three tokens through the public function, with either backend."""
    step, letters = STEPS[name]
    levels = "l" in letters
    ends: dict[Any, Any] = {}
    calls: list[str] = []
    kernel = registered.step
    monkeypatch.setattr(registered, "step", lambda *xs: calls.append(name) or kernel(*xs))
    for backend in ("torch", "triton"):
        q, k, v, beta, level_scale, decay, slots, position = draw(3, (1, 2), (3, 5), 3 if levels else None, True, True)
        tokens = {"q": q, "k": k, "v": v, "b": beta, "l": level_scale, "g": decay}
        state: Any = FenwickState(slots, position) if levels else slots[:, :, 0]
        with use_backend(backend):
            for t in range(3):
                o, state = step(*(tokens[n] * 0.8**t for n in letters), state, scale=0.3)
                ends[backend, t] = o
        slots, position = state if levels else (state, torch.zeros(()))
        ends |= {(backend, "slots"): slots, (backend, "position"): position}
    assert calls == [name] * 3
    found, expected = ({n: x for (b, n), x in ends.items() if b == form} for form in ("triton", "torch"))
    contract.assert_close(found, expected, TOL)


def test_it_is_for_inference():
    q, k, v, _, _, decay, slots, _ = draw(1, (1, 1), (3, 5), None, False, True)
    with use_backend("triton"):
        with pytest.raises(UserError, match="the step kernel is for inference"):
            linear_attention_step(q.requires_grad_(), k, v, decay, slots[:, :, 0])
        with torch.no_grad():
            linear_attention_step(q, k, v, decay, slots[:, :, 0])
