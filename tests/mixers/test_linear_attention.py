"""Linear attention against its formula, written from the raw weights, and the errors of its arguments."""

import pytest
import torch
import torch.nn.functional as F

from mixassay.errors import UserError
from mixassay.mixers.linear_attention import LinearAttention

D, B, T = 16, 2, 75
PHI = {
    "elu": lambda x: torch.where(x > 0, x + 1, x.exp()),
    "relu": lambda x: x.clamp(min=0),
    "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
    "silu": lambda x: x / (1 + (-x).exp()),
    "identity": lambda x: x,
}


def build(**kw):
    torch.manual_seed(0)
    return LinearAttention(D, **kw).double()


def dense(m, x, heads, K, phi, *, normalizer, output_norm):
    """(phi(Q) phi(K)^T, lower triangle) V, its rows made to sum to 1 by the normaliser, one head at a time."""
    q, k, v = (x @ m.qkv.weight.T).split(heads * K, dim=-1)
    if m.conv.weight is not None:
        taps = m.conv.weight.split(heads * K)
        q, k, v = (
            F.conv1d(F.pad(a.mT, (w.shape[1] - 1, 0)), w[:, None], groups=len(w)).mT
            for a, w in zip((q, k, v), taps, strict=True)
        )
    out = []
    for h in range(heads):
        qh, kh, vh = (a[..., h * K : (h + 1) * K] for a in (q, k, v))
        P = (PHI[phi](qh) @ PHI[phi](kh).mT).tril()
        P = P / (P.sum(-1, keepdim=True) + 1e-6) if normalizer else P / K**0.5
        o = P @ vh
        if output_norm:
            o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.norm.weight
        out.append(o)
    return torch.cat(out, dim=-1) @ m.out.weight.T


@pytest.mark.parametrize(
    ("phi", "normalizer"),
    [(phi, True) for phi in ("elu", "relu", "softmax")] + [(phi, False) for phi in PHI],
)
@pytest.mark.parametrize("output_norm", [False, True])
@pytest.mark.parametrize("conv", [0, 4])
def test_equals_the_dense_formula(phi, normalizer, output_norm, conv):
    m = build(heads=2, feature_map=phi, normalizer=normalizer, output_norm=output_norm, conv=conv)
    if m.norm is not None:
        torch.nn.init.normal_(m.norm.weight)
    x = torch.randn(B, T, D, dtype=torch.float64)
    expected = dense(m, x, 2, 8, phi, normalizer=normalizer, output_norm=output_norm)
    torch.testing.assert_close(m(x), expected, rtol=1e-10, atol=1e-10)


def test_the_default_is_the_papers():
    m = build()
    x = torch.randn(B, T, D, dtype=torch.float64)
    torch.testing.assert_close(m(x), dense(m, x, 1, D, "elu", normalizer=True, output_norm=False))
    assert m.conv.weight is None


def test_the_normaliser_averages_the_values():
    """With equal values at all tokens the normalised output is that value, whatever q and k are."""
    m = build(heads=2)
    m.qkv.weight.data[2 * D :] = 0
    m.qkv.weight.data[2 * D :, 0] = torch.arange(D)
    m.out.weight.data = torch.eye(D, dtype=torch.float64)
    x = torch.randn(B, T, D, dtype=torch.float64)
    x[..., 0] = 1
    torch.testing.assert_close(m(x), torch.arange(D).expand(B, T, D).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"heads": 5}, "heads=5 does not divide d_model=16"),
        ({"feature_map": "identity"}, 'changes sign with feature_map "identity"; set normalizer: false'),
        ({"feature_map": "silu", "output_norm": True}, 'changes sign with feature_map "silu"'),
        ({"feature_map": "cosine"}, 'feature_map must be one of elu, relu, softmax, silu, identity, got "cosine"'),
        ({"conv": -2}, "conv must be at least 0, got -2"),
    ],
)
def test_errors(kw, says):
    with pytest.raises(UserError, match=says):
        build(**kw)
