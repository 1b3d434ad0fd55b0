"""Dynamic linear attention: the recurrence, the masked matrix and the chunkwise form agree, with all gradients, over a
given schedule; the gate's gradient is the slope of the soft register. float64, 1e-10 of the largest value."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from mixassay.errors import UserError
from mixassay.kernels.dla import register
from mixassay.kernels.dla.op import dla, dla_step
from mixassay.kernels.dla.schedule import make, schedule
from mixassay.kernels.dla.slots import Schedule
from mixassay.kernels.gated_delta_rule import gated_delta_rule
from mixassay.kernels.linear_attention import linear_attention

from .contract import assert_close, error

TAU = torch.tensor([0.7, 0.9, 1.0, 1.2], dtype=torch.float64)
TOL = 1e-10


def inputs(seed: int, T: int, R: int, *, delta: bool, decay: str = "weak", B: int = 2, G: int = 2) -> Any:
    """Segments of seven tokens, noisy; four heads."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    segment = torch.arange(T) // 7
    u = torch.rand(B, T, 4, generator=draw, dtype=torch.float64)
    g = {"none": None, "weak": -0.3 * u, "reset": torch.where(u < 0.1, -torch.inf, torch.where(u < 0.2, -20, -0.1 * u))}
    return {
        "q": normal(B, T, G, 5),
        "k": normalize(normal(B, T, G, 5)[:, segment] + 0.5 * normal(B, T, G, 5), dim=-1),
        "v": normal(B, T, 4, 3)[:, segment] + 0.5 * normal(B, T, 4, 3),
        "rank_scale": softplus(normal(B, T, 4, R)),
        "log_decay": g[decay],
        "beta": 2 * torch.rand(B, T, 4, generator=draw, dtype=torch.float64) if delta else None,
    }


def cut(given: Any, **how: Any) -> tuple[Tensor, Schedule]:
    how = {"threshold": TAU} | how
    return schedule(given["k"], given["v"], given["rank_scale"].shape[-1], log_decay=given["log_decay"], **how)


def values(given: Any, **options: Any) -> dict[str, Tensor]:
    """Output and the gradient of a fixed random projection of it for every input."""
    leaves: Any = {n: x.detach().clone().requires_grad_() for n, x in given.items() if x is not None}
    o = dla(**given | leaves, **options)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad((o * weight).sum(), list(leaves.values()))
    return {"o": o.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


@pytest.mark.parametrize("delta", [False, True], ids=["scalar", "delta"])
@pytest.mark.parametrize("R", range(1, 31))
def test_three_forms_agree(R: int, delta: bool) -> None:
    T = [100, 1, 2, 63, 64, 65, 99][R % 7] if R % 5 else 100
    given = inputs(R, T, R, delta=delta, decay=["none", "weak", "reset"][R % 3], G=[1, 2, 4][R // 3 % 3])
    _, found = cut(given | {"log_decay": None}, rule=["density", "weak", "ward"][R // 2 % 3])
    truth = values(given, schedule=found, backend="reference")
    assert all(x.isfinite().all() for x in truth.values())
    assert_close(values(given, schedule=found), truth, TOL)
    assert_close(values(given, schedule=found, chunk_size=[16, 7, 64, 1][R % 4]), truth, TOL)


@pytest.mark.parametrize("delta", [False, True], ids=["scalar", "delta"])
@pytest.mark.parametrize("decay", ["none", "weak", "reset"])
def test_closed_segments_are_frozen(decay: str, delta: bool) -> None:
    for T, R in ((1, 2), (64, 3), (71, 30)):
        given = inputs(T, T, R, delta=delta, decay=decay)
        _, found = cut(given | {"log_decay": None})
        truth = values(given, schedule=found, scope="segment", backend="reference")
        assert_close(values(given, schedule=found, scope="segment"), truth, TOL)


@pytest.mark.parametrize("delta", [False, True], ids=["scalar", "delta"])
def test_weights_of_one_are_the_base(delta: bool) -> None:
    for rule in ("density", "weak", "ward"):
        given = inputs(3, 90, 4, delta=delta)
        base: Any
        rank_scale, base = torch.ones_like(given["rank_scale"]), {n: x for n, x in given.items() if n != "rank_scale"}
        _, found = cut(given, rule=rule)
        whole = (gated_delta_rule if delta else linear_attention)(**{n: x for n, x in base.items() if x is not None})[0]
        for chunk in (None, 16):
            assert error(dla(**base, rank_scale=rank_scale, schedule=found, chunk_size=chunk), whole) <= TOL


def test_one_slot_and_no_boundary_are_the_base_times_a_weight() -> None:
    for R, tau in ((1, 0.0), (5, 2.1)):
        given = inputs(4, 60, R, delta=False)
        _, found = cut(given, threshold=torch.full((4,), tau))
        whole = linear_attention(given["q"], given["k"], given["v"], given["log_decay"])[0]
        assert error(dla(**given, schedule=found), given["rank_scale"][..., :1] * whole) <= TOL


def test_a_slot_for_every_token_is_a_weight_for_every_distance() -> None:
    given = inputs(5, 30, 30, delta=False, decay="none", G=4)
    _, found = cut(given, threshold=torch.zeros(4))
    at = torch.arange(30)
    weight = given["rank_scale"].transpose(1, 2).gather(3, (at[:, None] - at).clamp(min=0).expand(2, 4, 30, 30))
    scores = torch.einsum("bthk,bshk->bhts", given["q"], given["k"]).tril() * 5**-0.5
    o = torch.einsum("bhts,bshv->bthv", weight * scores, given["v"])
    assert error(dla(**given, schedule=found), o) <= TOL


@pytest.mark.parametrize("delta", [False, True], ids=["scalar", "delta"])
def test_steps_are_the_whole(delta: bool) -> None:
    for scope in ("all", "segment"):
        for decay, R in (("none", 3), ("weak", 8), ("reset", 1)):
            given = inputs(6, 40, R, delta=delta, decay=decay)
            _, found = cut(given | {"log_decay": None})
            o, state = dla(**given, schedule=found, scope=scope), torch.zeros(2, 4, R, 5, 3, dtype=torch.float64)
            for t in range(40):
                now: Any = {n: None if x is None else x[:, t] for n, x in given.items()}
                y, state = dla_step(**now, shift=found.shift[:, t], slots=state, scope=scope)
                assert error(y, o[:, t]) <= TOL


def soft(given: Any, p: Tensor, opening: Tensor, found: Schedule, **options: Any) -> Tensor:
    return dla(**given, schedule=found, gate=p, opening=opening, **options)


@pytest.mark.parametrize("delta", [False, True], ids=["scalar", "delta"])
@pytest.mark.parametrize("rule", ["density", "weak", "ward"])
def test_the_soft_register(rule: Any, delta: bool) -> None:
    given = inputs(7, 40, 4, delta=delta)
    score, found = cut(given, rule=rule)
    opening = register.openings(found, score, rule, given["k"], given["v"])
    at = found.shift >= 0
    assert torch.equal(opening[at], found.shift[at]), "where a boundary is, it is the boundary's own shift"
    hard = dla(**given, schedule=found)
    assert error(soft(given, found.boundary.double(), opening, found), hard) <= TOL
    p = torch.sigmoid((score - TAU) / 0.15).requires_grad_()
    both = [soft(given, p, opening, found, backend=backend) for backend in ("torch", "reference")]
    assert error(*both) <= TOL
    assert error(both[0], hard) > 0.01
    grads = [torch.autograd.grad(o.sin().sum(), p)[0] for o in both]
    assert error(*grads) <= TOL


@pytest.mark.parametrize("delta", [False, True], ids=["scalar", "delta"])
def test_the_gate_has_the_slope_of_the_soft_register(delta: bool) -> None:
    """Without merges, against differences of the soft form at p = b +- h; the form is multilinear in p."""
    given = inputs(8, 24, 24, delta=delta, B=1)
    _, found = cut(given)
    b, opening, h = found.boundary.double(), torch.full_like(found.shift, 23), 1e-3
    gate = torch.rand(b.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(1, 24, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    forms: list[dict[str, Any]] = [{}, {"chunk_size": 7}, {"backend": "reference"}]
    slopes = []
    for options in forms:
        o = dla(**given, schedule=found, gate=gate, **options)
        assert error(o, dla(**given, schedule=found)) <= TOL, "a gate alone changes nothing"
        slopes += torch.autograd.grad((o * weight).sum(), gate)
    for j in range(1, 24):
        for head in range(4):
            moved = torch.zeros_like(b)
            moved[0, j, head] = h
            up, down = (soft(given, b + s * moved, opening, found, backend="reference") for s in (1, -1))
            numeric = ((up - down) * weight).sum() / (2 * h)
            assert all(abs(numeric - slope[0, j, head]) < 1e-9 for slope in slopes)


def test_the_gates_gradient_is_the_same_in_all_forms_where_slots_meet() -> None:
    given = inputs(9, 60, 3, delta=True)
    _, found = cut(given)
    gate = torch.rand(2, 60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = values(given | {"gate": gate}, schedule=found, backend="reference")
    assert truth["dgate"].abs().max() > 0.1
    for chunk in (None, 16):
        assert_close(values(given | {"gate": gate}, schedule=found, chunk_size=chunk), truth, TOL)


@pytest.mark.parametrize("delta", [False, True], ids=["scalar", "delta"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_vmap_is_a_loop(chunk: int | None, delta: bool) -> None:
    """Schedule, gate and output of three models, each with a threshold of its own, and ordinary gradients."""
    members = [inputs(seed, 20, 3, delta=delta) for seed in range(3)]
    names = [n for n, x in members[0].items() if x is not None]
    taus = torch.stack([TAU, TAU - 0.2, TAU + 0.1])

    def run(tau: Tensor, *xs: Tensor) -> Tensor:
        given: Any = dict.fromkeys(members[0], None) | dict(zip(names, xs, strict=True))
        score, found = cut(given, threshold=tau)
        return dla(**given, schedule=found, gate=torch.sigmoid(score - tau), chunk_size=chunk)

    stack = [taus.requires_grad_(), *(torch.stack([m[n] for m in members]).requires_grad_() for n in names)]
    o = torch.func.vmap(run)(*stack)
    grads = torch.autograd.grad(o.sin().sum(), stack)
    for m in range(3):
        alone = [x.detach()[m].requires_grad_() for x in stack]
        y = run(*alone)
        assert error(o[m], y) <= TOL
        for g, own in zip(grads, torch.autograd.grad(y.sin().sum(), alone), strict=True):
            assert error(g[m], own) <= TOL


def test_the_schedule_is_a_torch_operator() -> None:
    given = inputs(10, 20, 3, delta=False)
    k, v, tau = given["k"], given["v"], TAU.expand(2, 4)
    torch.library.opcheck(make, (k, v, tau, None, given["log_decay"], 3, "memory", "ward", False))
    torch.library.opcheck(
        make, (k, v, None, torch.ones(2, 20, 4, dtype=torch.bool), None, 3, "memory", "density", False)
    )


def test_causal_to_the_bit() -> None:
    for delta in (False, True):
        one, other = (inputs(seed, 70, 3, delta=delta) for seed in (11, 12))
        mixed: Any = {n: None if x is None else torch.cat((x[:, :40], other[n][:, 40:]), dim=1) for n, x in one.items()}
        ways: list[tuple[Any, int | None]] = [("all", None), ("all", 16), ("segment", None)]
        for scope, chunk in ways:
            before, after = (dla(**x, schedule=cut(x)[1], scope=scope, chunk_size=chunk) for x in (one, mixed))
            assert torch.equal(before[:, :40], after[:, :40])
            assert not torch.isclose(before[:, 40:], after[:, 40:]).all(-1).any()


@pytest.mark.parametrize("delta", [False, True], ids=["scalar", "delta"])
def test_float32_and_bfloat16(delta: bool) -> None:
    """As near to float64 as the recurrence in float32; half inputs are the float32 result rounded once."""
    given: Any = {
        n: None if x is None else x.float() for n, x in inputs(13, 130, 6, delta=delta, decay="reset").items()
    }
    _, found = cut(given | {"log_decay": None})
    exact: Any = {n: None if x is None else x.double() for n, x in given.items()}
    truth = dla(**exact, schedule=found)
    loop = error(dla(**given, schedule=found, backend="reference"), truth)
    for chunk in (None, 32):
        assert error(dla(**given, schedule=found, chunk_size=chunk), truth) <= 4 * loop + 2e-6
    half: Any = {n: None if x is None else x.bfloat16() for n, x in given.items()}
    o = dla(**half, schedule=found)
    assert o.dtype == torch.bfloat16
    wide: Any = {n: None if x is None else x.float() for n, x in half.items()}
    assert torch.equal(o, dla(**wide, schedule=found).bfloat16())


def test_what_does_not_fit_is_said() -> None:
    given = inputs(0, 4, 3, delta=False)
    _, found = cut(given)
    wrong: list[tuple[Any, str]] = [
        (lambda: dla(**given | {"rank_scale": given["rank_scale"][..., :2]}, schedule=found), "expected rank_scale's"),
        (lambda: dla(**given, schedule=found, scope="slot"), 'unknown scope "slot"'),  # type: ignore[arg-type]
        (lambda: dla(**given, schedule=found, opening=found.shift), "needs a gate"),
        (lambda: cut(given, forced=found.boundary),
         "either a threshold or forced"),
        (lambda: dla(**given | {"beta": given["log_decay"]}, schedule=found, scope="segment", backend="triton"),
         "delta rule, that stop where a slot ends"),
    ]  # fmt: skip
    for call, message in wrong:
        with pytest.raises(UserError, match=message):
            call()
