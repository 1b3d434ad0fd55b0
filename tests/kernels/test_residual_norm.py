"""A branch joins the stream, which is normed for the next: the kernels against the definition, in the interpreter or on
a GPU where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.norm import layer_norm, rms_norm
from mixassay.kernels.residual_norm import residual_norm

from . import contract

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 1e-5) if GPU else (torch.float64, 1e-12)
KINDS = {"layer": ("bias",), "rms": (), "inner layer": ("bias", "weight2", "bias2"), "inner rms": ("weight2",)}


@pytest.fixture
def poisoned():
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(kind: str, shape: tuple[int, ...], members: tuple[int, ...] = ()) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(len(kind) + shape[-1])
    normal = lambda *s: torch.randn(*members, *s, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE)  # noqa: E731
    made = {"x": normal(*shape), "y": normal(*shape)} | {n: normal(shape[-1]) for n in ("weight", *KINDS[kind])}
    return {n: t.requires_grad_() for n, t in made.items()}


def call(backend: str, x: Tensor, y: Tensor, weight: Tensor, **more: Tensor) -> tuple[Tensor, Tensor]:
    inner = (more["weight2"], more.get("bias2")) if "weight2" in more else None
    return residual_norm(x, y, weight, more.get("bias"), inner=inner, at=more.get("at"), backend=backend)


def results(op: Any, given: dict[str, Tensor], used: str = "sh") -> dict[str, Tensor]:
    """`used`: which of s and h the loss looks at."""
    found = dict(zip("sh", op(**given), strict=True))
    loss = torch.zeros((), dtype=DTYPE, device=DEVICE)
    for name in used:
        x = found[name]
        loss = loss + (x * torch.linspace(-1, 1, x.numel(), dtype=torch.float64).to(x).view(x.shape)).sum()
    grads = torch.autograd.grad(loss, list(given.values()), allow_unused=True, materialize_grads=True)
    return {n: x.detach() for n, x in found.items()} | {f"d{n}": g for n, g in zip(given, grads, strict=True)}


def test_the_definition():
    given = {n: x.detach() for n, x in draw("inner layer", (3, 6)).items()}
    t = given["x"] + given["y"]
    s = t + layer_norm(t, given["weight2"], given["bias2"], backend="reference")
    h = layer_norm(s, given["weight"], given["bias"], backend="reference")
    contract.assert_close(dict(zip("sh", call("torch", **given), strict=True)), {"s": s, "h": h}, TOL)
    given = {n: x.detach() for n, x in draw("rms", (3, 6)).items()}
    s, h = call("torch", **given)
    assert torch.equal(s, given["x"] + given["y"])
    assert torch.equal(h, rms_norm(s, given["weight"], backend="torch"))


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_the_definition(kind, poisoned):
    pytest.importorskip("triton")
    for shape in ((1,), (5, 7), (2, 3, 6), (3, 70), (1, 300)):
        for used in ("sh", "h", "s"):
            given = draw(kind, shape)
            found, truth = (results(lambda **x: call(form, **x), given, used) for form in ("triton", "torch"))  # noqa: B023
            contract.assert_close(found, truth, TOL)


def test_some_tokens_are_wanted():
    """One of them twice: its gradients add up."""
    pytest.importorskip("triton")
    given, at = draw("inner layer", (2, 5, 6)), torch.tensor([[0, 3, 3], [4, 1, 0]], device=DEVICE)
    found, truth = (results(lambda **x: call(form, **x, at=at), given) for form in ("triton", "torch"))  # noqa: B023
    assert found["h"].shape == (2, 3, 6)
    contract.assert_close(found, truth, TOL)
    every = call("torch", **given)
    assert all(torch.equal(truth[n], x[torch.arange(2)[:, None], at.cpu()]) for n, x in zip("sh", every, strict=True))


def test_many_tokens_share_a_program(poisoned, monkeypatch):
    triton = pytest.importorskip("mixassay.kernels.residual_norm.triton")
    few = lambda x, groups, M: triton.Shares(x.numel() // x.shape[-1] // M, 16, 5, 4, 8, 1)  # noqa: E731
    monkeypatch.setattr(triton.Shares, "of", few)
    given = draw("inner layer", (67, 6))
    found, truth = (results(lambda **x: call(form, **x), given) for form in ("triton", "torch"))  # noqa: B023
    contract.assert_close(found, truth, TOL)


@pytest.mark.parametrize("kind", ["inner layer", "rms"])
def test_vmap_is_a_loop(kind):
    pytest.importorskip("triton")
    given = draw(kind, (2, 5, 6), members=(3,))

    def run(form: str) -> dict[str, Tensor]:
        one: Any = lambda *xs: call(form, **dict(zip(given, xs, strict=True)))  # noqa: E731
        return results(lambda **xs: torch.func.vmap(one)(*xs.values()), given)

    contract.assert_close(run("triton"), run("torch"), TOL)


def test_opcheck():
    pytest.importorskip("triton")
    from mixassay.kernels.residual_norm import registered

    given = {n: x.detach()[None].requires_grad_() for n, x in draw("inner layer", (2, 5, 6)).items()}
    x, y, weight, *others = given.values()
    torch.library.opcheck(registered.forward, (x, y, weight, *others, 1e-5, DTYPE))
    torch.library.opcheck(registered.forward, (x, y, weight, None, None, None, 1e-5, DTYPE))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    pytest.importorskip("triton")
    given = draw("inner layer", (2, 4))
    one: Any = lambda *xs: call("triton", **dict(zip(given, xs, strict=True)))  # noqa: E731
    assert torch.autograd.gradcheck(one, tuple(given.values()), fast_mode=True, check_batched_grad=True)


def test_under_autocast_the_stream_stays_wide():
    """The branch comes in bfloat16 and h goes out in it; the gradient of the branch has its dtype."""
    pytest.importorskip("triton")
    given = {n: x.detach().float().requires_grad_() for n, x in draw("inner layer", (2, 3, 6)).items()}
    y = given["y"].detach().bfloat16().requires_grad_()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        s, h = call("triton", **given | {"y": y})
        wide = residual_norm(given["x"], y, given["weight"], given["bias"], wide=True, backend="triton")[1]
    assert wide.dtype == torch.float32
    assert (s.dtype, h.dtype) == (torch.float32, torch.bfloat16)
    (s.sum() + h.float().square().sum()).backward()
    assert y.grad is not None
    assert y.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": torch.ones(6)}, r"y has shape \[6\], expected that of x, \[2, 6\]"),
        ({"bias": torch.ones(5)}, r"bias has shape \[5\], expected \[D\] = \[6\]"),
        ({"at": torch.zeros(2, 1)}, r"at has shape \[2, 1\] and dtype torch.float32, expected int64 \[B, Q\]"),
        ({"inner": (torch.ones(6), torch.ones(6))}, "expected two layer norms or two RMS norms"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    given: dict[str, Any] = {"x": torch.ones(2, 6), "y": torch.ones(2, 6), "weight": torch.ones(6)} | changed
    with pytest.raises(UserError, match=message):
        residual_norm(**given)
