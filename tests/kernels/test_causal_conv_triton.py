"""The short convolution's Triton kernels against the definition: in the interpreter, or on a GPU where there is one."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.errors import UserError
from mixassay.kernels.causal_conv import causal_conv, reference, registered, triton

from . import contract

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 1e-5) if GPU else (torch.float64, 1e-12)  # there are no float64 kernels for a GPU
BOUNDS = (0, 1, 3, 3, 14, 30)

# T, W, D, tokens a segment, bias, initial state, SiLU
SHAPES = [
    *((T, 4, 3, 16, True, start, True) for T, start in product((1, 2, 3, 4), (True, False))),
    *((T, 4, 5, 4, bias, True, silu) for T, bias, silu in ((5, False, True), (9, True, False), (17, True, True))),
    *((11, W, 3, 8, True, W % 2 == 0, W != 2) for W in range(1, 9)),
    (7, 3, 600, 16, True, True, True),
]


@pytest.fixture(autouse=True)
def poisoned():
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(T: int, W: int, D: int, B: int = 2, N: int | None = None, bias: bool = True, start: bool = True) -> list[Any]:
    """x, weight [1, D, W], bias, initial_state and the gradient of y."""
    g = torch.Generator().manual_seed(T + W)
    shapes = [(B, T, D), (1, D, W), (1, D), (N or B, W - 1, D), (B, T, D)]
    made: list[Any] = [torch.randn(s, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE) for s in shapes]
    return [made[0], made[1], made[2] if bias else None, made[3] if start else None, made[4]]


def truth(given: list[Any], silu: bool, bounds: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """The definition in float64, sequence by sequence."""
    wide: list[Any] = [None if t is None else t.double().requires_grad_() for t in given]
    x, weight, bias, state, dy = wide
    if state is None:
        state = x.new_zeros(len(bounds) - 1 if bounds else x.shape[0], weight.shape[2] - 1, x.shape[2])
    ys = []
    for n, (begin, end) in enumerate(pairwise(bounds or (0, x.shape[1]))):
        kept = state[n : n + 1] if bounds else state
        if end > begin:
            offset = None if bias is None else bias[0]
            ys.append(reference.causal_conv(x[:, begin:end], weight[0], offset, kept)[0])
    y = torch.cat(ys, dim=1)
    y = torch.nn.functional.silu(y) if silu else y
    names = {"dx": x, "dweight": weight, "dbias": bias, "dstate": None if given[3] is None else state}
    leaves = {n: t for n, t in names.items() if t is not None}
    grads = torch.autograd.grad(y, list(leaves.values()), dy.detach(), allow_unused=True)
    return {"y": y.detach()} | {
        n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)
    }


def kernels(given: list[Any], silu: bool, rows: int | None, cu_seqlens: Tensor | None = None) -> dict[str, Tensor]:
    x, weight, bias, state, dy = given
    y = triton.forward(x, weight, bias, state, cu_seqlens, silu, rows=rows)
    grads = triton.backward(x, weight, bias, state, cu_seqlens, dy, silu, rows=rows)
    named = zip(("dx", "dweight", "dbias", "dstate"), grads, strict=True)
    return {"y": y} | {n: g for n, g in named if g is not None}


@pytest.mark.parametrize(("T", "W", "D", "rows", "bias", "start", "silu"), SHAPES)
def test_kernels_are_the_definition(T, W, D, rows, bias, start, silu):
    given = draw(T, W, D, bias=bias, start=start)
    found, expected = kernels(given, silu, rows), truth(given, silu)
    assert found.keys() == expected.keys()
    contract.assert_close(found, expected, TOL)


@pytest.mark.parametrize(("W", "rows", "start"), [(4, 8, True), (4, 8, False), (2, 4, True), (1, 16, False)])
def test_packed_kernels_are_one_sequence_after_the_other(W, rows, start):
    given = draw(BOUNDS[-1], W, 3, B=1, N=len(BOUNDS) - 1, start=start)
    found = kernels(given, True, rows, torch.tensor(BOUNDS, device=DEVICE))
    contract.assert_close(found, truth(given, True, BOUNDS), TOL)


def test_nothing_is_read_past_the_end_or_from_the_neighbours():
    """Inputs that lie in the middle of NaN, with rows and batches far apart."""
    plain = draw(9, 4, 5)
    x, weight, bias, state, dy = plain
    among = lambda t: torch.nn.functional.pad(t, (2, 9, 5, 7, 1, 2), value=torch.nan)[1:-2, 5:-7, 2:-9]  # noqa: E731
    given = [among(x), weight, bias, state, among(dy)]
    assert not given[0].is_contiguous()
    contract.assert_close(kernels(given, True, 4), kernels(plain, True, 4), 0.0)


def test_any_strides():
    """Channels that are not neighbours, and a gradient that is one number."""
    x, weight, bias, state, dy = draw(9, 4, 5)
    expected = kernels([x, weight, bias, state, torch.ones_like(dy)], True, 8)
    turned = [t.mT.contiguous().mT for t in (x, weight)]
    found = kernels([*turned, bias, state, dy.new_ones(()).expand_as(dy)], True, 8)
    contract.assert_close(found, expected, 0.0)


def leaves(members: int | None = None, T: int = 6) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    M = () if members is None else (members,)
    shapes = [(2, T, 3), (3, 4), (3,), (2, 3, 3)]
    return [torch.randn(*M, *s, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE).requires_grad_() for s in shapes]


def operator(x: Any, weight: Any, bias: Any, state: Any, cu_seqlens: Any = None, *, form: str = "triton") -> Any:
    return causal_conv(x, weight, bias, initial_state=state, activation="silu", cu_seqlens=cu_seqlens, backend=form)


def gradients(y: Tensor, state: Tensor, given: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(y.sin().sum() + state.cos().sum(), given))


def test_opcheck():
    x, weight, bias, state = leaves()
    weight, bias = (t.detach()[None].requires_grad_() for t in (weight, bias))
    torch.library.opcheck(registered.forward, (x, weight, bias, state, None, True))
    torch.library.opcheck(registered.forward, (x, weight, None, None, None, False))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    assert torch.autograd.gradcheck(operator, leaves(), fast_mode=True, check_batched_grad=True)


@pytest.mark.parametrize("shared", [(), (1, 2)], ids=["own weights", "shared weights"])
def test_vmap_is_a_loop(shared):
    """Three models in one call, each with its own weights or all with one; final states included."""
    stack = leaves(members=3)
    dims = tuple(None if n in shared else 0 for n in range(4))
    given = [x.detach()[0].requires_grad_() if n in shared else x for n, x in enumerate(stack)]
    together: Any = torch.func.vmap(operator, dims)
    y, state = together(*given)
    grads = gradients(y, state, given)
    alone: list[list[Any]] = [[x if n in shared else x[m] for n, x in enumerate(given)] for m in range(3)]
    results = [operator(a[0], a[1], a[2], a[3], form="reference") for a in alone]
    looped = [torch.stack(t) for t in zip(*results, strict=True)]
    expected = [*looped, *gradients(looped[0], looped[1], given)]
    contract.assert_close(dict(enumerate([y, state, *grads])), dict(enumerate(expected)), TOL)  # type: ignore[arg-type]


@pytest.mark.parametrize("alike", [True, False])
def test_vmap_of_packed_sequences(alike):
    """Cut alike in all members, they stay one call."""
    x, weight, bias, state = leaves(members=2, T=7)
    given = [x[:, :1].detach().requires_grad_(), weight, bias, state]
    cuts = torch.tensor([[0, 2, 7], [0, 2, 7] if alike else [0, 6, 7]], device=DEVICE)
    call: Any = lambda *xs: registered.causal_conv(xs[0], xs[1], xs[2], xs[3], xs[4], "silu")  # noqa: E731
    together: Any = torch.func.vmap(call, (0, 0, 0, 0, None if alike else 0))
    y = together(*given, cuts[0] if alike else cuts)
    alone: list[Any] = [[*(t[m] for t in given), cuts[m]] for m in range(2)]
    looped = torch.stack([operator(*a, form="reference")[0] for a in alone])
    found, expected = ([t, *torch.autograd.grad(t.sin().sum(), given)] for t in (y, looped))
    contract.assert_close(dict(enumerate(found)), dict(enumerate(expected)), TOL)  # type: ignore[arg-type]


def test_compiled_is_eager():
    given = leaves()
    for dynamic in (False, True):
        compiled: Any = torch.compile(operator, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        (y, state), expected = compiled(*given), operator(*given)
        assert torch.equal(y, expected[0])
        assert torch.equal(state, expected[1])
        found = gradients(y, state, given)
        assert all(torch.equal(a, b) for a, b in zip(found, gradients(expected[0], expected[1], given), strict=True))


def test_runs_repeat_bit_for_bit():
    given = draw(40, 4, 5)
    first, second = kernels(given, True, None), kernels(given, True, None)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_too_wide_is_said():
    with pytest.raises(UserError, match="its W = 9 is more than 8"):
        causal_conv(torch.zeros(1, 2, 3, device=DEVICE), torch.zeros(3, 9, device=DEVICE), backend="triton")
