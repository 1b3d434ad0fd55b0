"""What a model begins with: the kernels against the definition, in the interpreter or on a GPU where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.embedding import embedding

from . import contract

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE, TOL = (torch.float32, 1e-5) if GPU else (torch.float64, 1e-12)
V = 7
KINDS = ("", "position bias", "position bias keep", "keep")


@pytest.fixture
def poisoned():
    """Fresh memory is full of NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(kind: str, B: int, T: int, D: int, members: tuple[int, ...] = ()) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(B * T + D)
    normal = lambda *s: torch.randn(*members, *s, generator=g, dtype=torch.float64).to(DTYPE).to(DEVICE)  # noqa: E731
    made = {"table": normal(V, D), "position": normal(T, D), "weight": normal(D), "bias": normal(D)}
    made = {n: x.requires_grad_() for n, x in made.items() if n in ("table", "weight") or n in kind}
    made["tokens"] = torch.randint(V, (*members, B, T), generator=g).to(DEVICE)
    if "keep" in kind:
        made["keep"] = (torch.rand(*members, B, T, D, generator=g) < 0.7).to(DEVICE)
    return made


def call(backend: str, tokens: Tensor, table: Tensor, weight: Tensor, **more: Tensor) -> tuple[Tensor, Tensor]:
    others = more.get("position"), weight, more.get("bias")
    return embedding(tokens, table, *others, keep=more.get("keep"), p=0.3, backend=backend)


def results(op: Any, given: dict[str, Tensor], used: str = "xh") -> dict[str, Tensor]:
    """`used`: which of x and h the loss looks at."""
    found = dict(zip("xh", op(**given), strict=True))
    loss = torch.zeros((), dtype=DTYPE, device=DEVICE)
    for name in used:
        x = found[name]
        loss = loss + (x * torch.linspace(-1, 1, x.numel(), dtype=torch.float64).to(x).view(x.shape)).sum()
    leaves = {n: x for n, x in given.items() if x.requires_grad}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {n: x.detach() for n, x in found.items()} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def test_the_definition():
    given = draw("position bias keep", 2, 3, 4)
    x, h = call("torch", **given)
    truth = (given["table"][given["tokens"]] + given["position"]) * given["keep"] / 0.7
    contract.assert_close({"x": x}, {"x": truth}, TOL)
    wanted = torch.nn.functional.layer_norm(truth, (4,), given["weight"], given["bias"])
    contract.assert_close({"h": h}, {"h": wanted}, TOL)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_the_definition(kind, poisoned):
    pytest.importorskip("triton")
    for sizes in ((1, 1, 1), (3, 5, 6), (2, 9, 70)):
        for used in ("xh", "h", "x"):
            given = draw(kind, *sizes)
            found, truth = (results(lambda **x: call(form, **x), given, used) for form in ("triton", "torch"))  # noqa: B023
            contract.assert_close(found, truth, TOL)


def gradient(tokens: Tensor, g: Tensor) -> Tensor:
    """Of a table of V words, by the kernels, for a gradient g of x."""
    table = torch.zeros(V, g.shape[-1], dtype=g.dtype, device=DEVICE, requires_grad=True)
    x, _ = call("triton", tokens, table, weight=torch.ones_like(table[0]))
    return torch.autograd.grad(x, table, g)[0]


@pytest.mark.parametrize("size", [1e-24, 1.0, 1e36])
def test_equal_words_are_summed_exactly_in_any_order(size):
    pytest.importorskip("triton")
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (40, 25), generator=rng)
    g = (
        size * torch.randn(40, 25, 3, generator=rng) * 10 ** torch.empty(40, 25, 3).uniform_(-6, 0, generator=rng)
    ).float()
    truth = torch.zeros(V, 3, dtype=torch.float64).index_add_(0, tokens.flatten(), g.double().flatten(0, 1)).float()
    order = torch.randperm(40, generator=rng)
    for which in (slice(None), order):
        assert torch.equal(gradient(tokens[which].to(DEVICE), g[which].to(DEVICE)).cpu(), truth)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_a_term_that_is_not_finite_shows(value):
    pytest.importorskip("triton")
    tokens, g = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE), torch.ones(2, 3, 5, device=DEVICE)
    assert gradient(tokens, g)[0].tolist() == [6.0] * 5
    g[1, 2, 4] = value
    assert gradient(tokens, g).isnan().all()


def test_vmap_is_a_loop(monkeypatch):
    triton = pytest.importorskip("mixassay.kernels.embedding.triton")
    few = lambda x, groups, M: triton.Shares(x.numel() // x.shape[-1] // M, 8, 3, 4, 8, 1)  # noqa: E731
    monkeypatch.setattr(triton.Shares, "of", few)
    given = draw("position bias keep", 4, 5, 6, members=(3,))

    def run(form: str) -> dict[str, Tensor]:
        one: Any = lambda *xs: call(form, **dict(zip(given, xs, strict=True)))  # noqa: E731
        return results(lambda **xs: torch.func.vmap(one)(*xs.values()), given)

    contract.assert_close(run("triton"), run("torch"), TOL)


def test_opcheck():
    pytest.importorskip("triton")
    from mixassay.kernels.embedding import registered

    x = {n: x.detach()[None] for n, x in draw("position bias keep", 2, 3, 6).items()}
    x |= {n: x[n].requires_grad_() for n in ("table", "position", "weight", "bias")}
    given = (x["tokens"], x["table"], x["position"], x["keep"], 0.3, x["weight"], x["bias"], 1e-5, DTYPE)
    torch.library.opcheck(registered.forward, given)
    torch.library.opcheck(registered.forward, (*given[:2], None, None, 0.0, x["weight"], None, 1e-5, DTYPE))


def test_under_autocast_the_stream_stays_wide():
    pytest.importorskip("triton")
    given = {n: x.detach().float() if x.is_floating_point() else x for n, x in draw("bias", 2, 3, 6).items()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        x, h = call("triton", **given)
    assert (x.dtype, h.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": torch.ones(2, 3)}, r"tokens has shape \[2, 3\] and dtype torch.float32, expected int64 \[B, T\]"),
        ({"position": torch.ones(5, 6)}, r"position has shape \[5, 6\], expected \[T, D\] = \[3, 6\]"),
        ({"keep": torch.ones(2, 3, 6)}, "keep has shape .* and dtype torch.float32, expected bool"),
        ({"bias": torch.ones(5)}, r"bias has shape \[5\], expected \[D\] = \[6\]"),
    ],
)
def test_what_does_not_fit_is_named(changed, message):
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    given: dict[str, Any] = {"tokens": tokens, "table": torch.ones(V, 6), "position": None, "weight": torch.ones(6)}
    with pytest.raises(UserError, match=message):
        embedding(**given | changed)
