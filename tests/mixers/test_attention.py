"""Attention against its formula, written from the raw weights, and the errors of its arguments."""

import math

import pytest
import torch
import torch.nn.functional as F

from mixassay.errors import UserError
from mixassay.mixers.attention import Attention

D, B, T = 16, 2, 21


def build(**kw):
    torch.manual_seed(0)
    return Attention(D, **kw).double()


def dense(m, x, heads, K, *, window=None, base=None):
    """softmax(q k^T / sqrt(K)) v, one head and one row at a time; q and k turned as complex numbers."""
    q, k, v = (x @ m.qkv.weight.T + (0 if m.qkv.bias is None else m.qkv.bias)).split(heads * K, dim=-1)
    if m.conv.weight is not None:
        taps = m.conv.weight.split(heads * K)
        q, k, v = (
            F.conv1d(F.pad(a.mT, (w.shape[1] - 1, 0)), w[:, None], groups=len(w)).mT
            for a, w in zip((q, k, v), taps, strict=True)
        )
    out = []
    for h in range(heads):
        qh, kh, vh = (a[..., h * K : (h + 1) * K] for a in (q, k, v))
        if base is not None:
            turn = torch.exp(1j * torch.arange(T)[:, None] * base ** (-2 * torch.arange(K // 2).double() / K))
            qh, kh = (torch.complex(a[..., : K // 2], a[..., K // 2 :]) * turn for a in (qh, kh))
            scores = (qh @ kh.mH).real
        else:
            scores = qh @ kh.mT
        i, j = torch.arange(T)[:, None], torch.arange(T)
        seen = (j <= i) & (j > i - (window or T))
        out.append((scores / math.sqrt(K)).masked_fill(~seen, -torch.inf).softmax(-1) @ vh)
    return torch.cat(out, dim=-1) @ m.out.weight.T


@pytest.mark.parametrize(
    ("kw", "formula"),
    [
        ({}, {"heads": 1, "K": 16}),
        ({"heads": 4, "qkv_bias": True}, {"heads": 4, "K": 4}),
        ({"heads": 2, "head_dim": 6, "window": 4}, {"heads": 2, "K": 6, "window": 4}),
        ({"heads": 2, "rope": True}, {"heads": 2, "K": 8, "base": 10000.0}),
        ({"rope": True, "rope_base": 50.0, "window": 9}, {"heads": 1, "K": 16, "base": 50.0, "window": 9}),
        ({"heads": 2, "conv": 4}, {"heads": 2, "K": 8}),
    ],
)
def test_equals_the_dense_formula(kw, formula):
    m = build(**kw)
    if m.qkv.bias is not None:
        torch.nn.init.normal_(m.qkv.bias)
    x = torch.randn(B, T, D, dtype=torch.float64)
    torch.testing.assert_close(m(x), dense(m, x, **formula), rtol=1e-10, atol=1e-10)


def test_rope_counts_positions_per_sequence():
    """Two sequences of different age in one batch go on as they would alone."""
    m = build(rope=True, window=3)
    x = torch.randn(2, 9, D, dtype=torch.float64)
    states = []
    for row, age in ((0, 5), (1, 8)):
        state = m.init_state(1)
        for t in range(age):
            _, state = m.step(x[row : row + 1, t], state)
        states.append(state)
    both = {key: torch.cat([s[key] for s in states]) for key in states[0]}
    y, after = m.step(torch.stack([x[0, 5], x[1, 8]]), both)
    torch.testing.assert_close(y[0], m(x)[0, 5], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(y[1], m(x)[1, 8], rtol=1e-10, atol=1e-10)
    assert after["position"].tolist() == [6, 9]


def test_initialisation():
    m = Attention(64, qkv_bias=True)
    assert m.qkv.bias.eq(0).all()
    for weight, fan_in in ((m.qkv.weight, 64), (m.out.weight, 64)):
        assert weight.abs().max() <= fan_in**-0.5
        assert weight.std().item() == pytest.approx((3 * fan_in) ** -0.5, rel=0.05)


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"heads": 3}, "heads=3 does not divide d_model=16"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"conv": -1}, "conv must be at least 0, got -1"),
        ({"head_dim": 5, "rope": True}, "head_dim must be even, got 5"),
        ({"rope": True, "rope_base": 0.0}, "rope_base must be greater than 0, got 0.0"),
    ],
)
def test_errors(kw, says):
    with pytest.raises(UserError, match=says):
        build(**kw)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kw", [{"heads": 2}, {"rope": True, "conv": 3, "qkv_bias": True}])
@torch.no_grad()
def test_a_cache_of_half_the_bytes_gives_the_same_numbers(kw, dtype):
    """Behind any number of tokens those of a float32 cache, as it is without autocast: to the bit where many tokens are
    read; a step on a narrow cache rounds its weights to the cache's dtype too."""
    eps = torch.finfo(dtype).eps
    m = build(**kw).float()
    x, steps = torch.randn(B, T, D), torch.randn(B, 5, D)
    with torch.autocast("cpu", dtype):
        _, narrow = m.prefill(x[:, :4], m.init_state(B))
        wide = {name: kept.float() if name in ("k", "v") else kept for name, kept in narrow.items()}
        assert (narrow["k"].dtype, narrow["v"].dtype) == (dtype, dtype)
        for tokens in (x[:, 4:], *steps.split(1, dim=1)):
            (y, narrow), (expected, wide) = m.prefill(tokens, narrow), m.prefill(tokens, wide)
            assert torch.equal(y, expected)
        for token in steps.unbind(1):
            (y, narrow), (expected, wide) = m.step(token, narrow), m.step(token, wide)
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected, rtol=4 * eps, atol=2 * eps)
    for name in ("k", "v"):
        assert (narrow[name].dtype, wide[name].dtype) == (dtype, torch.float32)
        assert torch.equal(narrow[name].float(), wide[name])
    assert m.init_state(B)["k"].dtype == torch.float32
    assert m.prefill(x, m.init_state(B))[1]["k"].dtype == torch.float32
