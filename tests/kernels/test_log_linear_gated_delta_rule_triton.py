"""The Triton kernels of the log-linear gated delta rule against the definition: interpreted, or on a GPU."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.kernels.common.fenwick import levels
from mixassay.kernels.log_linear_gated_delta_rule import reference, registered, triton

from . import contract

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 5e-5) if GPU else (torch.float64, 1e-11)  # there are no float64 kernels for a GPU
SMALL = triton.plan(torch.float64, 16, 16)._replace(C=16, BLOCK=16, BV=16)


@dataclass(frozen=True)
class Case:
    T: int
    L: int | None = None  # None: as many as T has
    heads: tuple[int, int] = (1, 1)  # G, H
    dims: tuple[int, int] = (5, 3)  # K, V
    gate: str = "weak"
    C: int = 16
    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        (G, H), (K, V) = self.heads, self.dims
        packed = "-packed" if self.cu_seqlens else ""
        return f"T{self.T}-L{self.L}-C{self.C}-G{G}H{H}-K{K}V{V}-{self.gate}{packed}"


PACKED = (0, 1, 18, 18, 90, 123, 124, 124)
CASES = [
    Case(1, gate="mixed"),
    Case(2, gate="none", heads=(1, 2)),
    Case(15, heads=(3, 3)),
    Case(16, 2, heads=(2, 4), gate="zero"),
    Case(17, gate="strong", dims=(20, 17)),
    Case(33, 3, gate="reset"),
    Case(64, 12, gate="mixed"),
    Case(65, 1, heads=(1, 2), gate="none", dims=(3, 5)),
    Case(100, 6, gate="mixed", dims=(20, 16)),
    Case(130),
    Case(130, 7, C=32, gate="reset", dims=(3, 40)),
    Case(124, cu_seqlens=PACKED, gate="mixed"),
    Case(124, 5, cu_seqlens=PACKED, gate="none"),
    Case(15, cu_seqlens=(0, 4, 4, 15)),
]


def inputs(case: Case, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    """Keys repeat and are not normalised; beta |k|^2 is in (0, 2)."""
    draw = torch.Generator().manual_seed(case.T)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    uniform = lambda *shape: torch.rand(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    B, T, (G, H), (K, V) = 1 if case.cu_seqlens or case.T > 40 else 2, case.T, case.heads, case.dims
    k = torch.nn.functional.normalize(normal(B, T, G, K), dim=-1) * (0.5 + 0.5 * uniform(B, T, G, 1))
    k[:, 1::3] = k[:, : len(range(1, T, 3))]
    made = {
        "q": normal(B, T, G, K),
        "k": k,
        "v": normal(B, T, H, V),
        "beta": 2 * uniform(B, T, H),
        "level_scale": uniform(B, T, H, case.L or levels(T)),
        "log_decay": contract.gates(case.gate, uniform(B, T, H)),
        "do": normal(B, T, H, V),
    }
    return {n: None if x is None else x.to(dtype).to(DEVICE) for n, x in made.items()}


NAMES = ("q", "k", "v", "beta", "level_scale", "log_decay")


def truth(x: dict[str, Any], case: Case) -> dict[str, Tensor]:
    """The recurrence in float64, sequence by sequence."""
    leaf: dict[str, Any] = {n: None if t is None else t.double().requires_grad_() for n, t in x.items()}
    os = []
    for begin, end in pairwise(case.cu_seqlens or (0, case.T)):
        tokens: dict[str, Any] = {n: None if leaf[n] is None else leaf[n][:, begin:end] for n in NAMES}
        if end > begin:
            os.append(reference.log_linear_gated_delta_rule(**tokens, scale=0.3, initial_state=None)[0])
    o = torch.cat(os, dim=1)
    given = [n for n in NAMES if leaf[n] is not None]
    grads = torch.autograd.grad((o * leaf["do"].detach()).sum(), [leaf[n] for n in given])
    return {"o": o.detach()} | {f"d{n}": g for n, g in zip(given, grads, strict=True)}


def kernels(x: dict[str, Any], case: Case) -> dict[str, Tensor]:
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""
    cu = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, device=DEVICE)
    given: dict[str, Any] = {n: x[n] for n in NAMES} | {
        "scale": 0.3,
        "cu_seqlens": cu,
        "how": SMALL._replace(C=case.C),
    }
    torch.use_deterministic_algorithms(True)
    try:
        o, M = triton.forward(**given)
        grads = triton.backward(**given, M=M, do=x["do"])
    finally:
        torch.use_deterministic_algorithms(False)
    return {"o": o} | {f"d{n}": g for n, g in zip(NAMES, grads, strict=True) if g is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_recurrence(case):
    x = inputs(case)
    expected = truth(x, case)
    found = kernels(x, case)
    assert found.keys() == expected.keys()
    contract.assert_close(found, expected, TOL)


def test_float32_keeps_weak_decays_next_to_strong_ones():
    case = Case(40, gate="mixed")
    x = inputs(case, torch.float32)
    contract.assert_close(kernels(x, case), truth(x, case), 1e-5)


def test_growing_inverse_stays_exact():
    """beta |k|^2 up to 32: states and the entries of M grow without bound."""
    case = Case(32, gate="zero")
    x = inputs(case)
    x["k"] *= 4
    expected = truth(x, case)
    assert expected["o"].abs().max() > 1e5
    contract.assert_close(kernels(x, case), expected, TOL)


def test_nothing_is_read_past_the_end_or_from_the_neighbours():
    """Inputs that lie in the middle of NaN, cut from wider and longer ones: same bits."""
    case = Case(20)
    plain = inputs(case)
    x = dict(plain)
    for n in ("q", "k", "v", "do", "level_scale"):
        wide = torch.nn.functional.pad(plain[n], (0, 3, 0, 0, 2, 5), value=torch.nan)
        x[n] = wide[:, 2:-5, ..., :-3]
    contract.assert_close(kernels(x, case), kernels(plain, case), 0.0)


def operator(*xs: Tensor) -> Tensor:
    return registered.forward(*xs, None, 0.3)[0]


def leaves(T: int, H: int = 1, members: int | None = None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(T)
    M = () if members is None else (members,)
    shapes = [(1, T, 1, 3), (1, T, 1, 3), (1, T, H, 2), (1, T, H), (1, T, H, 4), (1, T, H)]
    made = [torch.randn(*M, *s, generator=draw, dtype=torch.float64).to(DTYPE).to(DEVICE) for s in shapes]
    made[1] /= made[1].norm(dim=-1, keepdim=True)
    made[3], made[5] = made[3].sigmoid(), -made[5].abs()
    return [x.requires_grad_() for x in made]


def test_opcheck():
    torch.library.opcheck(registered.forward, (*leaves(33), None, 0.3))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    assert torch.autograd.gradcheck(operator, leaves(4), fast_mode=True, check_batched_grad=True)


def test_vmap_is_a_loop():
    stack = leaves(33, members=2)
    together = torch.func.vmap(operator)(*stack)
    grads = torch.autograd.grad(together.sin().sum(), stack)
    for m in range(2):
        alone = [x.detach()[m].clone().requires_grad_() for x in stack]
        o = operator(*alone)
        expected = [o, *torch.autograd.grad(o.sin().sum(), alone)]
        found = [x[m] for x in (together, *grads)]
        contract.assert_close(dict(enumerate(found)), dict(enumerate(expected)), TOL)  # type: ignore[arg-type]


def test_compiled_is_eager():
    given = leaves(20, H=2)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*given), operator(*given)
    assert torch.equal(found, expected)
    both = [torch.autograd.grad(o.sin().sum(), given) for o in (found, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
