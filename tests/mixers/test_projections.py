"""Products apart are the parts of a common product."""

import torch

from mixassay.mixers.parts.projections import apart, neighbours, projections


def test_narrow_neighbours_go_together():
    assert neighbours([256, 2, 2, 128]) == [[256], [2, 2], [128]]
    assert neighbours([3, 64, 0, 5]) == [[3], [64], [0, 5]]


def test_products_apart_are_parts_of_one():
    g = torch.Generator().manual_seed(0)
    linear, widths = torch.nn.Linear(5, 80, bias=False).double(), [64, 3, 2, 0, 11]
    x = torch.randn(2, 4, 5, generator=g, dtype=torch.float64, requires_grad=True)
    results = []
    for parts in (projections(linear, x, widths), apart(linear.weight, x, widths)):
        assert [part.shape[-1] for part in parts] == widths
        whole = torch.cat(parts, dim=-1)
        results.append((whole, *torch.autograd.grad(whole.sin().sum(), [x, linear.weight])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-13, atol=1e-13)
