"""Norms: the definition against torch's own, and the Triton kernels against the definition: in the interpreter, or on a
GPU where there is one."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.norm import l2_norm, layer_norm, rms_norm

from . import contract

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 1e-5) if GPU else (torch.float64, 1e-12)  # there are no float64 kernels for a GPU


@pytest.fixture
def poisoned():
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(shape: tuple[int, ...], gates: str = "", members: tuple[int, ...] = ()) -> dict[str, Any]:
    """x, weight and the gates named by their first letters."""
    g = torch.Generator().manual_seed(len(shape) + shape[-1])
    normal = lambda *s: torch.randn(*members, *s, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE)  # noqa: E731
    made = {"x": normal(*shape), "weight": normal(shape[-1])}
    made |= {n: normal(*shape) for n in ("before", "after") if n[0] in gates}
    return {n: t.requires_grad_() for n, t in made.items()}


def results(op: Any, given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    y = op(**given, **options)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y).view(y.shape)
    grads = torch.autograd.grad(y, list(given.values()), weights)
    return {"y": y.detach()} | {f"d{n}": g for n, g in zip(given, grads, strict=True)}


def test_the_definition_is_torchs():
    given = draw((3, 4, 12))
    x, weight = given["x"].double(), given["weight"].double()
    truth = torch.nn.functional.rms_norm(x, (12,), weight, eps=1e-5)
    assert contract.error(rms_norm(x, weight, backend="torch"), truth) <= 1e-13
    truth = torch.nn.functional.rms_norm(x.view(3, 4, 3, 4), (4,), eps=1e-5).view(x.shape) * weight
    assert contract.error(rms_norm(x, weight, groups=3, backend="torch"), truth) <= 1e-13
    assert contract.error(l2_norm(x, eps=0, backend="torch"), torch.nn.functional.normalize(x, dim=-1)) <= 1e-13


def test_gates_stand_before_and_after():
    given = draw((3, 12), "ba")
    x, weight, before, after = (given[n].double() for n in ("x", "weight", "before", "after"))
    silu = torch.nn.functional.silu
    truth = rms_norm(x * silu(before), weight, backend="torch") * silu(after)
    assert contract.error(rms_norm(x, weight, before=before, after=after, backend="torch"), truth) <= 1e-13


def test_half_inputs_are_computed_in_float32():
    half = {n: t.detach().to(torch.bfloat16) for n, t in draw((3, 12), "ba").items()}
    y = rms_norm(**half, backend="torch")
    assert y.dtype == torch.float32
    assert torch.equal(y, rms_norm(**{n: t.float() for n, t in half.items()}, backend="torch"))


SHAPES = [((1,), 1), ((5, 7), 1), ((2, 3, 6), 3), ((70, 12), 4), ((3, 300), 1), ((2, 40, 3, 5), 1)]


@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_kernels_are_the_definition(shape, groups, poisoned):
    pytest.importorskip("triton")
    for gates in ("", "b", "a", "ba"):
        given = draw(shape, gates)
        found, truth = (results(rms_norm, given, groups=groups, backend=form) for form in ("triton", "torch"))
        contract.assert_close(found, truth, TOL)
    x = {"x": given["x"]}
    found, truth = (results(l2_norm, x, backend=form) for form in ("triton", "torch"))
    contract.assert_close(found, truth, TOL)
    with_bias = {n: given[n] for n in ("x", "weight")} | {"bias": given["weight"].detach().cos().requires_grad_()}
    found, truth, by_torch = (results(layer_norm, with_bias, backend=form) for form in ("triton", "reference", "torch"))
    contract.assert_close(found, truth, TOL)
    contract.assert_close(by_torch, truth, TOL)


def test_many_tokens_share_a_program(poisoned, monkeypatch):
    triton = pytest.importorskip("mixassay.kernels.norm.triton")
    few = lambda x, groups, M: triton.Shares(x.numel() // x.shape[-1] // M, 16, 5, 4, 8, 1)  # noqa: E731
    monkeypatch.setattr(triton.Shares, "of", few)
    given = draw((67, 12), "ba")
    found, truth = (results(rms_norm, given, groups=2, backend=form) for form in ("triton", "torch"))
    contract.assert_close(found, truth, TOL)


def test_a_skip_is_added_first():
    pytest.importorskip("triton")
    for groups, heads in ((1, 1), (1, 3), (2, 4)):
        given = draw((2, 5, 12), "b", members=())
        more = {"s": given["x"].detach().cos().requires_grad_(), "gain": given["weight"].detach()[:heads].sin()}
        given |= more | {"gain": more["gain"].requires_grad_()}
        call: Any = lambda form, s, gain, **x: rms_norm(**x, skip=(s, gain), groups=groups, backend=form)  # noqa: B023, E731
        found, truth = (results(functools.partial(call, form), given) for form in ("triton", "torch"))
        contract.assert_close(found, truth, TOL)
        wide = given | {"x": given["x"] + given["gain"].repeat_interleave(12 // heads) * given["s"]}
        plain = rms_norm(wide["x"], wide["weight"], before=wide["before"], groups=groups, backend="torch")
        assert contract.error(truth["y"], plain) <= TOL


def test_parts_of_wider_tensors():
    """Slices in the middle of NaN, heads that lie side by side in them, and an expanded gradient."""
    pytest.importorskip("triton")
    plain = draw((2, 3, 4, 5), "ba")
    apart = lambda t: torch.nn.functional.pad(t.flatten(2), (3, 2), value=torch.nan)[..., 3:-2].view(t.shape)  # noqa: E731
    views = {n: t if n == "weight" else apart(t.detach()).requires_grad_() for n, t in plain.items()}
    views["after"] = plain["after"].detach().mT.contiguous().mT.requires_grad_()
    assert not views["x"].is_contiguous()
    contract.assert_close(results(rms_norm, views, backend="triton"), results(rms_norm, plain, backend="triton"), 0.0)
    for shape in ((), (5,)):
        ones = torch.ones(shape, dtype=DTYPE, device=DEVICE).expand(2, 3, 4, 5)
        grads = [
            torch.autograd.grad(rms_norm(**plain, backend="triton"), list(plain.values()), dy)
            for dy in (ones, ones.contiguous())
        ]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weight"])
def test_vmap_is_a_loop(shared):
    """Three models in one call, each with its own weight or all with one."""
    pytest.importorskip("triton")
    given = draw((2, 5, 6), "ba", members=(3,))
    if shared:
        given["weight"] = given["weight"].detach()[0].requires_grad_()
    dims = tuple(None if shared and n == "weight" else 0 for n in given)

    def run(form: str) -> dict[str, Tensor]:
        call: Any = lambda *xs: rms_norm(**dict(zip(given, xs, strict=True)), groups=2, backend=form)  # noqa: E731
        return results(lambda **xs: torch.func.vmap(call, dims)(*xs.values()), given)

    contract.assert_close(run("triton"), run("torch"), TOL)
    stacked: Any = torch.func.vmap(lambda x: l2_norm(x, backend="triton"))
    assert contract.error(stacked(given["x"]), l2_norm(given["x"], backend="torch")) <= TOL


def test_opcheck():
    pytest.importorskip("triton")
    from mixassay.kernels.norm import registered

    given = draw((2, 5, 6), "ba")
    weight = given["weight"].detach()[None].requires_grad_()
    x, before, after = (given[n].detach()[None].requires_grad_() for n in ("x", "before", "after"))
    torch.library.opcheck(
        registered.forward, (x, weight, weight.detach(), before, after, None, None, 2, 1e-5, True, True, DTYPE)
    )
    torch.library.opcheck(registered.forward, (x, None, None, None, None, None, None, 1, 1e-5, False, False, DTYPE))


@pytest.mark.skipif(GPU, reason="float64 only in the interpreter")
def test_gradcheck():
    pytest.importorskip("triton")
    given = draw((2, 4), "ba")
    call: Any = lambda *xs: rms_norm(**dict(zip(given, xs, strict=True)), backend="triton")  # noqa: E731
    assert torch.autograd.gradcheck(call, tuple(given.values()), fast_mode=True, check_batched_grad=True)


def test_compiled_is_eager():
    pytest.importorskip("triton")
    given = draw((3, 4, 6), "b")
    call: Any = lambda **xs: rms_norm(**xs, backend="triton")  # noqa: E731
    for dynamic in (False, True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        contract.assert_close(results(compiled, given), results(call, given), 0.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.ones(5)}, r"weight has shape \[5\], expected \[D\] = \[6\]"),
        ({"after": torch.ones(6)}, r"after has shape \[6\], expected that of x, \[2, 6\]"),
        ({"groups": 4}, "groups = 4 does not divide D = 6"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    given: dict[str, Any] = {"x": torch.ones(2, 6), "weight": torch.ones(6)} | changed
    with pytest.raises(UserError, match=message):
        rms_norm(**given)


@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_of_the_kernels_result(autocast):
    """Without autocast wide, as the definition's; under autocast what the next product rounds it to."""
    pytest.importorskip("triton")
    x = draw((2, 6))["x"].detach().half()
    weight = torch.ones(6, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        normed, unit = rms_norm(x, weight, backend="triton"), l2_norm(x, backend="triton")
    assert normed.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert unit.dtype == (torch.float16 if autocast else torch.float32)
    assert contract.error(normed, rms_norm(x, weight, backend="torch").to(normed.dtype)) <= 1e-2
    assert contract.error(unit, l2_norm(x, backend="torch").to(unit.dtype)) <= 1e-3
