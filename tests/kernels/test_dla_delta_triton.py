"""The Triton kernels of dynamic linear attention on the delta rule against the masked matrix: in the interpreter, or on
a GPU where there is one."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.errors import UserError
from mixassay.kernels.dla import delta_registered, delta_triton, dense, op
from mixassay.kernels.dla.op import dla
from mixassay.kernels.dla.schedule import schedule
from mixassay.kernels.dla.slots import Schedule, slots

from . import contract
from .test_dla import inputs

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 2e-5) if GPU else (torch.float64, 1e-11)  # there are no float64 kernels for a GPU
LEAVES = ("q", "k", "v", "rank_scale", "beta", "log_decay", "gate")


@dataclass(frozen=True)
class Case:
    T: int
    R: int
    C: int = 16
    decay: str = "weak"
    heads: tuple[int, int] = (1, 2)
    gate: bool = True
    scored: bool = False

    def __str__(self) -> str:
        kind = "scored" if self.scored else "forced"
        return f"T{self.T}-R{self.R}-C{self.C}-{self.decay}-G{self.heads[0]}-{self.gate:d}-{kind}"


CASES = [
    Case(1, 2),
    Case(15, 8, decay="none", heads=(2, 2)),
    Case(33, 2, decay="reset", scored=True),
    Case(48, 1, gate=False),
    Case(63, 8, decay="none", heads=(1, 1), gate=False, scored=True),
    Case(64, 2, heads=(1, 1), scored=True),
    Case(65, 8, decay="reset", heads=(1, 1)),
    Case(130, 2, C=32, decay="none", heads=(1, 1)),
    Case(129, 8, C=64, heads=(1, 1)),
]


def given(case: Case, dtype: torch.dtype = DTYPE) -> tuple[dict[str, Any], Schedule]:
    """Tensors, and boundaries at every seventh token or so, of which some chunks have none; or those of the scores."""
    T, (G, H) = case.T, case.heads
    x: dict[str, Any] = inputs(T, T, case.R, delta=True, decay=case.decay, B=1, G=2)
    x = {n: y if y is None else y[:, :, : G if n in ("q", "k") else H].to(DEVICE, dtype) for n, y in x.items()}
    draw = torch.Generator().manual_seed(T)
    p = torch.rand(1, T, H, generator=draw, dtype=torch.float64)
    x["gate"] = p.to(DEVICE, dtype) if case.gate else None
    if case.scored:
        threshold = torch.full((H,), 1.0, device=DEVICE)
        return x, schedule(x["k"], x["v"], case.R, threshold=threshold, backend="torch")[1]
    near = torch.arange(T)[:, None] % 60 < 40  # so that some tiles lie in one slot
    return x, slots(((torch.rand(T, H, generator=draw) < 0.15) & near)[None].to(DEVICE), case.R)


def truth(x: dict[str, Any], found: Schedule, do: Tensor) -> dict[str, Tensor]:
    """In float64."""
    leaf: dict[str, Any] = {n: None if x[n] is None else x[n].double().requires_grad_() for n in LEAVES}
    q, k, v, weights, beta, g, p = leaf.values()
    o = dense.dla(q, k, v, weights, found, g, beta, 0.3, "all", p, None)
    names = [n for n, y in leaf.items() if y is not None]
    grads = torch.autograd.grad((o * do.double()).sum(), [leaf[n] for n in names])
    return {"o": o.detach(), **dict(zip(names, grads, strict=True))}


def kernels(x: dict[str, Any], found: Schedule, do: Tensor, C: int) -> dict[str, Tensor]:
    how = delta_triton.plan(x["q"].dtype, 64, 64)._replace(C=C, rows=C)
    tensors = (x["q"], x["k"], x["v"], x["rank_scale"], found.until, x["beta"], x["log_decay"])
    torch.use_deterministic_algorithms(True)  # fresh memory is full of NaN, so that what nobody writes is seen
    try:
        o, inverse = delta_triton.forward(*tensors, 0.3, how)
        grads = delta_triton.backward(*tensors, x["gate"] is not None, inverse, do, 0.3, how)
    finally:
        torch.use_deterministic_algorithms(False)
    return {"o": o, **{n: g for n, g in zip(LEAVES, grads, strict=True) if g is not None}}


def upstream(x: dict[str, Any]) -> Tensor:
    shape, draw = x["v"].shape, torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(x["v"].device, x["v"].dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_masked_matrix(case: Case) -> None:
    x, found = given(case)
    do = upstream(x)
    contract.assert_close(kernels(x, found, do, case.C), truth(x, found, do), TOL)


def test_the_cases_have_tiles_of_one_slot_and_slots_that_meet() -> None:
    alone, met = set(), False
    for case in CASES:
        starts, shift = (y.cpu()[0, :, 0] for y in (given(case)[1].starts, given(case)[1].shift))
        for begin in range(0, case.T - case.C, case.C):
            alone.add(not bool(((starts[-1] > begin) & (starts[-1] < begin + case.C)).any()))
        met |= bool(((shift >= 0) & (shift < case.R - 1)).any())
    assert alone == {True, False}
    assert met


def test_nothing_is_read_past_the_end_or_from_the_neighbours() -> None:
    """Inputs that lie in the middle of NaN, cut from wider and longer ones."""
    case = Case(36, 3, heads=(1, 1))
    plain, found = given(case)
    do = upstream(plain)
    x: dict[str, Any] = dict(plain)
    for n in ("q", "k", "v", "rank_scale", "beta", "log_decay"):
        width = (0, 3) if x[n].dim() == 4 else ()
        wide = torch.nn.functional.pad(x[n], (*width, 0, 0, 2, 5), value=torch.nan)
        x[n] = wide[:, 2 : 2 + case.T][..., : plain[n].shape[3]] if width else wide[:, 2 : 2 + case.T]
    contract.assert_close(kernels(x, found, do, 16), kernels(plain, found, do, 16), 0.0)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the mask go through all of their rows, live or not."""
    plan = delta_triton.plan
    monkeypatch.setattr(delta_triton, "plan", lambda *given: plan(*given)._replace(C=16, rows=16))


@pytest.mark.usefixtures("few_rows")
def test_they_are_a_torch_operator() -> None:
    x, found = given(Case(3, 2, heads=(1, 1)))
    q, k, v, weights, beta, g, p = (x[n].requires_grad_() for n in LEAVES)
    torch.library.opcheck(delta_registered.forward, (q, k, v, weights, found.until, beta, g, p, 0.3))


@pytest.mark.usefixtures("few_rows")
def test_models_fold_and_learn_through_the_public_call() -> None:
    """Schedule and output of two models with thresholds of their own, and ordinary gradients, also of the gate."""
    T, members = 20, [given(Case(20, 3, heads=(2, 2)))[0] for _ in range(2)]
    names = [n for n in members[0] if n != "gate"]
    taus = torch.tensor([[0.7, 0.9], [1.0, 1.2]], device=DEVICE, dtype=DTYPE, requires_grad=True)

    def run(backend: str) -> Any:
        def one(tau: Tensor, *xs: Tensor) -> Tensor:
            x: Any = dict(zip(names, xs, strict=True))
            score, cut = schedule(x["k"], x["v"], 3, threshold=tau, log_decay=x["log_decay"], backend="torch")
            return dla(**x, schedule=cut, gate=torch.sigmoid(score - tau), backend=backend)

        return one

    stack = [torch.stack([m[n] for m in members]).requires_grad_() for n in names]
    o = torch.func.vmap(run("triton"))(taus, *stack)
    expected = torch.stack([run("torch")(taus[m], *(x[m] for x in stack)) for m in range(2)])
    assert o.shape == (2, 1, T, 2, 3)
    found, truth = (torch.autograd.grad(y.sin().sum(), [taus, *stack]) for y in (o, expected))
    wanted = {"o": expected.detach(), **dict(zip(["tau", *names], truth, strict=True))}
    contract.assert_close({"o": o.detach(), **dict(zip(["tau", *names], found, strict=True))}, wanted, TOL)


def test_float32_keeps_weak_decays_next_to_strong_ones() -> None:
    x, found = given(Case(34, 3, decay="reset", heads=(1, 1)), torch.float32)
    do = upstream(x)
    contract.assert_close(kernels(x, found, do, 16), truth(x, found, do), 1e-5)


def test_longer_sequences_and_frozen_slots_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = given(Case(3, 2, heads=(1, 1)))
    with pytest.raises(UserError, match="delta rule, that stop where a slot ends"):
        dla(**x, schedule=found, scope="segment", backend="triton")
    monkeypatch.setattr(op, "DELTA_LONGEST", 2)
    with pytest.raises(UserError, match="delta rule up to 2 tokens, not for 3"):
        dla(**x, schedule=found, backend="triton")


@pytest.mark.skipif(not GPU, reason="bfloat16 products need a device")
@pytest.mark.parametrize("T", [256, 1000])
def test_bfloat16_and_reruns_in_a_graph(T: int) -> None:
    draw = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(*shape, generator=draw).to(DEVICE)  # noqa: E731
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1)  # noqa: E731
    q, k = (unit(normal(1, T, 2, 32)).bfloat16() for _ in range(2))
    v, do = (normal(1, T, 2, 64).bfloat16() for _ in range(2))
    x: dict[str, Any] = {"q": q, "k": k, "v": v, "rank_scale": normal(1, T, 2, 8).exp()}
    x |= {"beta": torch.sigmoid(normal(1, T, 2)), "log_decay": -0.1 * torch.sigmoid(normal(1, T, 2))}
    x["gate"] = torch.sigmoid(normal(1, T, 2))
    tau = torch.tensor([0.7, 1.42], device=DEVICE)

    def run() -> tuple[Schedule, Tensor, tuple[Tensor, ...]]:
        leaf: dict[str, Any] = {n: y.detach().requires_grad_() for n, y in x.items()}
        _, found = schedule(k, v, 8, threshold=tau, log_decay=x["log_decay"])
        o = dla(**leaf, schedule=found, scale=0.3)
        return found, o.detach(), torch.autograd.grad(o, [leaf[n] for n in LEAVES], do)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, captured, captured_grads = run()
    graph.replay()
    found, o, grads = run()
    assert torch.equal(captured, o)
    assert all(torch.equal(a, b) for a, b in zip(captured_grads, grads, strict=True))
    expected = truth(x, found, do)
    for name, y in {"o": o, **dict(zip(LEAVES, grads, strict=True))}.items():
        off = (y.double() - expected[name]).norm() / expected[name].norm()
        assert off < 2e-2, (name, float(off))


@pytest.mark.skipif(not GPU, reason="a CPU has no atomics to avoid")
@pytest.mark.parametrize("T", [100, 600])
def test_the_torch_form_reruns_bit_equal(T: int) -> None:
    x, found = given(Case(T, 8, heads=(2, 2)), torch.float32)
    runs = []
    for _ in range(2):
        leaf: dict[str, Any] = {n: y.detach().requires_grad_() for n, y in x.items()}
        o = dla(**leaf, schedule=found, backend="torch")
        runs.append([o, *torch.autograd.grad(o.square().sum(), list(leaf.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
