"""Mamba-2 against its dense form, (C B^T . decay) X, written from the raw weights; its initialisation; its errors."""

import pytest
import torch
import torch.nn.functional as F

from mixassay.errors import UserError
from mixassay.mixers import mixer
from mixassay.mixers.mamba2 import Mamba2

D, B, T = 16, 2, 75


def build(d_model=D, seed=0, **kw):
    torch.manual_seed(seed)
    return Mamba2(d_model, **kw)


def dense(m, u, P, N, G, expand=2):
    inner = expand * D
    H = inner // P
    z, x, Bs, Cs, dt = (u @ m.in_proj.weight.T).split([inner, inner, G * N, G * N, H], dim=-1)
    if m.conv.weight is not None:
        taps, bias = m.conv.weight, m.conv.bias
        xBC = torch.cat([x, Bs, Cs], dim=-1)
        xBC = F.conv1d(F.pad(xBC.mT, (taps.shape[1] - 1, 0)), taps[:, None], bias, groups=len(taps)).mT
        x, Bs, Cs = xBC.split([inner, G * N, G * N], dim=-1)
    x, Bs, Cs = (a / (1 + (-a).exp()) for a in (x, Bs, Cs))
    dt = (1 + (dt + m.decay.dt_bias).exp()).log()  # [B, T, H]
    A = m.decay.A_log.exp()
    ys = []
    for h in range(H):
        group = slice(h // (H // G) * N, (h // (H // G) + 1) * N)
        xh = x[..., h * P : (h + 1) * P]
        decay = torch.zeros(B, T, T, dtype=u.dtype)
        for t in range(T):
            for s in range(t + 1):
                decay[:, t, s] = (-A[h] * dt[:, s + 1 : t + 1, h].sum(1)).exp()
        scores = Cs[..., group] @ Bs[..., group].mT * decay
        ys.append(scores @ (dt[..., h, None] * xh) + m.D[h] * xh)
    y = torch.cat(ys, dim=-1) * z / (1 + (-z).exp())
    normed = [p / (p.square().mean(-1, keepdim=True) + 1e-5).sqrt() for p in y.split(inner // G, dim=-1)]
    return torch.cat(normed, dim=-1) * m.norm.weight @ m.out_proj.weight.T


@pytest.mark.parametrize(
    ("kw", "sizes"),
    [
        ({}, {"P": 32, "N": 128, "G": 1}),
        ({"d_state": 8, "head_dim": 8}, {"P": 8, "N": 8, "G": 1}),
        ({"d_state": 8, "head_dim": 8, "n_groups": 2}, {"P": 8, "N": 8, "G": 2}),
        ({"d_state": 5, "expand": 3, "conv": 2}, {"P": 48, "N": 5, "G": 1, "expand": 3}),
        ({"d_state": 8, "conv": 0}, {"P": 32, "N": 8, "G": 1}),
    ],
)
def test_equals_the_dense_form(kw, sizes):
    m = build(**kw).double()
    torch.nn.init.normal_(m.D)
    torch.nn.init.normal_(m.norm.weight)
    u = torch.randn(B, T, D, dtype=torch.float64)
    torch.testing.assert_close(m(u), dense(m, u, **sizes), rtol=1e-10, atol=1e-10)


def test_sizes_at_small_and_usual_widths():
    assert [(build(d).heads, build(d).head_dim) for d in (16, 32, 64, 256)] == [(1, 32), (1, 64), (2, 64), (8, 64)]


def test_initialisation():
    m = build(2048, head_dim=2, d_state=4)  # 2048 heads
    dt, A = F.softplus(m.decay.dt_bias), m.decay.A_log.exp()
    assert dt.min() >= 1e-3 * 0.999
    assert dt.max() <= 1e-1 * 1.001
    assert dt.log().mean().item() == pytest.approx(torch.tensor(1e-2).log().item(), abs=0.1)  # log-uniform: mean 1e-2
    assert dt.log().std().item() == pytest.approx(torch.tensor(100.0).log().item() / 12**0.5, rel=0.05)
    assert 1 <= A.min() < 1.1
    assert 15.9 < A.max() <= 16.001
    assert A.mean().item() == pytest.approx(8.5, rel=0.05)
    assert m.D.eq(1).all()
    assert m.norm.weight.eq(1).all()
    assert m.in_proj.weight.std().item() == pytest.approx((3 * 2048) ** -0.5, rel=0.05)
    for p in m.conv.parameters():
        assert 0.49 < p.abs().max() <= 0.5


@pytest.mark.parametrize("name", ["mamba2", "log_linear_mamba2", "dla_mamba2"])
def test_a_starts_in_its_range(name):
    A = mixer[name](64, d_state=4, head_dim=2, a_range=(1, 2)).get_parameter("decay.A_log").exp()
    assert 1 <= A.min() < A.max() <= 2.001


def test_weight_decay_spares_the_recurrence():
    m = build()
    marked = {name for name, p in m.named_parameters() if getattr(p, "no_weight_decay", False)}
    assert marked == {"decay.A_log", "decay.dt_bias", "D"}


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"head_dim": 64}, "head_dim=64 does not divide the inner width expand \\* d_model = 32"),
        ({"head_dim": 8, "n_groups": 3}, "n_groups=3 does not divide the 4 heads"),
        ({"d_state": 0}, "d_state must be at least 1, got 0"),
        ({"expand": 0}, "expand must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"conv": -1}, "conv must be at least 0, got -1"),
        ({"a_range": (0, 1)}, "a_range=\\[0, 1\\]: expected two numbers above 0"),
    ],
)
def test_errors(kw, says):
    with pytest.raises(UserError, match=says):
        build(**kw)
