"""The Triton kernels of log-linear attention against the definition: in the interpreter, or on a GPU."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.kernels.log_linear_attention import reference, registered, triton

from . import contract

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 2e-5) if GPU else (torch.float64, 1e-11)  # there are no float64 kernels for a GPU
ONE = triton.Launch(4, 1)
HOW = triton.Plan(16, 64, ONE, ONE, ONE, ONE, ONE, ONE)
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 100, 130)
GATES = ("weak", "none", "mixed", "zero", "reset", "strong")
HEADS = ((2, 4), (1, 2), (1, 1), (2, 2))  # G, H
DIMS = ((16, 16), (20, 40), (48, 24), (3, 5))  # K, V
LEVELS = (9, 3, 12, 1, 6)


@dataclass(frozen=True)
class Case:
    T: int
    heads: tuple[int, int] = (1, 2)
    dims: tuple[int, int] = (16, 24)
    gate: str = "weak"
    L: int = 9
    block: int = 64
    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        (G, H), (K, V) = self.heads, self.dims
        return f"T{self.T}-G{G}H{H}-K{K}V{V}-{self.gate}-L{self.L}-b{self.block}-{'packed' if self.cu_seqlens else ''}"


def cases() -> list[Case]:
    found = []
    for n, T in enumerate(LENGTHS):
        gate, heads, dims = GATES[n % 6], HEADS[n % 4 if T <= 17 else 1 + n % 2], DIMS[(n + n // 7) % 4]
        found.append(Case(T, heads, dims, gate, LEVELS[n % 5], 16 if n == 4 else 64))
    # 38 chunks: nodes seen by more chunks than one program sums over, and two launches for the tree's upper part
    found += [Case(600, (1, 1), (4, 4), "mixed", 11), Case(513, (1, 1), (4, 4), "none", 6)]
    # 25: the last one alone is behind a border, and sees a node of 16 before it
    found.append(Case(400, (1, 1), (4, 4), "weak", 9))
    for gate, T, ends in (("mixed", 90, (0, 1, 34, 34, 70, 90)), ("weak", 305, (0, 5, 290, 305))):
        found.append(Case(T, (1, 1), (4, 4), gate, 8, cu_seqlens=ends))
    return found


def inputs(case: Case, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(case.T)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).to(DEVICE)  # noqa: E731
    B, T, (G, H), (K, V) = 1 if case.T > 33 else 2, case.T, case.heads, case.dims
    gate = contract.gates(case.gate, torch.rand(B, T, H, generator=draw, dtype=torch.float64))
    return {
        "q": normal(B, T, G, K),
        "k": normal(B, T, G, K),
        "v": normal(B, T, H, V),
        "level_scale": normal(B, T, H, case.L),
        "log_decay": None if gate is None else gate.to(dtype).to(DEVICE),
        "do": normal(B, T, H, V),
    }


def truth(x: dict[str, Any], case: Case, scale: float) -> dict[str, Tensor]:
    """The recurrence in float64, sequence by sequence."""
    names = [n for n in ("q", "k", "v", "level_scale", "log_decay") if x[n] is not None]
    leaf: dict[str, Any] = {n: None if t is None else t.detach().double().requires_grad_() for n, t in x.items()}
    ends = case.cu_seqlens or (0, case.T)
    os = []
    for begin, end in pairwise(ends):
        if begin < end:
            q, k, v, lam = (leaf[n][:, begin:end] for n in ("q", "k", "v", "level_scale"))
            g = None if leaf["log_decay"] is None else leaf["log_decay"][:, begin:end]
            os.append(reference.log_linear_attention(q, k, v, lam, g, scale, None)[0])
    o = torch.cat(os, dim=1)
    grads = torch.autograd.grad(o, [leaf[n] for n in names], leaf["do"].detach())
    return {"o": o.detach(), **{f"d{n}": g for n, g in zip(names, grads, strict=True)}}


def kernels(x: dict[str, Any], case: Case, scale: float, how: triton.Plan = HOW) -> dict[str, Tensor]:
    how = how._replace(block=case.block)
    cu = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, device=DEVICE)
    given = (x["q"], x["k"], x["v"], x["level_scale"], x["log_decay"], scale, cu)
    with poisoned():
        o, tree = triton.forward(*given, how)
        grads = triton.backward(*given, tree, x["do"], how)
    named = zip(("dq", "dk", "dv", "dlevel_scale", "dlog_decay"), grads, strict=True)
    return {"o": o, **{n: g for n, g in named if g is not None}}


class poisoned:
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_kernels_are_the_recurrence(case):
    x = inputs(case)
    expected = truth(x, case, 0.3)
    found = kernels(x, case, 0.3)
    assert found.keys() == expected.keys()
    contract.assert_close(found, expected, TOL)


def test_float32_keeps_weak_decays_next_to_strong_ones():
    case = Case(130, gate="mixed")
    x = inputs(case, torch.float32)
    contract.assert_close(kernels(x, case, 0.3), truth(x, case, 0.3), 2e-6)


def test_runs_repeat_bit_for_bit():
    x = inputs(case := Case(100))
    first, second = kernels(x, case, 0.3), kernels(x, case, 0.3)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_levels_that_a_token_lacks_have_no_gradient():
    """Level l >= 1 is there exactly where bit l - 1 of the position is set."""
    x = inputs(case := Case(70))
    grad = kernels(x, case, 0.3)["dlevel_scale"]
    t, level = torch.arange(70, device=DEVICE)[:, None], torch.arange(case.L, device=DEVICE)
    there = (level == 0) | ((t >> (level - 1).clamp(min=0)) & 1 == 1)
    assert torch.equal(grad != 0, there[:, None].expand(1, 70, 2, case.L))


def test_nothing_is_read_past_the_end_or_from_the_neighbours():
    """Inputs that lie in the middle of NaN, cut from wider and longer ones."""
    case = Case(70)
    plain = inputs(case)
    x = dict(plain)
    for n in ("q", "k", "v", "level_scale", "do"):
        wide = torch.nn.functional.pad(plain[n], (0, 3, 0, 0, 2, 5), value=torch.nan)
        x[n] = wide[:, 2:-5, ..., :-3]
    contract.assert_close(kernels(x, case, 0.3), kernels(plain, case, 0.3), 0.0)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(triton, "plan", lambda *_: HOW)
    monkeypatch.setattr(triton.short_triton, "serves", lambda *_: False)


def operator(q: Tensor, k: Tensor, v: Tensor, level_scale: Tensor, g: Tensor) -> Tensor:
    return registered.forward(q, k, v, level_scale, g, None, 0.3)[0]


def leaves(T: int, members: int | None = None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(T)
    M = () if members is None else (members,)
    shapes = [(1, T, 1, 3), (1, T, 1, 3), (1, T, 2, 2), (1, T, 2, 4), (1, T, 2)]
    made = [torch.randn(*M, *s, generator=draw, dtype=torch.float64).to(DTYPE).to(DEVICE) for s in shapes]
    made[4] = -made[4].abs()
    return [x.requires_grad_() for x in made]


def test_opcheck(small_chunks):
    torch.library.opcheck(registered.forward, (*leaves(36), None, 0.3))
    packed = torch.tensor([0, 20, 20, 36], device=DEVICE)
    torch.library.opcheck(registered.forward, (*leaves(36)[:4], None, packed, 0.3), test_utils="test_faketensor")


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck(small_chunks):
    assert torch.autograd.gradcheck(operator, leaves(17), fast_mode=True, check_batched_grad=True)


def test_vmap_is_a_loop(small_chunks):
    stack = leaves(36, members=2)
    together = torch.func.vmap(operator)(*stack)
    grads = torch.autograd.grad(together.sin().sum(), stack)
    for m in range(2):
        alone = [x.detach()[m].clone().requires_grad_() for x in stack]
        o = operator(*alone)
        expected = [o, *torch.autograd.grad(o.sin().sum(), alone)]
        found = [x[m] for x in (together, *grads)]
        contract.assert_close(dict(enumerate(found)), dict(enumerate(expected)), TOL)  # type: ignore[arg-type]


def test_compiled_is_eager(small_chunks):
    given = leaves(36)
    for dynamic in (False, True):
        compiled = torch.compile(operator, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        found, expected = compiled(*given), operator(*given)
        assert torch.equal(found, expected)
        both = [torch.autograd.grad(o.sin().sum(), given) for o in (found, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
