"""The Triton kernels of higher-order linear attention against the recurrence: in the interpreter, or on a GPU."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.kernels import hla
from mixassay.kernels.hla import registered, triton

from .contract import assert_close
from .hla import OPERATORS, Operator, leaves, make, tensors, values

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.bfloat16, 5e-2) if GPU else (torch.float64, 1e-11)
FUSED = [op for op in OPERATORS if op.name in ("hla2", "ahla", "hla3")]


@dataclass(frozen=True)
class Case:
    T: int
    length: int | None = None  # of a segment; None: uncut
    heads: tuple[int, int] = (1, 2)
    dims: tuple[int, int] = (8, 12)
    gate: str = "both"
    start: bool = True
    columns: int = 64
    together: bool = True
    bounds: tuple[int, ...] | None = None

    def __str__(self) -> str:
        (G, H), (K, V) = self.heads, self.dims
        cut = f"{self.length}{'-packed' if self.bounds else ''}"
        return f"T{self.T}-S{cut}-G{G}H{H}-K{K}V{V}-{self.gate}-{self.start:d}-b{self.columns}-t{self.together:d}"


CASES = [
    Case(1, gate="inner"),
    Case(16, heads=(1, 1), gate="outer", start=False),
    Case(17, dims=(20, 5), gate="none", together=False),
    Case(35, dims=(16, 24), gate="strong", columns=16),
    Case(40, 16, heads=(2, 2), gate="heads", together=False),
    Case(64, 32, heads=(1, 1), gate="none", start=False),
    Case(65, 32, gate="reset"),
    Case(30, bounds=(0, 1, 18, 18, 30)),
    Case(40, 16, heads=(1, 1), start=False, together=False, bounds=(0, 17, 17, 40)),
]


@pytest.fixture
def plan(monkeypatch):
    """Sets the plan and the cut of every call: `plan(case)`."""

    def set_plan(case: Case) -> None:
        launch = triton.Launch(16, case.columns, 4, 1)
        monkeypatch.setattr(triton, "plan", lambda *_: triton.Plan(264, launch, launch, 9, case.together))
        monkeypatch.setattr(registered, "segment_length", lambda *_: case.length or case.T)
        cut = triton.Cut.of
        of = lambda B, T, cu, *_: cut(B, T, cu, 1, case.length or case.T)  # noqa: E731
        monkeypatch.setattr(triton.Cut, "of", of)

    return set_plan


def inputs(op: Operator, case: Case, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    rows = len(case.bounds) - 1 if case.bounds else 1
    made = make(
        op, case.T, B=1, rows=rows, heads=case.heads, dims=case.dims, gate=case.gate, start=case.start, dtype=dtype
    )
    return {n: x.to(DEVICE) if isinstance(x, Tensor) else type(x)(*(y.to(DEVICE) for y in x)) for n, x in made.items()}


def options(op: Operator, case: Case) -> dict[str, Any]:
    cu = None if case.bounds is None else torch.tensor(case.bounds, device=DEVICE)
    return {"scale": 0.6, "cu_seqlens": cu, "output_final_state": True} | ({"ridge": 0.3} if op.metric else {})


class poisoned:
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("op", "case"), [(FUSED[(n + n // 9) % 3], CASES[n % 9]) for n in range(18)], ids=str)
def test_kernels_are_the_recurrence(op, case, plan):
    plan(case)
    x, given = inputs(op, case), options(op, case)
    truth = values(op.call, {n: double(y) for n, y in x.items()}, **given, backend="reference")
    with poisoned():
        found = values(op.call, x, **given, backend="triton")
    assert found.keys() == truth.keys()
    assert_close(found, truth, TOL)


def double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else type(x)(*(y.double() for y in x))


@pytest.mark.parametrize("wanted", ["o", "S", "F"])
def test_a_loss_on_a_part_of_the_results(wanted, plan):
    """Gradients that autograd does not bring are zero."""
    plan(case := Case(20, 16))
    op = FUSED[0]
    x = inputs(op, case)

    def grads(backend: str) -> dict[str, Tensor]:
        copies = leaves(x)
        o, state = op.call(**copies, **options(op, case), backend=backend)
        part = {"o": o, **state._asdict()}[wanted]
        loss = (part * torch.linspace(-1, 1, part.numel(), device=DEVICE).view_as(part)).sum()
        named = tensors(copies)
        return dict(zip(named, torch.autograd.grad(loss, list(named.values()), materialize_grads=True), strict=True))

    assert_close(grads("triton"), grads("reference"), TOL)


def test_nothing_is_read_past_the_end_or_from_the_neighbours(plan):
    """Inputs that lie in the middle of NaN, cut from wider and longer ones; runs repeat bit for bit."""
    plan(case := Case(20, 16))
    op = FUSED[2]
    x = inputs(op, case)
    wide = dict(x)
    for n in "qkv":
        wide[n] = torch.nn.functional.pad(x[n], (0, 3, 0, 0, 2, 5), value=torch.nan)[:, 2:-5, ..., :-3]
    found, expected = (values(op.call, y, **options(op, case), backend="triton") for y in (wide, x))
    assert_close(found, expected, 0.0)


def test_a_ratio_and_wide_heads_are_composed(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("the fused kernels were called")

    monkeypatch.setattr(registered, "hla", refuse)
    cases: list[tuple[tuple[int, int], dict[str, Any]]]
    cases = [((4, 3), {"feature_map": "relu", "normalize": True}), ((130, 3), {})]
    for dims, kind in cases:
        x = inputs(FUSED[0], Case(3, dims=dims, start=False))
        found, expected = ({"o": hla.hla2(**x, **kind, backend=b)[0]} for b in ("triton", "reference"))
        assert_close(found, expected, TOL)
    with pytest.raises(AssertionError, match="fused"):
        hla.hla2(**inputs(FUSED[0], Case(3)), backend="triton")


@pytest.fixture
def large_chunks(monkeypatch):
    """Fewer of the interpreter's slow steps."""
    launch = triton.Launch(128, 64, 4, 1)
    monkeypatch.setattr(triton, "plan", lambda *_: triton.Plan(264, launch, launch, 9, True))


FLAGS = (None, 0.3, 0.1, True, True, True)  # cu_seqlens, scale, ridge, kappa, nu, the last states


def operator(*given: Tensor) -> tuple[Tensor, ...]:
    return registered.forward(*given, *FLAGS)[:4]


def total(results: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([x.sin().sum() for x in results]).sum()


def arguments(T: int, members: int | None = None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(T)
    M = () if members is None else (members,)
    shapes = [(1, T, 2, 3), (1, T, 1, 3), (1, T, 1, 2), (1, T, 1), (1, T, 2), (1, 1, 3, 3), (1, 1, 3, 2), (1, 2, 3, 2)]
    made = [torch.randn(*M, *s, generator=draw, dtype=torch.float64).to(DTYPE).to(DEVICE) for s in shapes]
    made[3:5] = [-x.abs() for x in made[3:5]]
    return [x.requires_grad_() for x in made]


def test_opcheck(large_chunks):
    torch.library.opcheck(registered.forward, (*arguments(9), *FLAGS))
    q, k, v = (x.detach() for x in arguments(600)[:3])
    for flags in ((False, True, False), (True, False, True)):  # what is absent
        absent = (q, k, v, *[None] * 6, 0.3, 0.0, *flags)
        torch.library.opcheck(registered.forward, absent, test_utils="test_faketensor")


def test_vmap_is_a_loop(large_chunks):
    stack = arguments(20, members=2)
    together = torch.func.vmap(operator)(*stack)
    grads = torch.autograd.grad(total(together), stack)
    for m in range(2):
        alone = [x.detach()[m].clone().requires_grad_() for x in stack]
        made = operator(*alone)
        expected = [*made, *torch.autograd.grad(total(made), alone)]
        found = [x[m] for x in (*together, *grads)]
        assert_close(dict(enumerate(found)), dict(enumerate(expected)), TOL)  # type: ignore[arg-type]


def test_gradients_of_gradients_in_a_batch(large_chunks):
    """vmap over the backward of an unmapped forward: cut as the forward was."""
    given = arguments(600)[:5]
    o, *_ = registered.forward(*given, *[None] * 4, 0.3, 0.0, False, True, False)
    weights = torch.randn(2, *o.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(o)
    batched = torch.autograd.grad(o, given, weights, is_grads_batched=True, retain_graph=True)
    alone = torch.autograd.grad(o, given, weights[1], retain_graph=True)
    assert all(torch.equal(x[1], y) for x, y in zip(batched, alone, strict=True))


def test_compiled_is_eager(large_chunks):
    given = arguments(20)
    for dynamic in (False, True):
        compiled = torch.compile(operator, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        found, expected = compiled(*given), operator(*given)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        both = [torch.autograd.grad(made[0].sin().sum(), given) for made in (found, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
