"""Higher-order linear attention: the dense definition, the recurrence and the composition agree, and what every
operator with a state must satisfy. Tolerances are relative to the largest value, in float64 unless said otherwise."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels import hla

from .contract import CHUNKS, DIMS, HEADS, TOL, assert_close, error
from .hla import GATES, OPERATORS, Operator, definition, gradients, leaves, make, tensors, values

LENGTHS = (1, 2, 15, 16, 17, 64, 65, 100)
CASES = [
    (T, CHUNKS[(n + n // 5) % 5], HEADS[n % 4], DIMS[n // 2 % 3], GATES[(3 * n + n // 8) % 7], bool(n // 8))
    for n, T in enumerate(LENGTHS * 2)
]
every = pytest.mark.parametrize("op", OPERATORS, ids=str)
gated = pytest.mark.parametrize("op", [op for op in OPERATORS if op.gated], ids=str)


def options(op: Operator, ridge: float = 0.3) -> dict[str, float]:
    return {"ridge": ridge} if op.metric else {}


@every
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "T{}-C{}-G{}H{}-K{}V{}-{}-{}".format(*c[:2], *c[2], *c[3], *c[4:])
)
def test_dense_recurrence_and_composition_agree(op, case):
    T, chunk, heads, dims, gate, start = case
    inputs = make(op, T, heads=heads, dims=dims, gate=gate, start=start)
    given = {**options(op), "scale": 0.7, "output_final_state": True}
    truth = values(op.call, inputs, **given, backend="reference")
    assert all(x.isfinite().all() for x in truth.values())
    assert_close(values(op.call, inputs, **given, backend="torch", chunk_size=chunk), truth)

    inputs.pop("initial_state", None)
    recurrent = values(op.call, inputs, scale=0.7, **options(op), backend="reference")
    copies = leaves(inputs)
    o = definition(op, copies, 0.7, 0.3)
    assert_close({"o": o, **gradients(o, None, tensors(copies))}, recurrent)


def test_the_cases_meet_every_gate_and_every_chunk():
    assert {c[4] for c in CASES} == set(GATES)
    assert {c[1] for c in CASES} == set(CHUNKS)


@every
@pytest.mark.parametrize("feature_map", ["elu", "relu", "softmax"])
def test_the_ratio_is_the_operator_over_itself_at_ones(op, feature_map):
    inputs = make(op, 33, start=False, gate="both")
    phi = {"elu": lambda x: torch.where(x > 0, x + 1, x.exp()), "relu": lambda x: x.clamp(min=0)}
    phi["softmax"] = lambda x: x.exp() / x.exp().sum(-1, keepdim=True)
    mapped = inputs | {n: phi[feature_map](inputs[n]) for n in ("q", "k")}
    truth = definition(op, mapped, 0.5, 0.3, normalize=True)
    for backend in ("reference", "torch"):
        o, _ = op.call(**inputs, **options(op), scale=0.5, feature_map=feature_map, normalize=True, backend=backend)
        assert error(o, truth) <= TOL


@every
def test_a_ratio_is_an_average_of_values(op):
    """Weights >= 0 that sum to 1, but for the small number in the denominator: no output leaves the range of v."""
    inputs = make(op, 40, heads=(2, 2))
    o, _ = op.call(**inputs, feature_map="elu", normalize=True)
    low, high = (getattr(inputs["v"], m)(dim=1, keepdim=True) for m in ("amin", "amax"))
    assert (o <= high + 1e-4).all()
    assert (o >= low - 1e-4).all()
    with_ones = inputs | {"v": torch.ones_like(inputs["v"])}
    o, _ = op.call(**with_ones, feature_map="elu", normalize=True)
    assert error(o, torch.ones_like(o)) <= 1e-5


@every
@pytest.mark.parametrize("normalize", [False, True])
def test_two_calls_are_one(op, normalize):
    inputs = make(op, 40, start=True, normalize=normalize)
    kinds: dict[str, Any] = {"feature_map": "elu", "normalize": True} if normalize else {}
    given = {**options(op), **kinds, "output_final_state": True}
    truth = values(op.call, inputs, **given, backend="reference")
    for cut, chunk in ((1, 16), (16, 16), (23, 7), (39, None)):

        def parts(initial_state: Any, cut: int = cut, chunk: int | None = chunk, **kw: Any) -> tuple[Tensor, Any]:
            rest = {n: kw.pop(n) for n in set(kw) - {"q", "k", "v", "log_decay", "outer_log_decay"}}
            o1, state = op.call(**{n: x[:, :cut] for n, x in kw.items()}, initial_state=initial_state, **rest)
            o2, state = op.call(**{n: x[:, cut:] for n, x in kw.items()}, initial_state=state, chunk_size=chunk, **rest)
            return torch.cat([o1, o2], dim=1), state

        assert_close(values(parts, inputs, **given), truth)


@every
@pytest.mark.parametrize(("gate", "heads"), [("both", (2, 4)), ("none", (3, 3)), ("heads", (1, 3)), ("inner", (2, 2))])
@pytest.mark.parametrize("normalize", [False, True])
def test_steps_are_the_whole(op, gate, heads, normalize):
    inputs = make(op, 20, gate=gate, heads=heads, start=True, normalize=normalize)
    given: dict[str, Any] = {**options(op), "scale": 0.6}
    given |= {"feature_map": "relu", "normalize": True} if normalize else {}
    o, final = op.call(**inputs, **given, output_final_state=True)
    state = inputs["initial_state"]
    sizes = [x.numel() for x in state]
    for t in range(20):
        gates = [inputs.get(n) for n in ("log_decay", "outer_log_decay")] if op.gated else []
        gates = [x if x is None or x.dim() == 1 else x[:, t] for x in gates]
        y, state = op.step(*(inputs[n][:, t] for n in "qkv"), *gates, state, **given)
        assert error(y, o[:, t]) <= TOL
        assert [x.numel() for x in state] == sizes
    assert_close(state._asdict(), final._asdict())


@every
def test_no_output_depends_on_a_later_token_to_the_bit(op):
    inputs = make(op, 70, dtype=torch.float32)
    for t, form in product((1, 16, 69), ({"chunk_size": 16}, {"chunk_size": 70}, {"backend": "reference"})):
        before, _ = op.call(**inputs, **form)
        other = {n: torch.cat([x[:, :t], 0.5 * x[:, t:] - 0.25], dim=1) for n, x in inputs.items()}
        after, _ = op.call(**other, **form)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.isclose(after[:, t:], before[:, t:]).all(-1).any()


BOUNDS = (0, 1, 18, 18, 30, 31)


@every
@pytest.mark.parametrize("start", [True, False], ids=["S0", "zero"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_packed_is_one_after_the_other(op, backend, start):
    rows = len(BOUNDS) - 1
    inputs = make(op, BOUNDS[-1], B=1, rows=rows, gate="both", start=start)

    def apart(initial_state: Any = None, **tokens: Tensor) -> tuple[Tensor, Any]:
        os, states = [], []
        for n, (begin, end) in enumerate(pairwise(BOUNDS)):
            first = initial_state and op.state(*(x[n : n + 1] for x in initial_state))
            if begin == end:
                states.append(first or hla.empty(op.state, tokens["q"], B=1, G=2, H=4, K=4, W=3))
                continue
            now = {m: x[:, begin:end] for m, x in tokens.items()}
            o, state = op.call(**now, initial_state=first, output_final_state=True, backend="reference")
            os.append(o)
            states.append(state)
        return torch.cat(os, dim=1), op.state(*map(torch.cat, zip(*states, strict=True)))

    truth = values(apart, inputs)
    packed = {"cu_seqlens": torch.tensor(BOUNDS), "backend": backend}
    assert_close(values(op.call, inputs, **packed, output_final_state=True), truth)
    alone, none = op.call(**inputs, **packed)
    assert none is None
    assert error(alone, truth["o"]) <= TOL


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # by the interpreter
def test_the_triton_kernels_of_linear_attention_serve_it():
    """Packed, with states and shared heads. In Triton's interpreter if there is no GPU."""
    pytest.importorskip("triton")
    gpu = torch.cuda.is_available()
    device, dtype, tol = ("cuda", torch.float32, 1e-3) if gpu else ("cpu", torch.float64, TOL)
    op = next(op for op in OPERATORS if op.name == "hla2_prefix")  # no kernels of its own
    inputs = make(op, BOUNDS[-1], B=1, rows=len(BOUNDS) - 1, start=True, dtype=dtype)
    inputs = {
        n: x.to(device) if isinstance(x, Tensor) else op.state(*(y.to(device) for y in x)) for n, x in inputs.items()
    }
    packed = {"cu_seqlens": torch.tensor(BOUNDS, device=device), "output_final_state": True}
    truth = values(op.call, inputs, **packed, backend="reference")
    assert_close(values(op.call, inputs, **packed, backend="triton"), truth, tol)


@every
@pytest.mark.parametrize("kind", ["identity", "elu", "ratio"])
def test_padding_is_inert(op, kind):
    """Left, right and inner padding that holds anything, NaN included, is as if it were not there."""
    inputs = make(op, 30, B=1, start=True, normalize=kind == "ratio")
    given: dict[str, Any] = {"identity": {}, "elu": {"feature_map": "elu"}}.get(
        kind, {"feature_map": "elu", "normalize": True}
    )
    truth, last = op.call(**inputs, **given, output_final_state=True)
    at = torch.cat([torch.arange(3, 12), torch.arange(15, 36)])
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[:, at] = True
    padded = dict(inputs)
    for n in set(inputs) - {"initial_state"}:
        padded[n] = torch.full((1, 40, *inputs[n].shape[2:]), torch.nan, dtype=torch.float64)
        padded[n][:, at] = inputs[n]
    for backend in ("reference", "torch"):
        copies = leaves(padded)
        o, state = op.call(**copies, **given, mask=mask, output_final_state=True, backend=backend)
        assert error(o[:, at], truth) <= TOL
        assert not o[~mask].any()
        assert_close(state._asdict(), last._asdict())
    grads = torch.autograd.grad(o.sum(), [copies[n] for n in "qkv"])
    if kind == "identity":
        assert all(x[~mask].eq(0).all() for x in grads)


@gated
def test_one_decay_for_all_tokens_is_every_tokens(op):
    scalar = make(op, 20, gate="heads")
    full = {n: x.expand(2, 20, -1) if x.dim() == 1 else x for n, x in scalar.items()}
    assert error(op.call(**scalar)[0], op.call(**full)[0]) <= 1e-14


@gated
def test_the_outer_decay_follows_the_inner(op):
    inputs = make(op, 20, gate="inner")
    outer = op.power * inputs["log_decay"].repeat_interleave(2, dim=2)
    assert torch.equal(op.call(**inputs)[0], op.call(**inputs, outer_log_decay=outer)[0])
    only_outer = {n: x for n, x in inputs.items() if n != "log_decay"} | {"outer_log_decay": outer}
    none = op.call(**only_outer, log_decay=torch.zeros_like(inputs["log_decay"]))[0]
    assert error(op.call(**only_outer)[0], none) <= 1e-13


@gated
def test_no_decay_is_a_decay_of_one(op):
    inputs = make(op, 65, gate="none")
    truth = values(op.call, inputs, chunk_size=16, output_final_state=True)
    zero = {"log_decay": torch.zeros(2), "outer_log_decay": torch.zeros(4)}
    assert_close(values(op.call, inputs, **zero, chunk_size=16, output_final_state=True), truth, 1e-13)


@gated
def test_minus_infinity_forgets(op):
    inputs = make(op, 40)
    for n in ("log_decay", "outer_log_decay"):
        inputs[n][:, 5::7] = -torch.inf
    truth = values(op.call, inputs, backend="reference", output_final_state=True)
    assert all(x.isfinite().all() for x in truth.values())
    assert_close(values(op.call, inputs, chunk_size=16, output_final_state=True), truth)


@every
def test_gradcheck(op):
    given = tensors(leaves(make(op, 5, B=1, heads=(1, 2), dims=(2, 1), gate="both", start=True)))

    def f(*xs: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(given, xs, strict=True))
        state = op.state(*(inputs.pop(n) for n in given if n.startswith("initial_state")))
        o, state = op.call(**inputs, **options(op), initial_state=state, output_final_state=True, chunk_size=2)
        return o, *state

    assert torch.autograd.gradcheck(f, tuple(given.values()))


@every
def test_vmap_is_a_loop(op):
    for T, chunk, gate in ((20, 8, "both"), (9, None, "none")):
        members = [make(op, T, gate=gate, start=True, seed=s) for s in range(3)]
        names = list(tensors(members[0]))
        stack = [torch.stack([tensors(m)[n] for m in members]).requires_grad_() for n in names]

        def loss(*xs: Tensor, names: list[str] = names, chunk: int | None = chunk) -> Tensor:
            inputs = dict(zip(names, xs, strict=True))
            state = op.state(*(inputs.pop(n) for n in names if n.startswith("initial_state")))
            o, state = op.call(**inputs, initial_state=state, output_final_state=True, chunk_size=chunk)
            return (o * o).sum() + sum(x.sin().sum() for x in state)

        together = torch.autograd.grad(torch.func.vmap(loss)(*stack).sum(), stack)
        nested = torch.func.vmap(torch.func.grad(loss, tuple(range(len(names)))))(*(x.detach() for x in stack))
        for m in range(3):
            alone = [x.detach()[m].clone().requires_grad_() for x in stack]
            for n, g, *others in zip(names, torch.autograd.grad(loss(*alone), alone), together, nested, strict=True):
                assert [error(x[m], g) <= TOL for x in others] == [True, True], n


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(op, dtype):
    """The output is the float32 output rounded once; the state stays float32."""
    half = make(op, 40, gate="both", dtype=dtype)
    wide = {n: x.float() for n, x in half.items()}
    o, state = op.call(**half, output_final_state=True, chunk_size=16)
    wide_o, wide_state = op.call(**wide, output_final_state=True, chunk_size=16)
    assert o.dtype == dtype
    assert torch.equal(o, wide_o.to(dtype))
    for x, y in zip(state, wide_state, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)
    gates = [half["log_decay"][:, 0], half["outer_log_decay"][:, 0]] if op.gated else []
    y, after = op.step(*(half[n][:, 0] for n in "qkv"), *gates, state)
    assert (y.dtype, {x.dtype for x in after}) == (dtype, {torch.float32})


@every
def test_float32_is_hardly_worse_than_the_recurrence(op):
    """The composition in float32 is hardly further from float64 than the recurrence in float32 is."""
    for gate in ("none", "both", "reset"):
        rounded = make(op, 130, B=1, dims=(16, 8), gate=gate, dtype=torch.float32)
        truth = values(op.call, {n: x.double() for n, x in rounded.items()}, output_final_state=True)
        fast = values(op.call, rounded, output_final_state=True)
        loop = values(op.call, rounded, output_final_state=True, backend="reference")
        errors = {n: (error(fast[n], t), error(loop[n], t)) for n, t in truth.items()}
        assert all(ours <= 4 * theirs + 2e-6 for ours, theirs in errors.values()), errors


@every
def test_autocast_leaves_it_alone(op):
    inputs = make(op, 40, dtype=torch.float32)
    plain, state = op.call(**inputs, feature_map="elu", output_final_state=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, cast_state = op.call(**inputs, feature_map="elu", output_final_state=True)
    assert torch.equal(plain, cast)
    assert all(torch.equal(x, y) for x, y in zip(state, cast_state, strict=True))


@every
def test_meta(op):
    inputs = {n: x.to("meta") for n, x in make(op, 40, dtype=torch.bfloat16).items()}
    o, state = op.call(**inputs, output_final_state=True, chunk_size=16)
    assert (o.shape, o.dtype) == ((2, 40, 4, 3), torch.bfloat16)
    size = {"B": 2, "G": 2, "H": 4, "K": 4, "W": 3}
    assert [x.shape for x in state] == [x.shape for x in hla.empty(op.state, o, **size)]


X = torch.zeros(2, 5, 4, 8)
SHARED = torch.zeros(2, 5, 2, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": X[0]}, r"hla2: q has shape \[5, 4, 8\], expected \[B, T, H, K\]"),
        ({"k": X[..., :7]}, r"k has shape \[2, 5, 4, 7\], expected \[B, T, G, K\] = \[2, 5, 4, 8\]"),
        ({"v": X[:, :4]}, r"v has shape \[2, 4, 4, 8\], expected \[B, T, G, V\] = \[2, 5, 2, V\]"),
        ({"k": X[:, :, :3], "v": X[:, :, :3]}, "k has G = 3 heads, which must divide the H = 4 heads of q"),
        ({"log_decay": X[..., 0]}, r"log_decay has shape \[2, 5, 4\], expected \[B, T, G\] = \[2, 5, 2\]"),
        ({"log_decay": X[0, 0, :, 0]}, r"log_decay has shape \[4\], expected \[G\] = \[2\]"),
        ({"outer_log_decay": X[0, 0, 0]}, r"outer_log_decay has shape \[8\], expected \[H\] = \[4\]"),
        ({"mask": X[..., 0, 0]}, r"mask has shape \[2, 5\] and dtype torch.float32, expected bool \[B, T\] = \[2, 5\]"),
        ({"normalize": True}, 'normalize=True with feature_map "identity": its weights change sign'),
        ({"normalize": True, "feature_map": "silu"}, "expected one of elu, relu, softmax"),
        ({"feature_map": "cosine"}, 'feature_map "cosine", expected one of elu, relu, softmax, silu, identity'),
        ({"chunk_size": 0}, "chunk_size = 0, expected at least 1"),
        ({"q": X[:, :0], "k": SHARED[:, :0], "v": SHARED[:, :0]}, "T = 0, expected at least 1"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "q has B = 2 rows, expected 1"),
        ({"initial_state": (X, X)}, "initial_state is a tuple, expected a HLA2State"),
        (
            {"initial_state": hla.HLA2State(torch.zeros(2, 2, 8, 8), torch.zeros(2, 4, 8, 7))},
            r"initial_state.F has shape \[2, 4, 8, 7\], expected \[B, H, K, W\] = \[2, 4, 8, 8\]",
        ),
    ],
)
def test_a_wrong_argument_is_named(given, message):
    with pytest.raises(UserError, match=message):
        hla.hla2(**({"q": X, "k": SHARED, "v": SHARED} | given))


def test_a_wrong_argument_of_a_step_is_named():
    x, state = X[:, 0], hla.empty(hla.HLA3State, X, B=2, G=4, H=4, K=8, W=8)
    with pytest.raises(UserError, match="hla2_step: state is a HLA3State, expected a HLA2State"):
        hla.hla2_step(x, x, x, None, None, state)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"hla3_step: state.P has shape \[2, 4, 8, 8\], expected .* = \[2, 4, 8, 9\]"):
        hla.hla3_step(x, x, x, None, None, state, feature_map="relu", normalize=True)
