"""The head with its cross-entropy: the torch form and the Triton kernels against the definition in float64."""

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_score

from . import contract

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 2e-5) if GPU else (torch.float64, 1e-12)
SIZES = [(1, 2, 1), (5, 33, 3), (64, 70, 16), (130, 64, 20), (33, 200, 64)]  # R, V, D


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
        from mixassay.kernels.linear_cross_entropy import triton

        small = triton.Launch(16, 32, 4, 1)
        request.getfixturevalue("monkeypatch").setattr(triton, "plan", lambda *_: triton.Plan(small, small, 8))
    return request.param


def inputs(
    R: int, V: int, D: int, members: int | None = None, dtype: torch.dtype = DTYPE
) -> tuple[Tensor, Tensor, Tensor]:
    """About a quarter of the rows has no label; logits reach about +-10."""
    draw = torch.Generator().manual_seed(R)
    M = () if members is None else (members,)
    h = torch.randn(*M, R, D, generator=draw, dtype=torch.float64) * 3 / D**0.5
    weight = torch.randn(*M, V, D, generator=draw, dtype=torch.float64)
    labels = torch.randint(V, (*M, R), generator=draw)
    labels = torch.where(torch.rand(*M, R, generator=draw) < 0.25, -100, labels)
    h, weight = (x.to(dtype).to(DEVICE).requires_grad_() for x in (h, weight))
    return h, weight, labels.to(DEVICE)


def exact(h: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The definition in float64."""
    return values(h.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), labels, "reference")


def values(h: Tensor, weight: Tensor, labels: Tensor, backend: str) -> dict[str, Tensor]:
    loss = linear_cross_entropy(h, weight, labels, backend=backend)
    share = torch.linspace(0.5, 2, loss.shape[-1], dtype=torch.float64).to(loss)
    dh, dweight = torch.autograd.grad((loss * share).sum(), (h, weight))
    return {"loss": loss, "dh": dh, "dweight": dweight}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_definition(backend, size):
    h, weight, labels = inputs(*size)
    truth = exact(h, weight, labels)
    contract.assert_close(values(h, weight, labels, backend), truth, TOL)


def test_rows_without_a_label_count_nothing(backend):
    h, weight, labels = inputs(20, 30, 8)
    none = torch.full_like(labels, -100)
    found = values(h, weight, none, backend)
    assert all((x == 0).all() for x in found.values())


def test_large_logits_do_not_overflow(backend):
    h, weight, labels = inputs(20, 70, 8)
    h = (h.detach() * 1e3).requires_grad_()
    truth = exact(h, weight, labels)
    contract.assert_close(values(h, weight, labels, backend), truth, 10 * TOL)


def test_a_stack_is_a_loop(backend):
    h, weight, labels = inputs(40, 70, 8, members=3)
    loss = torch.func.vmap(lambda h, w, y: linear_cross_entropy(h, w, y, backend=backend))(h, weight, labels)
    grads = torch.autograd.grad(loss.sin().sum(), (h, weight))
    for m in range(3):
        alone = [x.detach()[m].clone().requires_grad_() for x in (h, weight)]
        one = linear_cross_entropy(alone[0], alone[1], labels[m], backend=backend)
        expected = [one, *torch.autograd.grad(one.sin().sum(), alone)]
        for found, truth in zip((loss, *grads), expected, strict=True):
            assert contract.error(found[m], truth) <= TOL


def test_scores_say_whether_the_label_is_likeliest(backend):
    h, weight, labels = inputs(130, 70, 8)
    labels[::3] = (h @ weight.t()).argmax(-1)[::3]
    loss, right = linear_cross_entropy_score(h, weight, labels, backend=backend)
    contract.assert_close({"loss": loss}, {"loss": linear_cross_entropy(h, weight, labels, backend="reference")}, TOL)
    assert torch.equal(right, (h @ weight.t()).argmax(-1) == labels)
    assert right[::3].all()
    assert not right[labels == -100].any()


def test_of_equally_likely_words_the_first_counts(backend):
    h, weight = torch.ones(2, 4, dtype=DTYPE, device=DEVICE), torch.ones(70, 4, dtype=DTYPE, device=DEVICE)
    _, right = linear_cross_entropy_score(h, weight, torch.tensor([0, 69], device=DEVICE), backend=backend)
    assert right.tolist() == [True, False]


def test_the_kernels_are_an_operator():
    pytest.importorskip("triton")
    from mixassay.kernels.linear_cross_entropy import registered

    stack = inputs(5, 40, 3, members=2)
    torch.library.opcheck(registered.forward, (*stack, -100, DTYPE))
    torch.library.opcheck(registered.score, (*(x.detach() for x in stack), -100, DTYPE))
    if not GPU:
        h, weight, labels = inputs(4, 5, 3)
        f = lambda h, weight: linear_cross_entropy(h, weight, labels, backend="triton")  # noqa: E731
        assert torch.autograd.gradcheck(f, (h, weight), fast_mode=True, check_batched_grad=True)


def under_autocast(h: Tensor, weight: Tensor, labels: Tensor, backend: str, size: float = 1) -> dict[str, Tensor]:
    """Gradients, outside of autocast, of `size` times what `values` differentiates, over `size`."""
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = linear_cross_entropy(h, weight, labels, backend=backend)
    share = size * torch.linspace(0.5, 2, len(loss), dtype=torch.float64).to(loss)
    dh, dweight = torch.autograd.grad((loss * share).sum(), (h, weight))
    return {"loss": loss, "dh": dh / size, "dweight": dweight / size}


def test_autocast_costs_no_more_digits_than_float16(backend):
    """bfloat16 would be off by 4e-3. Gradients of 1e-9, which float16 does not have, count as well."""
    h, weight, labels = inputs(130, 200, 20, dtype=torch.float32)
    truth = exact(h, weight, labels)
    for size in (1, 1e-9):
        found = under_autocast(h, weight, labels, backend, size)
        assert {x.dtype for x in found.values()} == {torch.float32}
        contract.assert_close(found, truth, 1e-3)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy_score(h, weight, labels, backend=backend)
    assert contract.error(loss, truth["loss"]) <= 1e-3


def relative(found: Tensor, truth: Tensor) -> float:
    """Root mean square of the error, relative to the truth's."""
    return ((found.double() - truth).norm() / truth.norm()).item()


def test_what_is_learnt_has_the_gradient_of_the_rounded_operands():
    """At a probability of 0.999 the gradient of h is a small difference of vectors, both of which must be rounded."""
    pytest.importorskip("triton")
    _, weight, labels = inputs(64, 70, 20, dtype=torch.float32)
    labels = labels.clamp(min=0)
    h = (4 * torch.nn.functional.normalize(weight.detach()[labels], dim=1)).requires_grad_()
    truth = exact(h.half(), weight.half(), labels)
    assert 5e-4 < truth["loss"].median() < 2e-3
    for name, found in under_autocast(h, weight, labels, "triton").items():
        assert relative(found, truth[name]) < 1e-3, name


@pytest.mark.skipif(not GPU, reason="the interpreter's bfloat16 products are wrong")
@pytest.mark.parametrize("D", [16, 32, 64, 128])
def test_bfloat16_on_a_gpu(D):
    h, weight, labels = inputs(1000, 8192, D, dtype=torch.bfloat16)
    truth = exact(h, weight, labels)
    for name, found in values(h, weight, labels, "triton").items():
        assert relative(found, truth[name]) < 1e-2, name


def test_wrong_arguments_are_named():
    h = torch.zeros(5, 3)
    with pytest.raises(UserError, match=r"weight has shape \[7, 4\], expected \[V, D\] = \[7, 3\]"):
        linear_cross_entropy(h, torch.zeros(7, 4), torch.zeros(5).long())
    with pytest.raises(UserError, match=r"labels has shape \[4\] and dtype torch.int64, expected int64 \[R\] = \[5\]"):
        linear_cross_entropy(h, torch.zeros(7, 3), torch.zeros(4).long())
