"""The Triton kernels of the gated delta rule against the definition: interpreted, or on a GPU if there is one."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl

from mixassay.kernels.gated_delta_rule import reference, registered, triton

from . import contract

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 5e-5) if GPU else (torch.float64, 1e-11)  # there are no float64 kernels for a GPU
SMALL = triton.plan(torch.float64, 16, 16)._replace(C=16, programs=1)


@dataclass(frozen=True)
class Case:
    T: int
    length: int | None = None  # of a segment; None: uncut
    heads: tuple[int, int] = (1, 2)  # G, H
    dims: tuple[int, int] = (16, 24)  # K, V
    gate: str = "weak"
    start: bool = True
    final: bool = True
    C: int = 16
    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        (G, H), (K, V) = self.heads, self.dims
        packed = "-packed" if self.cu_seqlens else ""
        return f"T{self.T}-S{self.length}-C{self.C}-G{G}H{H}-K{K}V{V}-{self.gate}-{self.start:d}{self.final:d}{packed}"


PACKED = (0, 1, 18, 18, 50, 90)
CASES = [
    Case(1, heads=(1, 1), gate="mixed"),
    Case(2, heads=(1, 1), gate="none"),
    Case(15, heads=(3, 3), dims=(20, 40), start=False),
    Case(16, heads=(2, 4), dims=(3, 5), gate="zero"),
    Case(17, gate="strong", final=False),
    Case(33, C=32, heads=(1, 3), gate="reset", start=False, final=False),
    Case(64, C=64, heads=(1, 1), gate="mixed"),
    Case(65, C=64, heads=(1, 1), dims=(72, 16)),
    Case(70, 32, gate="mixed"),
    Case(70, 32, heads=(1, 1), dims=(16, 70), gate="none", start=False),
    Case(80, 16, heads=(2, 2), dims=(24, 16), start=False, final=False),
    Case(96, 32, heads=(1, 1), gate="reset", final=False),
    Case(90, cu_seqlens=PACKED, gate="mixed"),
    Case(90, cu_seqlens=PACKED, gate="none", start=False),
    Case(90, 16, heads=(1, 1), cu_seqlens=PACKED),
    Case(90, 16, heads=(1, 1), cu_seqlens=PACKED, start=False, final=False),
]


def inputs(case: Case, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    """Keys repeat and are not normalised; beta |k|^2 is in (0, 2)."""
    draw = torch.Generator().manual_seed(case.T)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    uniform = lambda *shape: torch.rand(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    B, T, (G, H), (K, V) = 1 if case.cu_seqlens else 2, case.T, case.heads, case.dims
    N = len(case.cu_seqlens) - 1 if case.cu_seqlens else B
    k = torch.nn.functional.normalize(normal(B, T, G, K), dim=-1) * (0.5 + 0.5 * uniform(B, T, G, 1))
    k[:, 1::3] = k[:, : len(range(1, T, 3))]
    made = {
        "q": normal(B, T, G, K),
        "k": k,
        "v": normal(B, T, H, V),
        "beta": 2 * uniform(B, T, H),
        "log_decay": contract.gates(case.gate, uniform(B, T, H)),
        "initial_state": normal(N, H, K, V) if case.start else None,
        "do": normal(B, T, H, V),
        "dstate": normal(N, H, K, V) if case.final else None,
    }
    return {n: None if x is None else x.to(dtype).to(DEVICE) for n, x in made.items()}


NAMES = ("q", "k", "v", "beta", "log_decay", "initial_state")


def truth(x: dict[str, Any], case: Case, scale: float = 0.3) -> dict[str, Tensor]:
    """The recurrence in float64, sequence by sequence."""
    leaf: dict[str, Any] = {n: None if t is None else t.double().requires_grad_() for n, t in x.items()}
    bounds = case.cu_seqlens or (0, case.T)
    os, states = [], []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        first = leaf["initial_state"]
        first = first[n : n + 1] if case.cu_seqlens and first is not None else first
        tokens: dict[str, Any] = {m: None if leaf[m] is None else leaf[m][:, begin:end] for m in NAMES[:-1]}
        if end > begin:
            o, state = reference.gated_delta_rule(**tokens, scale=scale, initial_state=first)
            os.append(o)
        else:
            state = leaf["v"].new_zeros(1, case.heads[1], *case.dims) if first is None else first
        states.append(state)
    o, state = torch.cat(os, dim=1), torch.cat(states)
    loss = (o * leaf["do"].detach()).sum()
    if case.final:
        loss = loss + (state * leaf["dstate"].detach()).sum()
    given = [n for n in NAMES if leaf[n] is not None]
    grads = torch.autograd.grad(loss, [leaf[n] for n in given], allow_unused=True, materialize_grads=True)
    found = {"o": o.detach()} | ({"state": state.detach()} if case.final else {})
    return found | {f"d{n}": g for n, g in zip(given, grads, strict=True)}


def kernels(x: dict[str, Any], case: Case, scale: float = 0.3) -> dict[str, Tensor]:
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""
    how, length = SMALL._replace(C=case.C), case.length or case.T
    cu = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, device=DEVICE)
    given: dict[str, Any] = {n: x[n] for n in NAMES} | {"scale": scale, "cu_seqlens": cu, "how": how, "length": length}
    torch.use_deterministic_algorithms(True)
    try:
        o, state, saved = triton.forward(**given, output_final_state=case.final)
        grads = triton.backward(**given, saved=saved, do=x["do"], dfinal=x["dstate"])
    finally:
        torch.use_deterministic_algorithms(False)
    found = {"o": o} | ({} if state is None else {"state": state})
    return found | {f"d{n}": g for n, g in zip(NAMES, grads, strict=True) if g is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_recurrence(case):
    x = inputs(case)
    expected = truth(x, case)
    found = kernels(x, case)
    assert found.keys() == expected.keys()
    contract.assert_close(found, expected, TOL)


def test_float32_keeps_weak_decays_next_to_strong_ones():
    case = Case(70, 32, gate="mixed", heads=(1, 1))
    x = inputs(case, torch.float32)
    contract.assert_close(kernels(x, case), truth(x, case), 1e-5)


@pytest.mark.skipif(GPU, reason="narrow products are put in the place of float64 ones")
def test_narrow_scores_cancel_in_the_decays_gradient(monkeypatch):
    """Products as on a GPU, but in float16, which the interpreter can: strong decays leave little of what cancels, and
    the scale, 24^-0.5, is no power of two."""
    monkeypatch.setattr(triton, "operands", lambda _: (tl.float16, tl.float32, "ieee"))
    begin = triton._Call.__init__

    def narrow(self: Any, *args: Any) -> None:
        begin(self, *args)
        self.dot = torch.float16

    monkeypatch.setattr(triton._Call, "__init__", narrow)
    case = Case(64, dims=(24, 24), C=32, final=False)
    x = inputs(case, torch.float16)
    x["log_decay"] = 30 * x["log_decay"]
    found, expected = kernels(x, case, 24**-0.5), truth(x, case, 24**-0.5)
    errors = {n: ((found[n].double() - t).norm() / t.norm()).item() for n, t in expected.items()}
    assert errors["dlog_decay"] < 3 * max(errors["dk"], errors["dq"]), errors


def test_growing_inverse_stays_exact():
    """beta |k|^2 up to 32: states and the entries of (I + A)^-1 grow without bound."""
    case = Case(32, gate="zero", heads=(1, 1))
    x = inputs(case)
    x["k"] *= 4
    expected = truth(x, case)
    assert expected["state"].abs().max() > 1e5
    contract.assert_close(kernels(x, case), expected, TOL)


def test_nothing_is_read_past_the_end_or_from_the_neighbours():
    """Inputs that lie in the middle of NaN, cut from wider and longer ones: same bits."""
    case = Case(40, 32, heads=(1, 1))
    plain = inputs(case)
    x = dict(plain)
    for n in ("q", "k", "v", "do"):
        wide = torch.nn.functional.pad(plain[n], (0, 3, 0, 0, 2, 5), value=torch.nan)
        x[n] = wide[:, 2:-5, ..., :-3]
    contract.assert_close(kernels(x, case), kernels(plain, case), 0.0)


def operator(*xs: Tensor) -> tuple[Tensor, Tensor]:
    o, final, *_ = registered.forward(*xs, None, 0.3, True)
    return o, final


def leaves(T: int, members: int | None = None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(T)
    M = () if members is None else (members,)
    shapes = [(1, T, 1, 3), (1, T, 1, 3), (1, T, 2, 2), (1, T, 2), (1, T, 2), (1, 2, 3, 2)]
    made = [torch.randn(*M, *s, generator=draw, dtype=torch.float64).to(DTYPE).to(DEVICE) for s in shapes]
    made[1] /= made[1].norm(dim=-1, keepdim=True)
    made[3], made[4] = made[3].sigmoid(), -made[4].abs()
    return [x.requires_grad_() for x in made]


def test_opcheck():
    torch.library.opcheck(registered.forward, (*leaves(20), None, 0.3, True))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    assert torch.autograd.gradcheck(operator, leaves(4), fast_mode=True, check_batched_grad=True)


def test_vmap_is_a_loop():
    stack = leaves(40, members=3)
    together = torch.func.vmap(operator)(*stack)
    grads = torch.autograd.grad(together[0].sin().sum() + together[1].sum(), stack)
    for m in range(3):
        alone = [x.detach()[m].clone().requires_grad_() for x in stack]
        o, state = operator(*alone)
        expected = [o, state, *torch.autograd.grad(o.sin().sum() + state.sum(), alone)]
        found = [x[m] for x in (*together, *grads)]
        contract.assert_close(dict(enumerate(found)), dict(enumerate(expected)), TOL)  # type: ignore[arg-type]


def test_compiled_is_eager():
    given = leaves(20)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*given), operator(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    both = [torch.autograd.grad(o.sin().sum(), given) for o, _ in (found, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
