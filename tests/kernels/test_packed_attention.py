"""Attention of packed projections: the kernels against torch's, in the interpreter or on a GPU where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.softmax_attention import packed_attention, softmax_attention

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


def draw(*shape: int) -> Tensor:
    g = torch.Generator().manual_seed(shape[-4] + shape[-1])
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE).requires_grad_()


def results(op: Any, qkv: Tensor) -> dict[str, Tensor]:
    o = op(qkv)
    weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).to(o).view(o.shape)
    (grad,) = torch.autograd.grad(o, [qkv], weights)
    return {"o": o.detach(), "dqkv": grad}


def test_torchs_form_is_the_definition():
    qkv = draw(2, 5, 3, 2, 4)
    truth = softmax_attention(*qkv.unbind(2), window=3, backend="reference")
    assert contract.error(packed_attention(qkv, window=3), truth) <= TOL


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 5, 2, 4), (1, 33, 1, 3), (2, 70, 2, 16)])
def test_kernels_are_the_definition(sizes, poisoned, monkeypatch):
    triton = pytest.importorskip("mixassay.kernels.softmax_attention.triton")
    B, T, H, K = sizes
    for few in (False, True):
        if few:
            small = triton.Plan(*3 * [triton.Launch(32, 16, 1, 1)])
            monkeypatch.setattr(triton, "plan", lambda *_, small=small: small)
        found, truth = (
            results(lambda x: packed_attention(x, scale=0.7, backend=form), draw(B, T, 3, H, K))  # noqa: B023
            for form in ("triton", "torch")
        )
        contract.assert_close(found, truth, TOL)


def test_vmap_is_a_loop():
    pytest.importorskip("triton")
    qkv = draw(3, 2, 9, 3, 2, 4)

    def run(form: str) -> dict[str, Tensor]:
        return results(torch.func.vmap(lambda x: packed_attention(x, backend=form)), qkv)

    contract.assert_close(run("triton"), run("torch"), TOL)


def test_opcheck():
    pytest.importorskip("triton")
    from mixassay.kernels.softmax_attention import registered

    torch.library.opcheck(registered.forward, (draw(2, 9, 3, 2, 4), 0.5))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    pytest.importorskip("triton")
    call: Any = lambda x: packed_attention(x, backend="triton")  # noqa: E731
    assert torch.autograd.gradcheck(call, (draw(1, 5, 3, 1, 2),), fast_mode=True, check_batched_grad=True)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="the interpreter's bfloat16 products are wrong")
@pytest.mark.parametrize("K", [16, 32, 64, 128])
def test_bfloat16_on_a_gpu(K):
    qkv = draw(3, 300, 3, 2, K).detach().bfloat16()
    found = results(packed_attention, qkv.clone().requires_grad_())
    truth = results(lambda x: packed_attention(x, backend="torch"), qkv.double().requires_grad_())
    contract.assert_close({n: x.double() for n, x in found.items()}, truth, 2e-2)


def test_what_does_not_fit_is_named():
    with pytest.raises(UserError, match=r"qkv has shape \[1, 2, 2, 1, 4\], expected \[B, T, 3, H, K\]"):
        packed_attention(torch.ones(1, 2, 2, 1, 4))
    pytest.importorskip("triton")
    with pytest.raises(UserError, match="it has no window"):
        packed_attention(draw(1, 4, 3, 1, 4), window=2, backend="triton")
