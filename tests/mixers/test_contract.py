"""What the harness relies on, for every registered mixer with its defaults and for the variants that matter."""

import copy
import functools

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap
from torch.utils import _pytree as pytree

from mixassay.kernels.common.fenwick import FenwickState
from mixassay.mixers import mixer, nbytes
from mixassay.mixers.parts.slots import BY_RANK

D = 16
VARIANTS = {
    "attention": [
        {"heads": 2, "rope": True},
        {"heads": 2, "head_dim": 6, "rope": True, "rope_base": 100.0, "window": 5, "conv": 3, "qkv_bias": True},
        {"window": 1},
        {"heads": 4, "window": 64},
    ],
    "linear_attention": [
        {"heads": 2, "conv": 4, "output_norm": True},
        {"heads": 4, "feature_map": "identity", "normalizer": False, "output_norm": True},
        {"heads": 2, "feature_map": "relu", "head_dim": 12},
        {"feature_map": "softmax"},
        {"feature_map": "silu", "normalizer": False, "conv": 1},
    ],
    "mamba2": [
        {"d_state": 8, "head_dim": 4, "n_groups": 2},
        {"d_state": 16, "head_dim": 16, "expand": 1, "conv": 0},
    ],
    "gated_deltanet": [
        {"heads": 2, "allow_neg_eigval": True},
        {"heads": 4, "head_dim": 6, "expand_v": 1.5, "conv": 0, "gate": False},
    ],
    "log_linear_attention": [
        {"heads": 2, "conv": 4, "feature_map": "elu", "levels": 7},
        {"heads": 4, "head_dim": 6, "levels": 3},
    ],
    "log_linear_mamba2": [
        {"d_state": 8, "head_dim": 4, "n_groups": 2, "levels": 8},
        {"d_state": 16, "head_dim": 16, "expand": 1, "conv": 0, "levels": 4},
    ],
    "log_linear_gated_deltanet": [
        {"heads": 2, "allow_neg_eigval": True, "levels": 4},
        {"heads": 4, "head_dim": 6, "expand_v": 1.5, "conv": 0, "gate": False, "levels": 8},
    ],
    "dla": [
        {"heads": 2, "capacity": 4, "conv": 4, "feature_map": "elu", "rule": "weak", "weights": "content"},
        {"capacity": 5, "rule": "ward", "reading": "token", "score_proj": 3},
    ],
    "dla_mamba2": [
        {"d_state": 8, "head_dim": 4, "n_groups": 2, "capacity": 4, "weights": "content", "score_proj": 2},
    ],
    "dla_gated_deltanet": [
        {"heads": 2, "allow_neg_eigval": True, "capacity": 4, "rule": "weak"},
        {"heads": 4, "expand_v": 1.5, "conv": 0, "capacity": 3, "cuts": "blocks", "every": 5, "scope": "segment"},
    ],
    "hla2": [
        {"heads": 4, "kv_heads": 2, "decay": "token", "rope": True},
        {"heads": 2, "feature_map": "elu", "normalizer": True, "output_norm": False, "conv": 0},
    ],
    "ahla": [{"heads": 2, "head_dim": 6, "decay": "learned", "rope": True, "rope_base": 100.0}],
    "hla3": [
        {"heads": 4, "kv_heads": 1, "decay": "fixed"},
        {"feature_map": "relu", "normalizer": True, "conv": 2},
    ],
    "base_conv": [{"conv": 1}, {"conv": 7}],
}
CASES = [(name, kw) for name in mixer.names() for kw in [{}, *VARIANTS.get(name, [])]]
assert_equal = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)

every = pytest.mark.parametrize(
    ("name", "kw"), CASES, ids=[f"{n}-{'-'.join(f'{k}={v}' for k, v in kw.items()) or 'default'}" for n, kw in CASES]
)


def build(name, kw, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return mixer[name](D, **kw).to(dtype)


def tokens(B, T, seed=1, dtype=torch.float64):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run_steps(m, x, state=None):
    state = m.init_state(x.shape[0]) if state is None else state
    ys = []
    for x_t in x.unbind(1):
        y, state = m.step(x_t, state)
        ys.append(y)
    return torch.stack(ys, dim=1), state


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_dtype_and_precision(name, kw, dtype):
    m, exact = build(name, kw, dtype=dtype), build(name, kw)
    for T in (1, 2, 33, 64, 70):
        x = tokens(3, T, dtype=dtype)
        y = m(x)
        assert y.shape == x.shape
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact(x.double()), rtol=1e-3, atol=1e-4)


@every
def test_bf16_autocast_stays_near_fp32(name, kw):
    m = build(name, kw, dtype=torch.float32)
    x = tokens(3, 70, dtype=torch.float32)
    exact = m(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(x)
        y_step, state = run_steps(m, x[:, :3])
        y_prefill, state_prefill = m.prefill(x, m.init_state(3))
    assert (y.float() - exact).norm() < 0.03 * exact.norm()
    assert (y_prefill.float() - exact).norm() < 0.03 * exact.norm()
    assert (y_step.float() - exact[:, :3]).norm() < 0.03 * exact[:, :3].norm()
    cached = [torch.bfloat16] if m.state_law == "linear" else []
    for kept in pytree.tree_leaves([state, state_prefill]):
        assert kept.dtype in (torch.float32, torch.int64, *cached), "a state must not lose digits to autocast"
    for grad in torch.autograd.grad(y.float().square().sum(), list(m.parameters())):
        assert grad.dtype == torch.float32
        assert grad.isfinite().all()


@every
def test_causal_to_the_bit(name, kw):
    m, x = build(name, kw, dtype=torch.float32), tokens(2, 70, dtype=torch.float32)
    for t in (1, 37, 69):
        other = torch.cat([x[:, :t], 10 * tokens(2, 70 - t, seed=2, dtype=torch.float32)], dim=1)
        y, y_other = m(x), m(other)
        assert torch.equal(y[:, :t], y_other[:, :t])
        assert not torch.isclose(y[:, t:], y_other[:, t:]).all(dim=-1).any()


@every
def test_every_parameter_gets_a_finite_gradient(name, kw):
    """Near the start: right there, weights of zero may hide other parameters."""
    m, x = build(name, kw, dtype=torch.float32), tokens(2, 40, dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        for p in m.parameters():
            p.add_(0.01 * torch.randn_like(p))
    leaves = {"x": x, **dict(m.named_parameters())}
    grads = torch.autograd.grad(m(x).square().sum(), list(leaves.values()), allow_unused=True)
    for who, grad in zip(leaves, grads, strict=True):
        assert grad is not None, who
        assert grad.isfinite().all(), who
        assert grad.any(), who


@every
def test_zero_input_has_finite_gradients(name, kw):
    m, x = build(name, kw, dtype=torch.float32), torch.zeros(2, 9, D, requires_grad=True)
    grads = torch.autograd.grad(m(x).sum(), [x, *m.parameters()])
    assert all(grad.isfinite().all() for grad in grads)


@every
def test_step_equals_forward(name, kw):
    m, x = build(name, kw), tokens(2, 70)
    ys, _ = run_steps(m, x)
    for T in (1, 2, 3, 4, 5, 17, 63, 64, 65, 70):
        assert_equal(ys[:, :T], m(x[:, :T]))


@every
def test_prefill_equals_the_steps(name, kw):
    """The output, every tensor of the state, and what further steps make of it."""
    m = build(name, kw).requires_grad_(False)
    x, stepped, t = tokens(2, 70), m.init_state(2), 0
    whole = m(x)
    for T in (1, 6, 67):
        ys, stepped = run_steps(m, x[:, t:T], stepped)
        y, state = m.prefill(x[:, :T], m.init_state(2))
        assert_equal(y[:, t:], ys)
        assert_equal(y, whole[:, :T])
        torch.testing.assert_close(state, stepped, rtol=1e-9, atol=1e-9)
        assert_equal(run_steps(m, x[:, T : T + 20], state)[0], whole[:, T : T + 20])
        more, state = m.prefill(x[:, T:69], state)
        assert_equal(more, whole[:, T:69])
        assert_equal(run_steps(m, x[:, 69:], state)[0], whole[:, 69:])
        t = T


@every
def test_gradients_of_step_equal_those_of_forward(name, kw):
    m, x, weight = build(name, kw), tokens(2, 11).requires_grad_(), tokens(2, 11, seed=3)
    leaves = [x, *m.parameters()]
    parallel = torch.autograd.grad((m(x) * weight).sum(), leaves)
    stepwise = torch.autograd.grad((run_steps(m, x)[0] * weight).sum(), leaves)
    assert_equal(stepwise, parallel)


@every
def test_a_state_can_be_continued_twice(name, kw):
    m, x = build(name, kw).requires_grad_(False), tokens(2, 19)
    other = torch.cat([x[:, :8], tokens(2, 11, seed=2)], dim=1)
    _, prefix = run_steps(m, x[:, :8])
    before = copy.deepcopy(prefix)
    for full in (x, other):
        assert_equal(run_steps(m, full[:, 8:], prefix)[0], m(full)[:, 8:])
    torch.testing.assert_close(prefix, before, rtol=0, atol=0)


@every
def test_rows_of_a_batch_do_not_meet(name, kw):
    m, x = build(name, kw), tokens(4, 35)
    y, (y_step, state) = m(x), run_steps(m, x)
    for i in range(4):
        assert_equal(m(x[i : i + 1]), y[i : i + 1])
    rows = [2, 0]
    kept = pytree.tree_map(lambda s: s[rows], state)
    new = tokens(4, 1, seed=4)[:, 0]
    assert_equal(m.step(new[rows], kept)[0], m.step(new, state)[0][rows])
    assert_equal(y_step[rows], y[rows])


@every
@pytest.mark.parametrize("T", [1, 40])
def test_stacked_equals_a_loop(name, kw, T):
    models = [build(name, kw, seed=s) for s in range(3)]
    x = torch.stack([tokens(2, T, seed=s) for s in range(3)])
    weight = torch.stack([tokens(2, T, seed=10 + s) for s in range(3)])
    params, buffers = stack_module_state(models)
    y = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)))(params, buffers, x)
    grads = torch.autograd.grad((y * weight).sum(), list(params.values()), materialize_grads=True)
    for i, m in enumerate(models):
        alone = m(x[i])
        assert_equal(y[i], alone)
        expected = torch.autograd.grad((alone * weight[i]).sum(), list(m.parameters()), materialize_grads=True)
        assert_equal([g[i] for g in grads], list(expected))


@every
def test_stacked_under_autocast_stays_near_fp32(name, kw):
    models = [build(name, kw, seed=s, dtype=torch.float32) for s in range(3)]
    x = torch.stack([tokens(2, 40, seed=s, dtype=torch.float32) for s in range(3)])
    params, buffers = stack_module_state(models)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)))(params, buffers, x).float()
    for i, m in enumerate(models):
        assert (y[i] - m(x[i])).norm() < 0.03 * m(x[i]).norm()
    grads = torch.autograd.grad(y.square().sum(), list(params.values()))
    assert all(grad.isfinite().all() and grad.dtype == torch.float32 for grad in grads)


@every
def test_initialisation_follows_the_seed(name, kw):
    first, again, other = (build(name, kw, seed=s) for s in (0, 0, 1))
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True))


@every
def test_runs_on_meta(name, kw):
    with torch.device("meta"):
        m = mixer[name](D, **kw)
        y, state = run_steps(m, torch.empty(2, 3, D))
        assert m(torch.empty(2, 70, D)).shape == (2, 70, D)
    assert y.shape == (2, 3, D)
    assert nbytes(state) == 2 * build(name, kw, dtype=torch.float32).state_bytes(3)


@every
def test_live_state_bytes_are_those_that_are_not_zero(name, kw):
    m = build(name, kw, dtype=torch.float32)
    state = m.init_state(1)
    with torch.no_grad():
        for T, x in enumerate(tokens(1, 40, dtype=torch.float32).unbind(1)):
            if T in (0, 1, 2, 3, 4, 7, 8, 31, 32, 33):
                empty = sum(nbytes(s[:, :, l]) for s in slots(state) for l in range(s.shape[2]) if not s[:, :, l].any())
                assert m.live_state_bytes(T) == m.state_bytes(T) - empty
            _, state = m.step(x, state)


def slots(state):
    """Tensors with slots on axis 2."""
    found = []
    for s in state if isinstance(state, tuple) else []:
        if isinstance(s, FenwickState):
            found.append(s.slots)
        elif isinstance(s, dict):
            found += [s[name] for name in BY_RANK if name in s]
    return found


@every
def test_state_bytes_are_those_of_the_live_state(name, kw):
    m = build(name, kw, dtype=torch.float32)
    with torch.no_grad():
        _, state = run_steps(m, tokens(1, 70, dtype=torch.float32))
    assert m.state_bytes(70) == nbytes(state)
    assert m.state_bytes(0) == nbytes(m.init_state(1))
    assert nbytes(m.init_state(5)) == 5 * nbytes(m.init_state(1))


STATE_BYTES = [
    ("attention", {}, lambda T: 4 * T * 2 * D),
    ("attention", {"heads": 2, "rope": True}, lambda T: 4 * T * 2 * D + 8),
    ("attention", {"heads": 2, "head_dim": 6, "window": 5}, lambda T: 4 * min(T, 5) * 2 * 12),
    ("attention", {"conv": 4}, lambda T: 4 * (T * 2 * D + 3 * 3 * D)),
    ("linear_attention", {}, lambda T: 4 * D * (D + 1)),
    ("linear_attention", {"heads": 2, "feature_map": "silu", "normalizer": False}, lambda T: 4 * 2 * 8 * 8),
    ("linear_attention", {"conv": 3}, lambda T: 4 * (D * (D + 1) + 2 * 3 * D)),
    ("mamba2", {}, lambda T: 4 * (32 * 128 + 3 * (32 + 2 * 128))),
    ("mamba2", {"d_state": 8, "head_dim": 4, "n_groups": 2}, lambda T: 4 * (8 * 8 * 4 + 3 * (32 + 2 * 2 * 8))),
    ("mamba2", {"d_state": 8, "conv": 0}, lambda T: 4 * 32 * 8),
    ("gated_deltanet", {}, lambda T: 4 * (16 * 32 + 3 * (16 + 16 + 32))),
    ("gated_deltanet", {"heads": 2, "conv": 0}, lambda T: 4 * 2 * 8 * 16),
    ("base_conv", {}, lambda T: 4 * 2 * D),
    ("log_linear_attention", {"levels": 7}, lambda T: 4 * 7 * D * D + 8),
    ("log_linear_mamba2", {}, lambda T: 4 * (15 * 32 * 128 + 3 * (32 + 2 * 128)) + 8),
    ("log_linear_mamba2", {"d_state": 8, "conv": 0, "levels": 4}, lambda T: 4 * 4 * 32 * 8 + 8),
    ("log_linear_gated_deltanet", {}, lambda T: 4 * (15 * 16 * 32 + 3 * (16 + 16 + 32)) + 8),
    ("dla", {"capacity": 7}, lambda T: 4 * 7 * D * D + 8 + 7 * (8 + 8)),
    ("dla", {"capacity": 7, "cuts": "blocks"}, lambda T: 4 * 7 * D * D + 8 + 7 * 8),
    ("dla_mamba2", {"d_state": 8, "conv": 0, "capacity": 4}, lambda T: 4 * 4 * 32 * 8 + 8 + 4 * (8 + 8)),
    ("dla_gated_deltanet", {"capacity": 3}, lambda T: 4 * (4 * 16 * 32 + 3 * (16 + 16 + 32)) + 8 + 3 * (8 + 8)),
]


@pytest.mark.parametrize(("name", "kw", "expected"), STATE_BYTES, ids=[f"{n}-{kw}" for n, kw, _ in STATE_BYTES])
def test_state_bytes_by_hand(name, kw, expected):
    m = build(name, kw, dtype=torch.float32)
    assert {T: m.state_bytes(T) for T in (1, 4, 5, 6, 40)} == {T: expected(T) for T in (1, 4, 5, 6, 40)}
    integers = 8 * ("rope" in kw or "log_linear" in name)
    if "dla" in name:  # the position; tokens and, where scores decide, scores of every slot
        integers = 8 + 8 * kw["capacity"] * (1 + (kw.get("cuts", "scored") == "scored"))
    assert build(name, kw).state_bytes(4) == 2 * (expected(4) - integers) + integers
