"""BaseConv's elementwise part: the kernels against the definition, in the interpreter or on a GPU if there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.gated_conv import gated_conv

from . import contract

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 1e-5) if GPU else (torch.float64, 1e-12)


@pytest.fixture
def poisoned():
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(B: int, T: int, D: int, W: int, members: tuple[int, ...] = ()) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(T + D)
    normal = lambda *s: torch.randn(*members, *s, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE)  # noqa: E731
    shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,), "p": (B, T, D), "offset": (D,)}
    return {name: normal(*shape).requires_grad_() for name, shape in shapes.items()}


def results(op: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    y = op(**given)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y).view(y.shape)
    grads = torch.autograd.grad(y, list(given.values()), weights)
    return {"y": y.detach()} | {f"d{n}": x for n, x in zip(given, grads, strict=True)}


def test_the_definition():
    x, weight, bias, p, offset = (given.detach() for given in draw(1, 3, 2, 2).values())
    y = gated_conv(x, weight, bias, p, offset, backend="torch")
    before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    truth = (weight[:, 0] * before + weight[:, 1] * x + bias) * (p + offset) + x
    assert contract.error(y, truth) <= TOL


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 5, 6, 3), (3, 2, 4, 4), (2, 37, 20, 3)])
def test_kernels_are_the_definition(sizes, poisoned, monkeypatch):
    triton = pytest.importorskip("mixassay.kernels.gated_conv.triton")
    for few in (False, True):
        if few:
            monkeypatch.setattr(triton, "cut", lambda B, T, D, share: (8, -(-T // 8), 4, 32))
        given = draw(*sizes)
        found, truth = (results(lambda **x: gated_conv(**x, backend=form), given) for form in ("triton", "torch"))  # noqa: B023
        contract.assert_close(found, truth, TOL)


def test_vmap_is_a_loop():
    pytest.importorskip("triton")
    given = draw(2, 5, 3, 3, members=(3,))

    def run(form: str) -> dict[str, Tensor]:
        one: Any = lambda *xs: gated_conv(*xs, backend=form)  # noqa: E731
        return results(lambda **xs: torch.func.vmap(one)(*xs.values()), given)

    contract.assert_close(run("triton"), run("torch"), TOL)


def test_opcheck():
    pytest.importorskip("triton")
    from mixassay.kernels.gated_conv import registered

    given = [x.detach()[None].requires_grad_() for x in draw(2, 5, 3, 3).values()]
    torch.library.opcheck(registered.forward, (*given, DTYPE))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    pytest.importorskip("triton")
    call: Any = lambda *xs: gated_conv(*xs, backend="triton")  # noqa: E731
    given = tuple(draw(2, 3, 2, 2).values())
    assert torch.autograd.gradcheck(call, given, fast_mode=True, check_batched_grad=True)


def test_what_does_not_fit_is_named():
    x, weight, bias, p, offset = draw(2, 5, 3, 3).values()
    with pytest.raises(UserError, match=r"p has shape \[2, 4, 3\], expected \[B, T, D\] = \[2, 5, 3\]"):
        gated_conv(x, weight, bias, p[:, :4], offset)
