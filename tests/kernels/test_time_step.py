"""Mamba's time step: the kernels against the definition, in the interpreter or on a GPU where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.time_step import time_step

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


def draw(*shape: int, members: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """x and raw are parts of wider tensors, as a split leaves them; one time step is beyond softplus's bend."""
    g = torch.Generator().manual_seed(len(shape) + shape[-1])
    normal = lambda *s: torch.randn(*members, *s, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE)  # noqa: E731
    H, P = shape[-2:]
    x, raw = normal(*shape[:-2], H * P + 3)[..., 3:], normal(*shape[:-2], H + 1)[..., :H]
    raw.flatten()[:1] = 30.0
    made = {"x": x.unflatten(-1, (H, P)), "raw": raw, "dt_bias": normal(H), "A_log": normal(H)}
    return {n: t.requires_grad_() for n, t in made.items()}


def results(op: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(zip(("v", "g"), op(**given), strict=True))
    weights = lambda x: torch.linspace(-1, 1, x.numel(), dtype=torch.float64).to(x).view(x.shape)  # noqa: E731
    loss = sum((x * weights(x)).sum() for x in found.values())
    grads = torch.autograd.grad(loss, list(given.values()))  # type: ignore[arg-type]
    return {n: x.detach() for n, x in found.items()} | {f"d{n}": x for n, x in zip(given, grads, strict=True)}


def test_the_definition():
    given = {n: x.detach() for n, x in draw(2, 3, 4).items()}
    v, g = time_step(**given, backend="torch")
    dt = torch.nn.functional.softplus(given["raw"] + given["dt_bias"])
    assert torch.equal(v, given["x"] * dt[..., None])
    assert torch.equal(g, -given["A_log"].exp() * dt)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3, 4), (2, 3, 2, 16), (67, 5, 7)])
def test_kernels_are_the_definition(shape, poisoned, monkeypatch):
    triton = pytest.importorskip("mixassay.kernels.time_step.triton")
    for few in (False, True):
        if few:
            monkeypatch.setattr(
                triton.Shares, "of", lambda tokens, M, H, P: triton.Shares(16, -(-tokens // 16), 4, 8, 16)
            )
        given = draw(*shape)
        found, truth = (results(lambda **x: time_step(**x, backend=form), given) for form in ("triton", "torch"))  # noqa: B023
        contract.assert_close(found, truth, TOL)


def test_vmap_is_a_loop():
    pytest.importorskip("triton")
    given = draw(2, 5, 2, 3, members=(3,))

    def run(form: str) -> dict[str, Tensor]:
        one: Any = lambda *xs: time_step(*xs, backend=form)  # noqa: E731
        return results(lambda **xs: torch.func.vmap(one)(*xs.values()), given)

    contract.assert_close(run("triton"), run("torch"), TOL)


def test_opcheck():
    pytest.importorskip("triton")
    from mixassay.kernels.time_step import registered

    given = [x.detach()[None].requires_grad_() for x in draw(2, 5, 2, 3).values()]
    torch.library.opcheck(registered.forward, (*given, DTYPE))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    pytest.importorskip("triton")
    call: Any = lambda *xs: time_step(*xs, backend="triton")  # noqa: E731
    given = tuple(draw(3, 2, 3).values())
    assert torch.autograd.gradcheck(call, given, fast_mode=True, check_batched_grad=True)


def test_under_autocast_the_decay_stays_wide():
    pytest.importorskip("triton")
    given = {n: x.detach().float() for n, x in draw(2, 2, 3).items()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        v, g = time_step(**given, backend="triton")
    assert (v.dtype, g.dtype) == (torch.bfloat16, torch.float32)


def test_what_does_not_fit_is_named():
    ones = torch.ones
    with pytest.raises(UserError, match=r"raw has shape \[2, 3\], expected that of x without its channels, \[2, 4\]"):
        time_step(ones(2, 4, 5), ones(2, 3), ones(4), ones(4))
    with pytest.raises(UserError, match=r"A_log has shape \[3\], expected \[H\] = \[4\]"):
        time_step(ones(2, 4, 5), ones(2, 4), ones(4), ones(3))
