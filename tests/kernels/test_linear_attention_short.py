"""The Triton kernels for short rows against the definition: in the interpreter, or on a GPU where there is one."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from mixassay.kernels.linear_attention import reference, registered, short_triton

from . import contract, short
from .short import DEVICE, DTYPE, GPU

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
TOL = 2e-5 if GPU else 1e-12
NAMES = ("q", "k", "v", "log_decay")


@dataclass(frozen=True)
class Case:
    T: int
    heads: tuple[int, int] = (1, 2)  # G, H
    dims: tuple[int, int] = (16, 16)  # K, V
    gate: str = "weak"
    B: int = 1
    how: short_triton.Launch | None = None

    def __str__(self) -> str:
        (G, H), (K, V) = self.heads, self.dims
        return f"T{self.T}-B{self.B}-G{G}H{H}-K{K}V{V}-{self.gate}" + ("" if self.how is None else f"-HB{self.how.HB}")


TWO, ONE = short_triton.Launch(16, 2, 1, 1), short_triton.Launch(64, 1, 4, 1)  # heads of a program
CASES = (
    Case(1, (1, 1), B=2),
    Case(1, (2, 6), (5, 3), "reset"),
    Case(16, (1, 8), gate="zero"),
    Case(17, (1, 3), (20, 8), "mixed", 2),  # three heads in a batch of four
    Case(33, (3, 3), (8, 16), "strong", 2),  # three groups in a batch of four
    Case(33, (2, 4), (16, 24), "none", 2),
    Case(40, (1, 3), (3, 5), "mixed", 2, TWO),  # three heads in two programs, whose parts are added
    Case(40, (3, 3), (16, 16), "weak", 2, TWO),
    Case(63, (1, 1), (32, 16), "weak"),
    Case(64, (1, 4), (16, 16), "reset"),
    Case(65, (4, 4), (16, 16), "mixed"),
    Case(65, (1, 2), (64, 48), "reset", 1, ONE),
    Case(128, (1, 2), (16, 32), "weak"),
    Case(256, (1, 8), (16, 16), "mixed"),
)


def inputs(case: Case, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    return short.inputs(case, dtype)


def truth(x: dict[str, Any]) -> dict[str, Tensor]:
    return short.truth(reference.linear_attention, NAMES, x)


def kernels(x: dict[str, Any], how: short_triton.Launch | None = None) -> dict[str, Tensor]:
    return short.kernels(short_triton, NAMES, x, how)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_recurrence(case):
    x = inputs(case)
    expected, found = truth(x), kernels(x, case.how)
    assert found.keys() == expected.keys()
    contract.assert_close(found, expected, TOL)


@pytest.mark.skipif(not GPU, reason="the interpreter cannot multiply in half precision")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_precision_is_near(case, dtype):
    x = inputs(case, dtype)
    contract.assert_close(kernels(x, case.how), truth(x), 4e-2)


def test_nothing_is_read_past_the_end_or_from_the_neighbours():
    short.assert_nothing_beside_is_read(kernels, inputs(Case(20, (1, 3), (5, 3))))


def test_runs_repeat_bit_for_bit():
    x = inputs(Case(40, (1, 3)))
    first, second = kernels(x, TWO), kernels(x, TWO)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_a_sequence_does_not_depend_on_its_batch():
    short.assert_sequences_are_alone(kernels, inputs(Case(20, (3, 3), B=2)))


@pytest.mark.parametrize(
    ("T", "width", "packed", "state", "final", "taken"),
    [
        (20, 16, False, False, False, True),
        (20, 16, True, False, False, False),
        (20, 16, False, True, False, False),
        (20, 16, False, False, True, False),
        (20, 48, False, False, False, False),
        (300, 3, False, False, False, False),
    ],
)
def test_short_rows_are_taken_where_nothing_else_is_asked(monkeypatch, T, width, packed, state, final, taken):
    """Both ways, the same."""
    if GPU:  # float32 is exact there, for which the kernels are not meant
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    calls = []
    for name in ("forward", "backward"):
        own = getattr(short_triton, name)
        monkeypatch.setattr(short_triton, name, lambda *a, name=name, own=own: (calls.append(name), own(*a))[1])
    x = inputs(Case(T, (1, 1), (width, width)))
    initial = torch.zeros(1, 1, width, width, dtype=DTYPE, device=DEVICE) if state else None
    cu = torch.tensor([0, T], device=DEVICE) if packed else None
    q = x["q"].requires_grad_()
    o, last = registered.linear_attention(q, x["k"], x["v"], x["log_decay"], 0.3, initial, cu, final)
    ((o * x["do"]).sum() + (0.0 if last is None else last.sum())).backward()
    assert calls == (["forward", "backward"] if taken else [])


def test_exact_float32_and_wide_heads_go_another_way():
    assert short_triton.serves(torch.bfloat16, 256, 32, 32)
    assert not short_triton.serves(torch.float32, 256, 32, 32)
    assert not short_triton.serves(torch.bfloat16, 257, 32, 32)
    assert not short_triton.serves(torch.bfloat16, 256, 33, 32)


def test_vmap_is_a_loop():
    stack = [t.requires_grad_() for t in leaves(2)]
    together = torch.func.vmap(operator)(*stack)
    grads = torch.autograd.grad(together.sin().sum(), stack)
    for m in range(2):
        alone = [t.detach()[m].clone().requires_grad_() for t in stack]
        o = operator(*alone)
        expected = [o, *torch.autograd.grad(o.sin().sum(), alone)]
        assert all(torch.equal(t[m], u) for t, u in zip((together, *grads), expected, strict=True))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    alone = [t[0].requires_grad_() for t in leaves(1)]
    assert torch.autograd.gradcheck(operator, alone, fast_mode=True, check_batched_grad=True)


def leaves(members: int) -> list[Tensor]:
    cases = [inputs(Case(18 + m, (1, 2), (3, 5), B=1), torch.bfloat16 if GPU else DTYPE) for m in range(members)]
    return [torch.stack([x[n][:, :18] for x in cases]) for n in NAMES]


def operator(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    o, _, _ = registered.forward(q, k, v, g, None, None, 0.3, False)
    return o
