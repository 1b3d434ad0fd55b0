"""The Triton kernels of dynamic linear attention against the masked matrix: in the interpreter, or on a GPU where there
is one. Both ways of reading the past: all pairs of tiles, and the tree of states that long sequences have."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.kernels.dla import dense, pairs_triton, registered, triton
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


@dataclass(frozen=True)
class Case:
    T: int
    R: int
    tree: bool
    decay: str = "weak"
    heads: tuple[int, int] = (1, 2)
    gate: bool = True
    often: bool = False

    def __str__(self) -> str:
        form = "tree" if self.tree else "pairs"
        return f"T{self.T}-R{self.R}-{form}-{self.decay}-G{self.heads[0]}-{self.gate:d}{self.often:d}"


CASES = [
    Case(1, 2, tree=False),
    Case(15, 3, tree=False, decay="none", heads=(2, 2)),
    Case(33, 4, tree=False, decay="reset"),
    Case(32, 1, tree=False, gate=False),
    Case(20, 9, tree=False, decay="none", heads=(1, 1), gate=False),
    Case(140, 30, tree=False, heads=(1, 1), often=True),
    Case(17, 2, tree=True, decay="reset", heads=(1, 1)),
    Case(40, 3, tree=True, heads=(2, 2)),
    Case(70, 4, tree=True, decay="none", heads=(1, 1)),
    Case(84, 2, tree=True, heads=(1, 1)),
    Case(50, 2, tree=True, decay="none", gate=False),
    Case(70, 30, tree=True, heads=(1, 1), often=True),
]


def given(case: Case, dtype: torch.dtype = DTYPE) -> tuple[dict[str, Any], Schedule]:
    """Six boundaries, most of them late, so that slots meet and tiles are found in one after others were not. Or one at
    every token, where the slots that meet are drawn: rows of a tile see many starts, and not the same."""
    T, (G, H) = case.T, case.heads
    x = inputs(T, T, case.R, delta=False, decay=case.decay, B=1, G=2)
    del x["beta"]
    x = {n: y if y is None else y[:, :, : G if n in ("q", "k") else H].to(DEVICE, dtype) for n, y in x.items()}
    draw = torch.Generator().manual_seed(T)
    x["gate"] = torch.rand(1, T, H, generator=draw, dtype=torch.float64).to(DEVICE, dtype) if case.gate else None
    boundary = torch.zeros(1, T, H, dtype=torch.bool)
    for h in range(H):
        boundary[0, [int(T * (h + at) / (8 + h)) for at in (3.2, 4, 5, 5.5, 6, 7)], h] = True
    if case.often:
        score = torch.rand(1, T, H, generator=draw, dtype=torch.float64).to(DEVICE)
        return x, slots(torch.ones_like(boundary).to(DEVICE), case.R, score=score)
    return x, slots(boundary.to(DEVICE), case.R)


def truth(x: dict[str, Any], found: Schedule, do: Tensor) -> dict[str, Tensor]:
    """In float64."""
    leaf: dict[str, Any] = {n: None if y is None else y.double().requires_grad_() for n, y in x.items()}
    g, p = leaf["log_decay"], leaf["gate"]
    q, k, v, weights = (leaf[n] for n in ("q", "k", "v", "rank_scale"))
    o = dense.dla(q, k, v, weights, found, g, None, 0.3, "all", p, None)
    names = [n for n, y in leaf.items() if y is not None]
    grads = torch.autograd.grad((o * do.double()).sum(), [leaf[n] for n in names])
    return {"o": o.detach(), **dict(zip(names, grads, strict=True))}


def kernels(x: dict[str, Any], found: Schedule, do: Tensor, tree: bool) -> dict[str, Tensor]:
    tensors = [x["q"], x["k"], x["v"], x["rank_scale"], found.starts, found.until, x["log_decay"]]
    form: Any = triton if tree else pairs_triton
    how = form.plan(x["q"].dtype, 64, 64)._replace(C=16, **({"dense": 0} if tree else {"rows": 32}))
    if not tree:
        del tensors[4]
    torch.use_deterministic_algorithms(True)  # fresh memory is full of NaN, so that what nobody writes is seen
    try:
        o = form.forward(*tensors, 0.3, how)
        grads = form.backward(*tensors, x["gate"] is not None, do, 0.3, how)
    finally:
        torch.use_deterministic_algorithms(False)
    named = zip(("q", "k", "v", "rank_scale", "log_decay", "gate"), grads, strict=True)
    return {"o": o, **{n: g for n, g in named if g is not None}}


def upstream(x: dict[str, Any]) -> Tensor:
    shape, draw = x["v"].shape, torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(x["v"].device, x["v"].dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_masked_matrix(case: Case) -> None:
    x, found = given(case)
    do = upstream(x)
    contract.assert_close(kernels(x, found, do, case.tree), truth(x, found, do), TOL)


def test_the_cases_read_nodes_of_several_tiles_also_late() -> None:
    """Of pairs of tiles of 16, some are found in one slot at once, some only after slots met, some never."""
    first = set()
    for case in CASES:
        if case.tree and not case.often:
            starts = given(case)[1].starts.cpu()[0]
            for begin in range(0, case.T - 32, 32):
                seen = [bool(((s > begin) & (s < begin + 32)).any()) for s in starts[begin + 32 :: 16, 0]]
                first.add("at once" if seen and not seen[0] else "late" if not all(seen) else "never")
    assert first == {"at once", "late", "never"}


def test_nothing_is_read_past_the_end_or_from_the_neighbours() -> None:
    """Inputs that lie in the middle of NaN, cut from wider and longer ones."""
    case = Case(36, 3, tree=True, heads=(1, 1))
    plain, found = given(case)
    do = upstream(plain)
    x: dict[str, Any] = dict(plain)
    for n in ("q", "k", "v", "rank_scale", "log_decay"):
        width = (0, 3) if x[n].dim() == 4 else ()
        wide = torch.nn.functional.pad(x[n], (*width, 0, 0, 2, 5), value=torch.nan)
        x[n] = wide[:, 2 : 2 + case.T][..., : plain[n].shape[3]] if width else wide[:, 2 : 2 + case.T]
    contract.assert_close(kernels(x, found, do, True), kernels(plain, found, do, True), 0.0)


def test_they_are_a_torch_operator() -> None:
    x, found = given(Case(3, 2, tree=False, heads=(1, 1)))
    names = ("q", "k", "v", "rank_scale", "log_decay", "gate")
    q, k, v, weights, g, p = (x[n].requires_grad_() for n in names)
    torch.library.opcheck(registered.forward, (q, k, v, weights, found.starts, found.until, g, p, 0.3))


def test_models_fold_and_learn_through_the_public_call() -> None:
    """Schedule and output of two models with thresholds of their own, and ordinary gradients, also of the gate."""
    T, members = 12, [given(Case(12, 3, tree=False, heads=(2, 2)))[0] for _ in range(2)]
    names = [n for n in members[0] if n != "gate"]
    taus = torch.tensor([[0.7, 0.9], [1.0, 1.2]], device=DEVICE, dtype=DTYPE, requires_grad=True)

    def run(backend: str) -> Any:
        def one(tau: Tensor, *xs: Tensor) -> Tensor:
            x: Any = dict(zip(names, xs, strict=True))
            score, cut = schedule(x["k"], x["v"], 3, threshold=tau, log_decay=x["log_decay"], backend=backend)
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
    x, found = given(Case(34, 3, tree=True, decay="reset", heads=(1, 1)), torch.float32)
    do = upstream(x)
    contract.assert_close(kernels(x, found, do, True), truth(x, found, do), 3e-6)


@pytest.mark.skipif(not GPU, reason="bfloat16 products need a device")
@pytest.mark.parametrize("T", [256, 3000])
def test_bfloat16_and_reruns_in_a_graph(T: int) -> None:
    draw = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(*shape, generator=draw).to(DEVICE)  # noqa: E731
    q, k, v = (normal(1, T, 2, 64).bfloat16() for _ in range(3))
    x: dict[str, Any] = {"q": q, "k": k, "v": v, "rank_scale": normal(1, T, 2, 8).exp(), "gate": normal(1, T, 2)}
    x["log_decay"] = -0.1 * torch.rand(1, T, 2, generator=draw).to(DEVICE)
    tau, do = torch.tensor([0.7, 1.42], device=DEVICE), normal(1, T, 2, 64).bfloat16()

    def run() -> tuple[Schedule, Tensor, tuple[Tensor, ...]]:
        leaf: dict[str, Any] = {n: y.detach().requires_grad_() for n, y in x.items()}
        _, found = schedule(k, v, 8, threshold=tau, log_decay=x["log_decay"])
        o = dla(**leaf, schedule=found, scale=0.3)
        return found, o.detach(), torch.autograd.grad(o, list(leaf.values()), do)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, captured, captured_grads = run()
    graph.replay()
    found, o, grads = run()
    assert torch.equal(captured, o)
    assert all(torch.equal(a, b) for a, b in zip(captured_grads, grads, strict=True))
    expected = truth(x, found, do)
    for name, y in {"o": o, **dict(zip(x, grads, strict=True))}.items():
        off = (y.double() - expected[name]).norm() / expected[name].norm()
        assert off < 2e-2, (name, float(off))
