"""A linear layer in parts is the plain one, with its gradients; and which layers are made in parts."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from mixassay.mixers.parts.linear import Linear, linear, split

MODELS = 3


@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "stacked"])
@pytest.mark.parametrize("biased", [False, True], ids=["weight", "bias"])
@pytest.mark.parametrize("parts", [1, 2, 6])
def test_parts_compute_the_plain_layer(parts, biased, stacked):
    g = torch.Generator().manual_seed(0)
    shapes = [(6, 5, 4), (7, 4), *([(7,)] if biased else [])]  # x | weight | bias
    given = [torch.randn(MODELS, *s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]
    if not stacked:
        given = [t[0].detach().requires_grad_() for t in given]
    results = []
    layers: list[Callable[..., torch.Tensor]] = [F.linear, partial(linear, parts=parts)]
    for layer in layers:
        y = (torch.func.vmap(layer) if stacked else layer)(*given)
        results.append((y, *torch.autograd.grad(y.sin().sum(), given)))
    for plain, cut in zip(*results, strict=True):
        torch.testing.assert_close(cut, plain, rtol=1e-12, atol=1e-12)


def test_input_need_not_be_contiguous():
    x = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).transpose(0, 1)
    weight = torch.ones(7, 4, dtype=torch.float64)
    torch.testing.assert_close(linear(x, weight, parts=3), F.linear(x, weight), rtol=1e-12, atol=1e-12)


def test_autocast_rounds_results_and_sums_the_parts_in_float32():
    x, weight = torch.ones(4, 1, 1), torch.ones(1, 1, requires_grad=True)
    x[0] = 256.0  # 259 is no bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, weight, torch.zeros(1), parts=4)
    assert y.dtype == torch.bfloat16
    (found,) = torch.autograd.grad(y.sum(), [weight])
    assert found.dtype == torch.float32
    assert found.item() == 259.0


def test_parts_compile_without_a_break():
    x, weight = torch.ones(4, 3, 2), torch.ones(5, 2)
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight, parts=2), F.linear(x, weight))


def found(x: tuple[int, ...], weight: tuple[int, int], device: str = "cuda") -> int:
    with FakeTensorMode():
        return split(torch.empty(x, device=device), torch.empty(weight, device=device))


def test_small_layers_with_many_tokens_are_cut():
    assert found((256, 256, 16), (48, 16)) == 16  # a tile: by tokens, 4096 a part
    assert found((256, 256, 64), (192, 64)) == 8  # three tiles: by tiles, 24 side by side
    assert found((6, 65536, 16), (48, 16)) == 2  # by the batch
    assert found((4, 4096, 256), (20, 256)) == 4


def test_others_are_not():
    assert found((256, 256, 16), (48, 16), device="cpu") == 1
    assert found((8, 4096, 1024), (3072, 1024)) == 1  # wide
    assert found((64, 64, 16), (48, 16)) == 1  # few tokens
    assert found((1, 65536, 16), (48, 16)) == 1  # one sequence
    assert found((65536, 16), (48, 16)) == 1  # a step


def test_the_layer_is_torchs_own():
    torch.manual_seed(0)
    ours = Linear(4, 7)
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 7)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert torch.equal(ours(torch.ones(2, 3, 4)), plain(torch.ones(2, 3, 4)))
