"""The Triton kernels of dynamic linear attention against the masked matrix: in the interpreter, or on a GPU where there
is one. All ways of reading the past: all pairs of tiles, and the states of slots and the tree of long sequences."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.kernels.dla import dense, pairs_triton, registered, slot_states_triton, triton
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
    states: int | None = None  # room a tile: None for all pairs, 0 for the tree
    decay: str = "weak"
    heads: tuple[int, int] = (1, 2)
    gate: bool = True
    often: bool = False
    life: int = 256  # tiles that read one state

    def __str__(self) -> str:
        form = {None: "pairs", 0: "tree"}.get(self.states, f"states{self.states}")
        return f"T{self.T}-R{self.R}-{form}-{self.decay}-G{self.heads[0]}-{self.gate:d}{self.often:d}{self.life}"


CASES = [
    Case(1, 2),
    Case(15, 3, decay="none", heads=(2, 2)),
    Case(33, 4, decay="reset"),
    Case(32, 1, gate=False),
    Case(20, 9, decay="none", heads=(1, 1), gate=False),
    Case(140, 30, heads=(1, 1), often=True),
    Case(17, 2, states=0, decay="reset", heads=(1, 1)),
    Case(40, 3, states=0, heads=(2, 2)),
    Case(70, 4, states=0, decay="none", heads=(1, 1)),
    Case(84, 2, states=0, heads=(1, 1)),
    Case(50, 2, states=0, decay="none", gate=False),
    Case(70, 30, states=0, heads=(1, 1), often=True),
    Case(17, 2, states=3, decay="reset", heads=(1, 1)),
    Case(40, 3, states=3, heads=(2, 2)),
    Case(70, 4, states=3, decay="none", heads=(1, 1)),
    Case(84, 2, states=3, heads=(1, 1)),
    Case(100, 3, states=4, heads=(1, 1), life=2),
    Case(64, 1, states=1, gate=False, heads=(1, 1)),
    Case(40, 5, states=6, heads=(1, 1), often=True),
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


def kernels(x: dict[str, Any], found: Schedule, do: Tensor, states: int | None, life: int = 256) -> dict[str, Tensor]:
    tensors = [x["q"], x["k"], x["v"], x["rank_scale"], found.starts, found.until, x["log_decay"]]
    pairs = states is None
    form: Any = pairs_triton if pairs else triton
    sizes = {"rows": 32} if pairs else {"dense": 0, "states": states, "life": life}
    how = form.plan(x["q"].dtype, 64, 64)._replace(C=16, **sizes)
    if pairs:
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
    contract.assert_close(kernels(x, found, do, case.states, case.life), truth(x, found, do), TOL)


def test_the_cases_read_nodes_of_several_tiles_also_late() -> None:
    """Of pairs of tiles of 16, some are found in one slot at once, some only after slots met, some never."""
    first = set()
    for case in CASES:
        if case.states == 0 and not case.often:
            starts = given(case)[1].starts.cpu()[0]
            for begin in range(0, case.T - 32, 32):
                seen = [bool(((s > begin) & (s < begin + 32)).any()) for s in starts[begin + 32 :: 16, 0]]
                first.add("at once" if seen and not seen[0] else "late" if not all(seen) else "never")
    assert first == {"at once", "late", "never"}


@pytest.mark.parametrize(("life", "room"), [(5, 11), (2, 15)])
def test_states_are_the_slots_that_tiles_find(life: int, room: int) -> None:
    """Each once for `life` tiles, with its tiles and the one that it goes into. The second head has 12."""
    T, C, R, NT = 70, 16, 4, 5
    boundary = torch.zeros(1, T, 2, dtype=torch.bool)
    boundary[0, [3, 5, 16, 37, 39, 63], 0] = True
    boundary[..., 1] = True
    starts = slots(boundary, R).starts.contiguous()
    numbers, news, table = slot_states_triton.find(starts.to(DEVICE), C, life, room)
    cuts = [sorted({*starts[0, t, 0].tolist(), t}) for t in range(0, T, C)]
    found = [[(a, b, n // life) for a, b in pairwise(cut)] for n, cut in enumerate(cuts)]
    states = list(dict.fromkeys(slot for slots_of_tile in found for slot in reversed(slots_of_tile)))
    assert news[0, -1] == len(states) <= room
    assert news[1, -1] == 12
    for number, (begin, end, age) in enumerate(states):
        readers = [n for n in range(NT) if (begin, end, age) in found[n]]
        after = [] if readers[-1] == NT - 1 else found[readers[-1] + 1]
        into = [states.index((a, b, n)) for a, b, n in after if a <= begin < b] or [-1]
        assert table[0, :, number].tolist() == [begin, end, readers[0], readers[-1] + 1, *into]
        assert all((numbers[0, n] == number).sum() == 1 for n in readers)


def test_one_head_has_room_for_its_states_and_another_has_not() -> None:
    x, _ = given(Case(49, 3))
    boundary = torch.ones(1, 49, 2, dtype=torch.bool, device=DEVICE)
    boundary[0, [n for n in range(49) if n not in (5, 20, 33)], 0] = False
    found, do = slots(boundary, 3), upstream(x)
    contract.assert_close(kernels(x, found, do, 2), truth(x, found, do), TOL)


@pytest.mark.parametrize("states", [0, 3])
def test_nothing_is_read_past_the_end_or_from_the_neighbours(states: int) -> None:
    """Inputs that lie in the middle of NaN, cut from wider and longer ones."""
    case = Case(36, 3, states=states, heads=(1, 1))
    plain, found = given(case)
    do = upstream(plain)
    x: dict[str, Any] = dict(plain)
    for n in ("q", "k", "v", "rank_scale", "log_decay"):
        width = (0, 3) if x[n].dim() == 4 else ()
        wide = torch.nn.functional.pad(x[n], (*width, 0, 0, 2, 5), value=torch.nan)
        x[n] = wide[:, 2 : 2 + case.T][..., : plain[n].shape[3]] if width else wide[:, 2 : 2 + case.T]
    contract.assert_close(kernels(x, found, do, states), kernels(plain, found, do, states), 0.0)


def test_they_are_a_torch_operator() -> None:
    x, found = given(Case(3, 2, heads=(1, 1)))
    names = ("q", "k", "v", "rank_scale", "log_decay", "gate")
    q, k, v, weights, g, p = (x[n].requires_grad_() for n in names)
    torch.library.opcheck(registered.forward, (q, k, v, weights, found.starts, found.until, g, p, 0.3))


def test_models_fold_and_learn_through_the_public_call() -> None:
    """Schedule and output of two models with thresholds of their own, and ordinary gradients, also of the gate."""
    T, members = 12, [given(Case(12, 3, heads=(2, 2)))[0] for _ in range(2)]
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


@pytest.mark.parametrize("states", [0, 3])
def test_float32_keeps_weak_decays_next_to_strong_ones(states: int) -> None:
    x, found = given(Case(34, 3, decay="reset", heads=(1, 1)), torch.float32)
    do = upstream(x)
    contract.assert_close(kernels(x, found, do, states), truth(x, found, do), 3e-6)


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
