"""Softmax attention: definition, dense form, windows, groups, step, stacks of models, errors."""

from itertools import product

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.softmax_attention import softmax_attention, softmax_attention_step

from .contract import error

TOL = 1e-12


def draw(T=17, H=4, G=2, K=8, V=8, B=2, dtype=torch.float64, seed=0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, V)]
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def dense(q, k, v, scale, window):
    """softmax(scale Q K^T + mask) V, the matrices written out."""
    T, R = q.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(R, dim=2), v.repeat_interleave(R, dim=2)
    gap = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    seen = (gap >= 0) & (gap < (window or T))
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * scale
    return torch.einsum("bhij,bjhv->bihv", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(
    ("T", "heads", "dims", "window", "scale"),
    [
        *product((1, 2, 17), ((4, 4), (4, 2), (3, 1)), ((8, 8),), (None, 1, 5, 17, 40), (None,)),
        *product((33,), ((4, 2),), ((8, 3), (5, 16)), (None, 7), (0.3, 1.0)),
    ],
)
def test_all_forms_agree(T, heads, dims, window, scale):
    (H, G), (K, V) = heads, dims
    given = draw(T, H, G, K, V)
    weights = torch.randn(2, T, H, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    forms = {
        "torch": lambda: softmax_attention(*given, scale=scale, window=window, backend="torch"),
        "reference": lambda: softmax_attention(*given, scale=scale, window=window, backend="reference"),
        "dense": lambda: dense(*given, K**-0.5 if scale is None else scale, window),
    }
    results = {n: [o := form(), *torch.autograd.grad((o * weights).sum(), given)] for n, form in forms.items()}
    for name in ("torch", "dense"):
        assert max(error(a, b) for a, b in zip(results[name], results["reference"], strict=True)) <= TOL, name


@pytest.mark.parametrize("window", [None, 6])
def test_steps_are_the_whole(window):
    q, k, v = (t.detach() for t in draw(V=5))
    whole = softmax_attention(q, k, v, window=window)
    for t in range(17):
        kept = slice(0 if window is None else max(0, t + 1 - window), t + 1)
        assert error(softmax_attention_step(q[:, t], k[:, kept], v[:, kept]), whole[:, t]) <= TOL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("G", "V"), [(4, 8), (2, 8), (1, 5)])
def test_steps_on_a_narrow_cache_are_as_near_as_its_numbers(dtype, G, V):
    """Against float64 on the same numbers: of the output's own rounding, half a unit in the last place, two at most."""
    q, k, v = (t.detach() for t in draw(T=33, G=G, V=V, dtype=dtype))
    o = softmax_attention_step(q[:, -1], k, v)
    assert o.dtype == dtype
    exact = softmax_attention_step(q[:, -1].double(), k.double(), v.double())
    assert (o.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * v.double().abs().max()


@pytest.mark.parametrize("window", [None, 6])
def test_causal_and_no_further_than_the_window(window):
    given = [t.detach() for t in draw(T=40, dtype=torch.float32)]
    before = softmax_attention(*given, window=window)
    after = softmax_attention(*(t.index_fill(1, torch.tensor([20]), 0.5) for t in given), window=window)
    assert torch.equal(after[:, :20], before[:, :20])
    assert not torch.equal(after[:, 20], before[:, 20])
    if window is not None:
        assert torch.equal(after[:, 20 + window :], before[:, 20 + window :])


@pytest.mark.parametrize(("window", "dims"), [(None, (8, 8)), (5, (8, 3))])
def test_vmap_is_a_loop(window, dims):
    """A stack of models: vmap with an ordinary backward, vmap(grad), and one argument shared by all. No warning."""
    members = [draw(K=dims[0], V=dims[1], seed=s) for s in range(3)]
    stack = [torch.stack([m[i].detach() for m in members]).requires_grad_() for i in range(3)]

    def loss(q, k, v):
        return softmax_attention(q, k, v, window=window).sin().sum()

    together = torch.autograd.grad(torch.func.vmap(loss)(*stack).sum(), stack)
    nested = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*(t.detach() for t in stack))
    for m, member in enumerate(members):
        alone = torch.autograd.grad(loss(*member), member)
        assert max(error(a[m], b) for a, b in zip(together, alone, strict=True)) <= TOL
        assert max(error(a[m], b) for a, b in zip(nested, alone, strict=True)) <= TOL
    q, k, v = stack[0], members[0][1], stack[2]
    shared = torch.func.vmap(lambda q, v: softmax_attention(q, k, v, window=window))(q, v)
    assert error(shared[2], softmax_attention(q[2], k, v[2], window=window)) <= TOL


def test_any_strides():
    given = [t.detach() for t in draw(B=3)]
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given[:2]] + [given[2][:1].expand_as(given[2])]
    plain = [*given[:2], given[2][:1].repeat(3, 1, 1, 1)]
    assert error(softmax_attention(*strided), softmax_attention(*plain)) <= TOL


def test_meta_tensors_have_the_shape():
    o = softmax_attention(*(t.to("meta") for t in draw(V=5)), window=3)
    assert o.shape == (2, 17, 4, 5)


@pytest.mark.parametrize(
    ("i", "shape", "message"),
    [
        (0, (2, 9, 8), r"softmax_attention: q has shape \[2, 9, 8\], expected \[B, T, H, K\]"),
        (1, (2, 8, 2, 8), r"k has shape \[2, 8, 2, 8\], expected \[B, T, G, K\] = \[2, 9, G, 8\]"),
        (1, (2, 9, 3, 8), r"v has shape \[2, 9, 2, 8\], expected \[B, T, G, V\] = \[2, 9, 3, V\]"),
        (0, (2, 9, 3, 8), r"k has G = 2 heads, which must divide the H = 3 heads of q"),
    ],
)
def test_a_wrong_shape_is_named(i, shape, message):
    shapes = [(2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)]
    shapes[i] = shape
    with pytest.raises(UserError, match=message):
        softmax_attention(*(torch.zeros(s) for s in shapes))


def test_a_window_holds_at_least_one_token():
    with pytest.raises(UserError, match="window = 0, expected at least 1"):
        softmax_attention(*draw(), window=0)
