"""The Triton kernels of linear attention against the definition: in the interpreter, or on a GPU where there is one."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.kernels.linear_attention import reference, registered, triton

from . import contract

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 2e-5) if GPU else (torch.float64, 1e-12)  # there are no float64 kernels for a GPU
SMALL, LARGE = triton.Launch(16, 64, 64, 4, 1), triton.Launch(128, 64, 64, 4, 1)
UNCUT, CUT = (1, 2, 15, 16, 17, 31, 32, 33, 70), (33, 64, 65, 70, 100)  # lengths
GATES = ("weak", "none", "mixed", "zero", "reset", "strong")
HEADS = ((1, 1), (1, 3), (2, 4), (2, 2))  # G, H
DIMS = ((16, 16), (20, 40), (48, 24), (3, 5))  # K, V


@dataclass(frozen=True)
class Case:
    T: int
    length: int | None  # of a segment; None: uncut
    heads: tuple[int, int] = (1, 2)
    dims: tuple[int, int] = (16, 24)
    gate: str = "weak"
    start: bool = True
    loss: str = "both"
    block: int = 64
    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        (G, H), (K, V) = self.heads, self.dims
        return f"T{self.T}-S{self.length}-G{G}H{H}-K{K}V{V}-{self.gate}-{self.start:d}-{self.loss}-b{self.block}"


def cases() -> list[Case]:
    found = []
    for n, (T, length) in enumerate([(T, None) for T in UNCUT] + [(T, 32) for T in CUT]):
        losses = ("both", "output", "state")
        gate, heads, dims = GATES[n % 6], HEADS[(n + n // 4) % 4], DIMS[(n + n // 7) % 4]
        found.append(Case(T, length, heads, dims, gate, n % 3 != 1, losses[n // 2 % 3], (64, 16)[n // 3 % 2]))
    for cut, gate, start in ((None, "mixed", True), (32, "weak", True), (16, "none", False), (16, "reset", False)):
        found.append(Case(90, cut, (1, 2), gate=gate, start=start, cu_seqlens=(0, 1, 34, 34, 70, 90)))
    return found


def inputs(case: Case, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(case.T)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).to(DEVICE)  # noqa: E731
    alone = case.cu_seqlens or case.block == 16 or case.T > 40  # fewer of the interpreter's slow programs
    B, T, (G, H), (K, V) = 1 if alone else 2, case.T, case.heads, case.dims
    sequences = len(case.cu_seqlens) - 1 if case.cu_seqlens else B
    gate = contract.gates(case.gate, torch.rand(B, T, H, generator=draw, dtype=torch.float64))
    return {
        "q": normal(B, T, G, K),
        "k": normal(B, T, G, K),
        "v": normal(B, T, H, V),
        "log_decay": None if gate is None else gate.to(dtype).to(DEVICE),
        "initial_state": normal(sequences, H, K, V) if case.start else None,
        "do": normal(B, T, H, V) if case.loss != "state" else torch.zeros(B, T, H, V, dtype=dtype, device=DEVICE),
        "dstate": normal(sequences, H, K, V) if case.loss != "output" else None,
    }


def truth(x: dict[str, Any], case: Case, scale: float) -> dict[str, Tensor]:
    """The recurrence in float64, sequence by sequence."""
    leaf: dict[str, Any] = {n: None if t is None else t.detach().double().requires_grad_() for n, t in x.items()}
    N = len(case.cu_seqlens) - 1 if case.cu_seqlens else 1
    os, states = [], []
    for n in range(N):
        part = slice(*case.cu_seqlens[n : n + 2]) if case.cu_seqlens else slice(None)
        state = leaf["initial_state"] if leaf["initial_state"] is None or N == 1 else leaf["initial_state"][n : n + 1]
        q, k, v = (leaf[m][:, part] for m in ("q", "k", "v"))
        g = None if leaf["log_decay"] is None else leaf["log_decay"][:, part]
        if q.shape[1]:
            o, state = reference.linear_attention(q, k, v, g, scale, state)
            os.append(o)
        states.append(leaf["dstate"].new_zeros(1, *leaf["dstate"].shape[1:]) if state is None else state)
    o, state = torch.cat(os, dim=1), torch.cat(states)
    loss = (o * leaf["do"].detach()).sum()
    if leaf["dstate"] is not None:
        loss = loss + (state * leaf["dstate"].detach()).sum()
    names = [n for n in ("q", "k", "v", "log_decay", "initial_state") if leaf[n] is not None]
    wanted: list[Tensor] = [leaf[n] for n in names]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    found = {f"d{n}": torch.zeros_like(leaf[n]) if g is None else g for n, g in zip(names, grads, strict=True)}
    return {"o": o.detach(), "state": state.detach(), **found}


def kernels(x: dict[str, Any], case: Case, scale: float) -> dict[str, Tensor]:
    launch = SMALL._replace(inner=case.block, outer=case.block)
    how = triton.Plan(264, border=launch, walk=launch)
    length = case.length or case.T
    cu = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, device=DEVICE)
    given = (x["q"], x["k"], x["v"], x["log_decay"], scale, x["initial_state"], cu)
    with poisoned():
        o, state, states = triton.forward(*given, True, how, length)
        grads = triton.backward(*given, states, x["do"], x["dstate"], how, length)
    assert state is not None
    named = zip(("dq", "dk", "dv", "dlog_decay", "dinitial_state"), grads, strict=True)
    return {"o": o, "state": state, **{n: g for n, g in named if g is not None}}


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
    case = Case(100, 64, heads=(1, 1), gate="mixed")
    x = inputs(case, torch.float32)
    contract.assert_close(kernels(x, case, 0.3), truth(x, case, 0.3), 2e-6)


@pytest.mark.parametrize("T", [2048, 2049, 131_072])
def test_a_running_sum_ends_with_its_segment_however_full_the_machine_is(T):
    """The decay's gradient drifts in bfloat16: by 2.5 % after 8192 tokens in one sum."""
    cut, _, _ = triton.sizes(
        torch.empty(512, T, 16, 64, device="meta"), torch.empty(512, T, 16, 64, device="meta"), None
    )
    assert cut.length <= 2048
    assert cut.inner == (T > 2048)


def test_runs_repeat_bit_for_bit():
    x = inputs(case := Case(40, 32))
    first, second = kernels(x, case, 0.3), kernels(x, case, 0.3)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_nothing_is_read_past_the_end_or_from_the_neighbours():
    """Inputs that lie in the middle of NaN, cut from wider and longer ones."""
    case = Case(40, 32)
    plain = inputs(case)
    x = dict(plain)
    for n in ("q", "k", "v", "log_decay", "do"):
        wide = torch.nn.functional.pad(plain[n], (0, 3, 0, 0, 2, 5), value=torch.nan)
        x[n] = wide[:, 2:-5, ..., :-3] if n != "log_decay" else plain[n]
    expected = kernels(plain, case, 0.3)
    contract.assert_close(kernels(x, case, 0.3), expected, 0.0)


@pytest.fixture
def large_chunks(monkeypatch):
    """Fewer of the interpreter's slow steps."""
    monkeypatch.setattr(triton, "plan", lambda *_: triton.Plan(264, border=LARGE, walk=LARGE))


def operator(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    o, final, _ = registered.forward(q, k, v, g, state, None, 0.3, True)
    return o, final


def leaves(T: int, members: int | None = None, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    draw = torch.Generator().manual_seed(T)
    M = () if members is None else (members,)
    shapes = [(1, T, 1, 3), (1, T, 1, 3), (1, T, 2, 2), (1, T, 2), (1, 2, 3, 2)]
    made = [torch.randn(*M, *s, generator=draw, dtype=torch.float64).to(dtype).to(DEVICE) for s in shapes]
    made[3] = -made[3].abs()
    return [x.requires_grad_() for x in made]


def test_opcheck(large_chunks):
    for T in (20, 600):
        torch.library.opcheck(registered.forward, (*leaves(T), None, 0.3, True))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck(large_chunks):
    assert torch.autograd.gradcheck(operator, leaves(6), fast_mode=True, check_batched_grad=True)


def test_vmap_is_a_loop(large_chunks):
    """600 tokens: long enough to be cut, and into other segments when more sequences share the machine."""
    stack = leaves(600, members=2)
    together = torch.func.vmap(operator)(*stack)
    grads = torch.autograd.grad(together[0].sin().sum() + together[1].sum(), stack)
    for m in range(2):
        alone = [x.detach()[m].clone().requires_grad_() for x in stack]
        o, state = operator(*alone)
        expected = [o, state, *torch.autograd.grad(o.sin().sum() + state.sum(), alone)]
        found = [x[m] for x in (*together, *grads)]
        contract.assert_close(dict(enumerate(found)), dict(enumerate(expected)), TOL)  # type: ignore[arg-type]


def test_gradients_of_gradients_in_a_batch(large_chunks):
    """vmap over the backward of an unmapped forward: cut as the forward was."""
    given = leaves(600)
    o, _ = operator(*given)
    weights = torch.randn(2, *o.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(o)
    batched = torch.autograd.grad(o, given, weights, is_grads_batched=True, retain_graph=True)
    for n in range(2):
        alone = torch.autograd.grad(o, given, weights[n], retain_graph=True)
        assert all(torch.equal(x[n], y) for x, y in zip(batched, alone, strict=True))


def test_compiled_is_eager(large_chunks):
    given = leaves(40)
    for dynamic in (False, True):
        compiled = torch.compile(operator, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        found, expected = compiled(*given), operator(*given)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        both = [torch.autograd.grad(o.sin().sum(), given) for o, _ in (found, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
