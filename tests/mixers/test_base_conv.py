"""BaseConv against its formula, and what it can and cannot see."""

import pytest
import torch
import torch.nn.functional as F

from mixassay.errors import UserError
from mixassay.mixers.base_conv import BaseConv


def build(**kw):
    torch.manual_seed(0)
    return BaseConv(16, **kw).double()


@pytest.mark.parametrize("conv", [1, 3, 5])
def test_equals_the_formula(conv):
    m = build(conv=conv)
    torch.nn.init.normal_(m.proj.bias)
    u = torch.randn(2, 20, 16, dtype=torch.float64)
    assert m.conv.weight is not None
    near = F.conv1d(F.pad(u.mT, (conv - 1, 0)), m.conv.weight[:, None], m.conv.bias, groups=16).mT
    torch.testing.assert_close(m(u), near * (u @ m.proj.weight.T + m.proj.bias) + u, rtol=1e-12, atol=1e-12)


def test_a_token_sees_three():
    m = build()
    u = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    (seen,) = torch.autograd.grad(m(u)[0, 6].sum(), u)
    assert seen[0].abs().sum(-1).ne(0).tolist() == [False] * 4 + [True] * 3 + [False] * 2


def test_initialisation():
    m = build()
    assert m.proj.bias.eq(0).all()
    assert m.proj.weight.std().item() == pytest.approx(0.02, rel=0.15)
    for p in m.conv.parameters():
        assert 0.4 < p.abs().max() <= 3**-0.5


def test_errors():
    with pytest.raises(UserError, match="conv must be at least 1, got 0"):
        build(conv=0)
