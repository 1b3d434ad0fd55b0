"""Gated DeltaNet against its dense form, written from the raw weights; what the delta rule is for; its errors.

Dense: O = (tril(QK^T) (I + tril(diag(beta) KK^T, -1))^-1 . decay) diag(beta) V.
"""

import pytest
import torch
import torch.nn.functional as F

from mixassay.errors import UserError
from mixassay.mixers.gated_deltanet import GatedDeltaNet

D, B, T = 16, 2, 75


def build(d_model=D, seed=0, **kw):
    torch.manual_seed(seed)
    return GatedDeltaNet(d_model, **kw)


def silu(x):
    return x / (1 + (-x).exp())


def dense(m, x, H, K, V, *, top=1.0, gate=True):
    parts = (x @ m.in_proj.weight.T).split([H * K, H * K, H * V, H, H, *([H * V] if gate else [])], dim=-1)
    qkv, (dt, beta, *z) = torch.cat(parts[:3], dim=-1), parts[3:]
    if m.conv.weight is not None:
        taps = m.conv.weight
        qkv = F.conv1d(F.pad(qkv.mT, (taps.shape[1] - 1, 0)), taps[:, None], groups=len(taps)).mT
    q, k, v = silu(qkv).split([H * K, H * K, H * V], dim=-1)
    g = -m.decay.A_log.exp() * (1 + (dt + m.decay.dt_bias).exp()).log()  # [B, T, H]
    beta = top / (1 + (-beta).exp())
    out = []
    for h in range(H):
        qh, kh = (a[..., h * K : (h + 1) * K] for a in (q, k))
        qh, kh = (a / (a.square().sum(-1, keepdim=True) + 1e-6).sqrt() for a in (qh, kh))
        vh, bh = v[..., h * V : (h + 1) * V], beta[..., h, None]
        since = g[..., h].cumsum(1)
        decay = (since[:, :, None] - since[:, None, :]).tril().exp().tril()
        inverse = torch.linalg.inv(torch.eye(T, dtype=x.dtype) + (bh * (kh @ kh.mT)).tril(-1))
        o = ((qh @ kh.mT).tril() @ inverse * decay) @ (bh * vh) / K**0.5
        o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.norm.weight
        out.append(o * silu(z[0][..., h * V : (h + 1) * V]) if gate else o)
    return torch.cat(out, dim=-1) @ m.out_proj.weight.T


@pytest.mark.parametrize(
    ("kw", "sizes"),
    [
        ({}, {"H": 1, "K": 16, "V": 32}),
        ({"heads": 2, "conv": 2}, {"H": 2, "K": 8, "V": 16}),
        ({"heads": 3, "head_dim": 6, "expand_v": 0.5}, {"H": 3, "K": 6, "V": 3}),
        ({"heads": 2, "allow_neg_eigval": True}, {"H": 2, "K": 8, "V": 16, "top": 2.0}),
        ({"heads": 2, "gate": False, "conv": 0, "expand_v": 1.0}, {"H": 2, "K": 8, "V": 8, "gate": False}),
    ],
)
def test_equals_the_dense_form(kw, sizes):
    m = build(**kw).double()
    torch.nn.init.normal_(m.norm.weight)
    x = torch.randn(B, T, D, dtype=torch.float64)
    torch.testing.assert_close(m(x), dense(m, x, **sizes), rtol=1e-9, atol=1e-10)


def test_initialisation():
    m = build(2048, heads=2048, expand_v=1.0)
    dt, A = F.softplus(m.decay.dt_bias), m.decay.A_log.exp()
    assert dt.min() >= 1e-3 * 0.999
    assert dt.max() <= 1e-1 * 1.001
    assert 0 < A.min() < 0.1
    assert 15.9 < A.max() <= 16.001
    assert A.mean().item() == pytest.approx(8, rel=0.05)
    for linear in (m.in_proj, m.out_proj):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.02)
    (taps,) = m.conv.parameters()  # no bias
    assert 0.49 < taps.abs().max() <= 0.5


def test_weight_decay_spares_the_recurrence():
    marked = {name for name, p in build().named_parameters() if getattr(p, "no_weight_decay", False)}
    assert marked == {"decay.A_log", "decay.dt_bias"}


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"heads": 3}, "heads=3 does not divide d_model=16"),
        ({"expand_v": 1.3}, "expand_v \\* head_dim must be a whole number of channels, got 1.3 \\* 16"),
        ({"expand_v": 0.0}, "expand_v \\* head_dim must be a whole number"),
        ({"expand_v": -1.0}, "expand_v \\* head_dim must be a whole number"),
        ({"conv": -1}, "conv must be at least 0, got -1"),
    ],
)
def test_errors(kw, says):
    with pytest.raises(UserError, match=says):
        build(**kw)
