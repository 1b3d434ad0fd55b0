"""The mixers of higher-order linear attention against their dense formulas, written from the raw weights, and the
errors of their arguments."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mixassay.errors import UserError
from mixassay.mixers import mixer

NAMES = ("hla2", "ahla", "hla3")
D, B, T = 16, 2, 41
PHI = {
    "identity": lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
    "elu": lambda x: torch.where(x > 0, x + 1, x.exp()),
    "relu": lambda x: x.clamp(min=0),
}
every = pytest.mark.parametrize("name", NAMES)


def build(name, seed=0, **kw) -> Any:
    torch.manual_seed(seed)
    return mixer[name](D, **kw).double()


def tokens():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def turned(x, base):
    """Channels i and i + K/2 as the parts of complex numbers, turned by position * base^(-2 i / K)."""
    K = x.shape[-1]
    z = torch.complex(x[..., : K // 2], x[..., K // 2 :])
    angle = torch.arange(T).double()[:, None] * base ** (-2 * torch.arange(K // 2).double() / K)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def dense(name, m, x, heads, kv_heads, K, phi="identity", normalizer=False, output_norm=True, rope=None, gam=None):
    """One head at a time. `gam` [B, T, kv_heads] are the decays of a token's own step."""
    shape = [heads * K, kv_heads * K, kv_heads * K]
    qkv = x @ m.qkv.weight.T
    if m.conv.weight is not None:
        taps = m.conv.weight
        qkv = F.conv1d(F.pad(qkv.mT, (taps.shape[1] - 1, 0)), taps[:, None], groups=len(taps)).mT
    q, k, v = qkv.split(shape, dim=-1)
    L = torch.ones(T, T, dtype=torch.float64).tril()
    out = []
    for h in range(heads):
        g = h * kv_heads // heads
        qh, kh = PHI[phi](q[..., h * K : (h + 1) * K]), PHI[phi](k[..., g * K : (g + 1) * K])
        if rope is not None:
            qh, kh = turned(qh, rope), turned(kh, rope)
        vh = v[..., g * K : (g + 1) * K]
        if normalizer:
            vh = torch.cat([vh, torch.ones(B, T, 1, dtype=torch.float64)], dim=-1)
        X = qh @ kh.mT * K ** (0.5 if phi == "identity" else -0.5)
        along = torch.zeros(B, T, dtype=torch.float64) if gam is None else gam[..., g].log().cumsum(1)
        fade = lambda p, along=along: (p * (along[:, :, None] - along[:, None, :])).tril().exp() * L  # noqa: E731
        A = fade(1) * X
        if name == "hla2":
            o = (fade(2) * (X @ A.mT)) @ vh
        elif name == "ahla":
            o = (fade(1) * X) @ (A @ vh)
        else:
            o = (fade(3) * (X @ A.mT)) @ (A @ vh)
        if normalizer:
            o = o[..., :-1] / (o[..., -1:] + 1e-6)
        if output_norm:
            o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m.norm.weight
        out.append(o)
    return torch.cat(out, dim=-1) @ m.out.weight.T


def assert_equal(x, y):
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@every
def test_the_default(name):
    m, x = build(name), tokens()
    assert m.conv.conv == 4
    assert m.decay(x) is None
    torch.nn.init.normal_(m.norm.weight)
    assert_equal(m(x), dense(name, m, x, 1, 1, D))


@every
@pytest.mark.parametrize(("phi", "normalizer"), [("identity", False), ("elu", True), ("relu", True), ("elu", False)])
@pytest.mark.parametrize("output_norm", [False, True])
def test_equals_the_dense_formula(name, phi, normalizer, output_norm):
    options = {"normalizer": normalizer, "output_norm": output_norm}
    m, x = build(name, heads=4, kv_heads=2, conv=0, feature_map=phi, **options), tokens()
    assert_equal(m(x), dense(name, m, x, 4, 2, 4, phi, **options))


@every
def test_rotary_positions(name):
    m, x = build(name, heads=2, head_dim=6, rope=True, rope_base=100.0), tokens()
    assert_equal(m(x), dense(name, m, x, 2, 2, 6, rope=100.0))


@every
def test_decays(name):
    x = tokens()
    retained = 1 - 2.0 ** -torch.arange(5, 7).double()
    for kind in ("fixed", "learned"):
        m = build(name, heads=4, kv_heads=2, decay=kind)
        torch.testing.assert_close(m.decay(x).exp().double(), retained, rtol=1e-6, atol=0)
        assert_equal(m(x), dense(name, m, x, 4, 2, 4, gam=m.decay(x).exp().expand(B, T, 2)))
    m = build(name, heads=4, kv_heads=2, decay="token")
    dt = (1 + (x @ m.decay.dt_proj.weight.T + m.decay.selective.dt_bias).exp()).log()
    assert_equal(m(x), dense(name, m, x, 4, 2, 4, gam=(-m.decay.selective.A_log.exp() * dt).exp()))


def test_what_weight_decay_spares():
    m = build("hla2", decay="learned")
    assert m.decay.logit.no_weight_decay


@every
def test_shared_keys_and_values_are_equal_ones(name):
    """Two heads of k and v that are repeated equal four heads of their own with the same weights."""
    x, shared, own = tokens(), build(name, heads=4, kv_heads=2), build(name, heads=4)
    widths = [D, D // 2, D // 2]
    for mine, theirs in ((shared.qkv.weight, own.qkv.weight), (shared.conv.weight, own.conv.weight)):
        q, *kv = mine.data.split(widths)
        theirs.data = torch.cat([q, *(w.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for w in kv)])
    own.out.weight.data = shared.out.weight.data
    assert_equal(own(x), shared(x))


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"heads": 5}, "heads=5 does not divide d_model=16"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        ({"normalizer": True}, 'changes sign with feature_map "identity"; set normalizer: false'),
        ({"feature_map": "cosine"}, 'feature_map must be one of elu, relu, softmax, silu, identity, got "cosine"'),
        ({"feature_map": "elu", "rope": True}, 'rope needs feature_map: identity, got "elu"'),
        ({"head_dim": 5, "rope": True}, "head_dim must be even, got 5"),
        ({"rope": True, "rope_base": 0.0}, "rope_base must be greater than 0, got 0.0"),
        ({"decay": "slow"}, 'decay must be one of none, fixed, learned, token, got "slow"'),
        ({"conv": -2}, "conv must be at least 0, got -2"),
    ],
)
def test_errors(kw, says):
    with pytest.raises(UserError, match=says):
        build("hla2", **kw)
