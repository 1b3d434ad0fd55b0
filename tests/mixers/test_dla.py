"""The mixers of dynamic linear attention: a decoder cuts and reads as the parallel form does, and where they start."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from mixassay.errors import UserError
from mixassay.kernels.dla.boundaries import boundaries
from mixassay.kernels.dla.scores import with_gradient
from mixassay.mixers import mixer
from mixassay.mixers.parts.segmentation import Segmented
from mixassay.mixers.parts.slots import matches, scrambled
from mixassay.runners.audit.mixer import audit_mixer

D, B, T = 16, 2, 60
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dla": ("linear_attention", {"feature_map": "identity", "normalizer": False, "output_norm": True}),
    "dla_mamba2": ("mamba2", {}),
    "dla_gated_deltanet": ("gated_deltanet", {}),
}
SMALL: dict[str, dict[str, Any]] = {
    "dla": {"heads": 2, "conv": 3},
    "dla_mamba2": {"d_state": 8, "head_dim": 8, "n_groups": 2},
    "dla_gated_deltanet": {"heads": 2},
}
each = pytest.mark.parametrize("name", list(BASES))


def tokens(seed: int = 1, length: int = 8) -> Tensor:
    """Segments of `length` tokens, noisy."""
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(B, T, D, generator=draw, dtype=torch.float64)[:, torch.arange(T) // length]
    return means + 0.4 * torch.randn(B, T, D, generator=draw, dtype=torch.float64)


def build(name: str, moved: bool = True, **kw: Any) -> Any:
    """Away from its start, so that weights differ by rank."""
    torch.manual_seed(0)
    m = mixer[name](D, **SMALL[name] | kw).double()  # type: ignore[call-arg]
    if moved:
        with torch.no_grad():
            for p in m.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return m


def run_steps(m: Any, x: Tensor, changes: Tensor | None = None) -> Tensor:
    state, ys = m.init_state(len(x)), []
    for t in range(x.shape[1]):
        y, state = m.step(x[:, t], state) if changes is None else m.step(x[:, t], state, changes[:, t])
        ys.append(y)
    return torch.stack(ys, dim=1)


def cut(m: Any, x: Tensor) -> Tensor:
    """Boundaries [B, T, H]."""
    starts: Tensor = m.segmentation(x).starts[..., 0]
    return starts == torch.arange(x.shape[1])[:, None]


VARIANTS: list[dict[str, Any]] = [
    {"capacity": 4, "tau": 0.9},
    {"capacity": 3, "tau": 1.1, "rule": "weak", "weights": "content"},
    {"capacity": 5, "tau": 0.8, "rule": "ward", "scope": "segment"},
    {"capacity": 30, "tau": 0.3, "reading": "token", "score_proj": 3},
    {"capacity": 4, "tau": 1.0, "score_proj": 3, "rule": "ward"},
    {"capacity": 4, "reading": "memory_raw", "boundary_gate": "hard"},
    {"capacity": 3, "cuts": "blocks", "every": 7, "rule": "ward", "weights": "content"},
    {"capacity": 5, "cuts": "random", "every": 4, "scope": "segment"},
    {"capacity": 1, "cuts": "random", "every": 4},
]


@each
@pytest.mark.parametrize("kw", VARIANTS, ids=lambda kw: "-".join(map(str, kw.values())))
def test_the_decoder_cuts_and_reads_as_the_parallel_form(name: str, kw: dict[str, Any]) -> None:
    m, x = build(name, **kw), tokens()
    with torch.no_grad():
        torch.testing.assert_close(run_steps(m, x), m(x), rtol=1e-10, atol=1e-10)
    found = cut(m, x)[:, 1:]
    assert kw["capacity"] == 1 or (found.any() and not found.all()), "cuts somewhere, not everywhere"


@each
def test_without_merges_the_decoder_has_the_same_gradients(name: str) -> None:
    variants: list[dict[str, Any]] = [
        {"tau": 1.0},
        {"tau": 0.8, "score_proj": 3},
        {"reading": "token", "score_proj": 3},
    ]
    for kw in variants:
        m, x = build(name, capacity=13, **kw), tokens()[:, :12].requires_grad_()
        leaves, weight = {"x": x, **dict(m.named_parameters())}, tokens(3)[:, :12]
        parallel = torch.autograd.grad((m(x) * weight).sum(), list(leaves.values()))
        stepwise = torch.autograd.grad((run_steps(m, x) * weight).sum(), list(leaves.values()))
        for who, a, b in zip(leaves, parallel, stepwise, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, who=who: f"{who}: {text}")
        assert leaves["slots.tau"].abs().sum() > 0
        assert parallel[list(leaves).index("slots.tau")].abs().max() > 1e-4


@each
@pytest.mark.parametrize("kw", [{"tau": 0.6}, {"tau": 1.3, "rule": "ward", "capacity": 4}, {"cuts": "random"}])
def test_it_starts_as_its_base(name: str, kw: dict[str, Any]) -> None:
    base, more = BASES[name]
    m, x = build(name, moved=False, **kw), tokens()
    parent = mixer[base](D, **SMALL[name] | more).double()  # type: ignore[call-arg]
    mine = dict(m.named_parameters())
    with torch.no_grad():
        for who, p in parent.named_parameters():
            p.copy_(mine[who][: len(p)])
    torch.testing.assert_close(m(x), parent(x), rtol=1e-10, atol=1e-10)


def test_stacked_models_cut_for_themselves() -> None:
    variants: list[dict[str, Any]] = [{"tau": 0.9, "score_proj": 3}, {"weights": "content", "rule": "ward"}]
    for kw in variants:
        models = []
        for seed in range(3):
            models.append(build("dla_mamba2", capacity=4, **kw))
            with torch.no_grad():
                for p in models[-1].parameters():
                    p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        x = torch.stack([tokens(seed) for seed in range(3)])
        params, buffers = stack_module_state(models)
        y = vmap(lambda p, b, x, m=models[0]: functional_call(m, (p, b), (x,)))(params, buffers, x)
        grads = torch.autograd.grad(y.sin().sum(), list(params.values()))
        for i, m in enumerate(models):
            alone = m(x[i])
            torch.testing.assert_close(y[i], alone, rtol=1e-10, atol=1e-10)
            own = torch.autograd.grad(alone.sin().sum(), list(m.parameters()))
            torch.testing.assert_close([g[i] for g in grads], list(own), rtol=1e-9, atol=1e-9)


@each
def test_a_soft_gate_is_hard_in_evaluation(name: str) -> None:
    m, hard, x = build(name, capacity=4, boundary_gate="soft"), build(name, capacity=4), tokens()[:, :20]
    soft = m(x)
    assert not torch.allclose(soft, hard(x), rtol=1e-3)
    grads = torch.autograd.grad(soft.sin().sum(), list(m.parameters()))
    assert all(grad.any() for grad in grads)
    torch.testing.assert_close(m.eval()(x), hard(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reading", ["memory", "token"])
@pytest.mark.parametrize("decayed", [False, True], ids=["", "decayed"])
def test_scores_gradient_is_that_of_the_cosine(reading: Any, decayed: bool) -> None:
    """Against the cosine with the segment before each token, summed token by token and held constant."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 25, 2, 4, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2))
    g = -0.5 * torch.rand(1, 25, 2, generator=draw, dtype=torch.float64) if decayed else None
    score, boundary = boundaries(k, v, 1.35, g, reading=reading)
    found = with_gradient(score, k, v, boundary, g, reading)
    torch.testing.assert_close(found, score, rtol=0, atol=0)
    total = torch.zeros((), dtype=torch.float64)
    for h in range(2):
        C = last = torch.zeros(4, 4, dtype=torch.float64)
        for t in range(25):
            s = k[0, t, h, :, None] * v[0, t, h]
            with_whom = last if reading == "token" else C
            if t:
                c = (s * with_whom).sum() / (s.norm() * with_whom.norm())
                total = total + (t + 1) * (2 - 2 * c).sqrt()
            last, decay = s.detach(), 1.0 if g is None else g[0, t, h].exp()
            C = last if boundary[0, t, h] else decay * C + last
    weight = torch.arange(1, 26, dtype=torch.float64).view(1, 25, 1)
    for mine, truth in zip(
        torch.autograd.grad((found * weight).sum(), (k, v)), torch.autograd.grad(total, (k, v)), strict=True
    ):
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-9)


def test_matches_are_means_of_keys() -> None:
    m, x = build("dla_mamba2", capacity=4, tau=1.0), tokens()
    given, starts = m.operands(x), m.segmentation(x).starts
    found = matches(given.q, given.k, starts)
    for t, h, r in ((0, 0, 0), (0, 1, 3), (30, 1, 0), (59, 3, 1), (59, 0, 3)):
        begin, end = starts[1, t, h, r], t + 1 if r == 0 else starts[1, t, h, r - 1]
        keys = given.k[1, begin:end, h // 2]
        mean = keys.mean(0) if len(keys) else torch.zeros(8, dtype=torch.float64)
        torch.testing.assert_close(found[1, t, h, r], given.q[1, t, h // 2] @ mean, rtol=1e-10, atol=1e-10)


@each
def test_an_oracle_cuts_where_it_is_told(name: str) -> None:
    m, x = build(name, capacity=30, cuts="oracle"), tokens()
    changes = torch.zeros(B, T, dtype=torch.bool)
    changes[0, torch.tensor([0, 9, 33])] = changes[1, torch.tensor([0, 1, 2, 59])] = True
    assert m.told_changes
    assert torch.equal(m.segmentation(x, changes).starts[..., 0] == torch.arange(T)[:, None], changes[..., None].expand(
        -1, -1, m.slots.heads))  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(run_steps(m, x, changes), m(x, changes), rtol=1e-10, atol=1e-10)
    with pytest.raises(UserError, match='cuts "oracle" need a task that tells its changes'):
        m(x)


def test_random_cuts_come_at_their_rate_and_differ_by_head() -> None:
    word = scrambled(torch.arange(40_000))
    assert word.unique().numel() > 39_990
    assert ((word >> 24).bincount(minlength=256) - 40_000 / 256).abs().max() < 5 * (40_000 / 256) ** 0.5
    found = cut(build("dla", capacity=60, cuts="random", every=4), tokens())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[..., 0], found[..., 1])


@each
def test_calibration_sets_the_rate_of_boundaries(name: str) -> None:
    m, x = build(name, capacity=6, tau=None), tokens(length=4)
    m.calibrate(x)
    rate = cut(m, x).double().mean((0, 1))
    assert (rate - 2 * 6 / T).abs().max() < 0.06
    assert (cut(build(name, capacity=6), x).double().mean((0, 1)) - rate).abs().max() > 0.1, "0.6 cuts otherwise"


@each
def test_the_audit_reads_a_mixer(name: str) -> None:
    m, x = build(name, capacity=5, tau=0.9), tokens()
    changes = (torch.arange(T) % 8 == 0).expand(B, T)
    heads: int = m.slots.heads
    assert isinstance(m, Segmented)
    rows = audit_mixer(m, x, changes, prefixes=1)
    assert len(rows) == B * heads
    assert all(row["ratio"] <= 1 and row["bound"] > 0 for row in rows)


def test_live_state_bytes_by_hand() -> None:
    m = build("dla", capacity=4, cuts="blocks", every=10).float()
    slot = 4 * 2 * 8 * 8 + 2 * 8
    assert [(m.state_bytes(n) - m.live_state_bytes(n)) / slot for n in (0, 1, 10, 11, 31, 100)] == [4, 3, 3, 2, 0, 0]
    scored = build("dla", capacity=4).float()
    assert scored.state_bytes(9) == scored.live_state_bytes(9)


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"tau": 2.0}, "tau must be within 0.05 and 1.9, got 2.0"),
        ({"temperature": 0.0}, "temperature must be greater than 0"),
        ({"rule": "best"}, "rule must be one of density, weak, ward"),
        ({"boundary_gate": "soft", "scope": "segment"}, 'needs scope "all"'),
        ({"cuts": "blocks", "score_proj": 2}, "score_proj learns from"),
    ],
)
def test_errors(kw: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        build("dla", **kw)
