"""What every operator with a state must satisfy. An operator's test file only lists its inputs and shapes.

Three forms are compared in float64: the recurrence (the definition), the torch form under test, and an independent
dense form. Truth for float32 is the recurrence in float64 on the same rounded inputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]  # tensors, and None for what is not given
TOL = 1e-10  # of the largest value of the tensor compared, or of 1

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 100, 130)
CHUNKS = (1, 7, 16, 64, None)
HEADS = ((1, 1), (1, 3), (2, 4), (3, 3))  # G, H
DIMS = ((4, 3), (3, 5), (8, 8))  # K, V
GATES = ("none", "zero", "weak", "strong", "mixed", "reset")
LOSSES = ("output", "state", "both")
STARTS = (False, True)


@dataclass(frozen=True)
class Case:
    T: int
    chunk: int | None
    heads: tuple[int, int] = (2, 4)
    dims: tuple[int, int] = (4, 3)
    gate: str = "weak"
    loss: str = "both"
    start: bool = True
    B: int = 2

    def __str__(self) -> str:
        (G, H), (K, V) = self.heads, self.dims
        return f"T{self.T}-C{self.chunk}-G{G}H{H}-K{K}V{V}-{self.gate}-{self.loss}-{'S0' if self.start else 'zero'}"


def cases() -> Iterator[Case]:
    """Every length with every chunk size. The other axes rotate at paces of their own, so that between them, and with
    the chunk size, every pair of values occurs (`test_contract.py` counts)."""
    for n, (T, chunk) in enumerate(product(LENGTHS, CHUNKS)):
        yield Case(
            T,
            chunk,
            heads=HEADS[(n + n // 7) % 4],
            dims=DIMS[(n + n // 11) % 3],
            gate=GATES[(2 * n + n // 12) % 6],
            loss=LOSSES[n // 4 % 3],
            start=STARTS[(n + n // 4) % 2],
        )


@dataclass(frozen=True)
class Operator:
    call: Callable[..., tuple[Any, Any]]  # (o, final state or None)
    step: Callable[..., tuple[Tensor, Tensor]]
    dense: Callable[..., tuple[Tensor, Tensor]]
    names: tuple[str, ...]  # of the tensor arguments before initial_state, in order

    def make(self, case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
        """Keys repeat and are not normalised, beta is in (0, 2); beta |k|^2 < 2, where the delta rule is stable."""
        draw = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        uniform = lambda *shape: torch.rand(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
        B, T, (G, H), (K, V) = case.B, case.T, case.heads, case.dims
        k = torch.nn.functional.normalize(normal(B, T, G, K), dim=-1) * (0.5 + 0.5 * uniform(B, T, G, 1))
        k[:, 1::3] = k[:, : len(range(1, T, 3))]
        made: Inputs = {
            "q": normal(B, T, G, K),
            "k": k,
            "v": normal(B, T, H, V),
            "beta": 2 * uniform(B, T, H),
            "log_decay": gates(case.gate, uniform(B, T, H)),
            "initial_state": normal(B, H, K, V) if case.start else None,
        }
        return {n: None if x is None else x.to(dtype) for n, x in made.items() if n in (*self.names, "initial_state")}

    def run(self, inputs: Inputs, form: str, **options: Any) -> tuple[Tensor, Tensor]:
        if form == "dense":
            scale = inputs["q"].shape[-1] ** -0.5
            return self.dense(*(inputs[n] for n in self.names), scale, inputs["initial_state"])
        o, state = self.call(**inputs, output_final_state=True, backend=form, **options)
        assert state is not None
        return o, state


def gates(kind: str, u: Tensor) -> Tensor | None:
    """Log decays of a kind from uniform numbers of their shape."""
    mixed = torch.where(u < 0.3, 0.0, torch.where(u < 0.8, -0.1 * u, -20.0))
    return {
        "none": None,
        "zero": torch.zeros_like(u),
        "weak": -0.1 * u,
        "strong": torch.full_like(u, -20.0),
        "mixed": mixed,
        "reset": torch.where(u < 0.1, -1e4, mixed),
    }[kind]


def leaves(inputs: Inputs) -> Inputs:
    return {n: None if x is None else x.detach().clone().requires_grad_() for n, x in inputs.items()}


def values(op: Operator, inputs: Inputs, form: str, loss: str = "both", **options: Any) -> dict[str, Tensor]:
    """Output, final state and the gradient of a fixed random projection of what `loss` names, for every input."""
    inputs = leaves(inputs)
    o, state = op.run(inputs, form, **options)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (o, state)]
    total = o.new_zeros(())
    if loss in ("output", "both"):
        total = total + (o * weights[0]).sum()
    if loss in ("state", "both"):
        total = total + (state * weights[1]).sum()
    given = {n: x for n, x in inputs.items() if x is not None}
    grads = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    found = {f"d{n}": torch.zeros_like(x) if g is None else g for (n, x), g in zip(given.items(), grads, strict=True)}
    return {"o": o.detach(), "state": state.detach(), **found}


def error(x: Tensor, truth: Tensor) -> float:
    """Largest difference, relative to the largest true value (or 1). NaN counts as infinite."""
    if x.numel() == 0:
        return 0.0
    x, truth = x.detach().double(), truth.detach().double()
    return float((x - truth).abs().max().nan_to_num(nan=torch.inf) / truth.abs().max().clamp(min=1))


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], tol: float = TOL) -> None:
    errors = {n: error(found[n], t) for n, t in truth.items()}
    assert max(errors.values()) <= tol, errors


def check_forms_agree(op: Operator, case: Case) -> None:
    inputs = op.make(case)
    truth = values(op, inputs, "reference", case.loss)
    assert all(x.isfinite().all() for x in truth.values())
    assert_close(values(op, inputs, "torch", case.loss, chunk_size=case.chunk), truth)
    assert_close(values(op, inputs, "dense", case.loss), truth)


def check_minus_infinity_forgets(op: Operator) -> None:
    """log_decay = -inf equals a decay of exactly zero, without NaN in any gradient."""
    inputs = op.make(Case(40, 16))
    inputs["log_decay"][:, 5::7] = -torch.inf
    truth = values(op, inputs, "reference")
    assert all(x.isfinite().all() for n, x in truth.items())
    assert_close(values(op, inputs, "torch", chunk_size=16), truth)


def check_two_calls_are_one(op: Operator) -> None:
    """State hand-over at any token, gradients included."""
    inputs = op.make(Case(70, 16))
    truth = values(op, inputs, "reference")
    for cut, chunk in ((1, 16), (32, 16), (45, 7), (69, None)):

        def parts(initial_state: Tensor, cut: int = cut, **kw: Any) -> tuple[Tensor, Tensor | None]:
            options = {n: kw.pop(n) for n in set(kw) - set(op.names)}
            o1, state = op.call(**{n: x[:, :cut] for n, x in kw.items()}, initial_state=initial_state, **options)
            o2, state = op.call(**{n: x[:, cut:] for n, x in kw.items()}, initial_state=state, **options)
            return torch.cat([o1, o2], dim=1), state

        assert_close(values(replace(op, call=parts), inputs, "torch", chunk_size=chunk), truth)


def check_steps_are_the_whole(op: Operator) -> None:
    """Token by token through the step function, with and without decay and shared heads."""
    for gate, heads in (("mixed", (2, 4)), ("none", (3, 3)), ("weak", (1, 3))):
        inputs = op.make(Case(20, None, gate=gate, heads=heads))
        o, final = op.run(inputs, "torch")
        state = inputs["initial_state"]
        for t in range(20):
            now = [None if (x := inputs[n]) is None else x[:, t] for n in op.names]
            y, state = op.step(*now, state)
            assert error(y, o[:, t]) <= TOL
        assert error(state, final) <= TOL


def check_causal(op: Operator) -> None:
    """Another token t leaves all earlier outputs bit-equal, and changes output t."""
    inputs = op.make(Case(70, None), dtype=torch.float32)
    for t, chunk in product((0, 1, 15, 16, 69), (16, 70)):
        before, _ = op.run(inputs, "torch", chunk_size=chunk)
        other = {n: x.clone() for n, x in inputs.items()}
        for n in op.names:
            x = other[n]
            x[:, t] = x[:, t] * 0.5 - 0.25
        after, _ = op.run(other, "torch", chunk_size=chunk)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


def check_batch_independent(op: Operator) -> None:
    """Rows in another order give the same rows."""
    inputs = op.make(Case(70, 16, B=4))
    order = torch.tensor([2, 0, 3, 1])
    permuted = {n: None if x is None else x[order] for n, x in inputs.items()}
    truth = {n: x[order] for n, x in values(op, inputs, "torch", chunk_size=16).items() if n in ("o", "state")}
    assert_close(values(op, permuted, "torch", chunk_size=16), truth, 1e-13)


def check_vmap_is_a_loop(op: Operator) -> None:
    """A stack of models under vmap, with an ordinary backward, and with vmap(grad)."""
    for case in (Case(20, 8), Case(16, None, gate="none", start=False), Case(9, 4, heads=(3, 3), gate="reset")):
        _check_vmap(op, case)


def _check_vmap(op: Operator, case: Case) -> None:
    members = [op.make(case, seed=s) for s in range(3)]
    names = [n for n, x in members[0].items() if x is not None]
    stack = [torch.stack([m[n] for m in members]).requires_grad_() for n in names]

    def forward(*xs: Tensor) -> tuple[Tensor, Tensor]:
        return op.run(
            dict.fromkeys(members[0], None) | dict(zip(names, xs, strict=True)), "torch", chunk_size=case.chunk
        )

    def loss(*xs: Tensor) -> Tensor:
        o, state = forward(*xs)
        return (o * o).sum() + state.sin().sum()

    o, _ = torch.func.vmap(forward)(*stack)
    together = torch.autograd.grad(torch.func.vmap(loss)(*stack).sum(), stack)
    nested = torch.func.vmap(torch.func.grad(loss, tuple(range(len(names)))))(*(x.detach() for x in stack))
    for m, member in enumerate(members):
        alone = [x.detach()[m].clone().requires_grad_() for x in stack]
        assert error(o[m], op.run(member, "torch", chunk_size=case.chunk)[0]) <= TOL
        for n, g, *others in zip(names, torch.autograd.grad(loss(*alone), alone), together, nested, strict=True):
            assert [error(x[m], g) <= TOL for x in others] == [True, True], n


def check_any_strides(op: Operator) -> None:
    """Sliced, transposed and expanded inputs, and an expanded gradient."""
    case = Case(33, 16, B=3)
    inputs = op.make(case)
    plain = {n: None if x is None else x.clone() for n, x in inputs.items()}
    for n in ("q", "v", "initial_state"):
        x = inputs[n]
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        wide[..., ::2] = x
        inputs[n] = wide[..., ::2]
    for n in ("k", "log_decay"):
        x = inputs[n]
        inputs[n] = x[:1].transpose(1, 2).contiguous().transpose(1, 2).expand_as(x)
        plain[n] = x[:1].repeat(case.B, *[1] * (x.dim() - 1))
    results = []
    for form in (inputs, plain):
        given = {n: x.detach().requires_grad_() for n, x in form.items() if x is not None}
        o, state = op.run(given, "torch", chunk_size=16)
        grads = torch.autograd.grad(
            (o, state), list(given.values()), [torch.ones(()).to(o).expand_as(x) for x in (o, state)]
        )
        results.append([o, state, *grads])
    for found, truth in zip(*results, strict=True):
        assert error(found, truth) <= 1e-13


def check_options(op: Operator) -> None:
    """Every combination of optional arguments agrees with the definition; the state comes only if asked for."""
    for gate, start, final, scale in product(("none", "weak"), STARTS, (False, True), (None, 1.0, 0.3)):
        inputs = op.make(Case(20, None, gate=gate, start=start))
        for chunk in (8, None):
            o, state = op.call(**inputs, output_final_state=final, scale=scale, chunk_size=chunk)
            truth, last = op.call(**inputs, output_final_state=True, scale=scale, backend="reference")
            assert error(o, truth) <= TOL
            assert (state is not None) == final
            assert state is None or error(state, last) <= TOL


def check_zero_decay_is_no_decay(op: Operator) -> None:
    ungated = op.make(Case(65, 16, gate="none"))
    gated = op.make(Case(65, 16, gate="zero"))
    truth = values(op, ungated, "torch", chunk_size=16)
    assert_close(values(op, gated, "torch", chunk_size=16), truth, 1e-13)


def check_gradcheck(op: Operator) -> None:
    given = {n: x for n, x in leaves(op.make(Case(5, 2, heads=(1, 2), dims=(2, 1), B=1))).items() if x is not None}
    f = lambda *xs: op.run(dict(zip(given, xs, strict=True)), "torch", chunk_size=2)  # noqa: E731
    assert torch.autograd.gradcheck(f, tuple(given.values()))


def check_float32(op: Operator) -> None:
    """The torch form in float32 is hardly further from float64 than the recurrence in float32 is."""
    for gate, chunk in (("none", None), ("weak", 16), ("mixed", 64), ("reset", 64)):
        _check_float32(op, Case(130, chunk, dims=(16, 8), gate=gate, B=1), times=4, floor=2e-6)


def _check_float32(op: Operator, case: Case, times: float, floor: float) -> None:
    rounded = op.make(case, dtype=torch.float32)
    truth = values(op, {n: None if x is None else x.double() for n, x in rounded.items()}, "reference")
    torch32 = values(op, rounded, "torch", chunk_size=case.chunk)
    loop32 = values(op, rounded, "reference")
    errors = {n: (error(torch32[n], t), error(loop32[n], t)) for n, t in truth.items()}
    assert all(ours <= times * loop + floor for ours, loop in errors.values()), errors


def check_low_precision(op: Operator) -> None:
    """Half inputs are summed in float32: the output is the float32 output rounded once, the state stays float32."""
    for dtype in (torch.bfloat16, torch.float16):
        half = op.make(Case(70, 16), dtype=dtype)
        wide = {n: None if x is None else x.float() for n, x in half.items()}
        o, state = op.run(half, "torch", chunk_size=16)
        wide_o, wide_state = op.run(wide, "torch", chunk_size=16)
        assert (o.dtype, state.dtype) == (dtype, torch.float32)
        assert torch.equal(o, wide_o.to(dtype))
        assert torch.equal(state, wide_state)


def check_autocast_leaves_it_alone(op: Operator) -> None:
    inputs = op.make(Case(70, 16), dtype=torch.float32)
    plain = op.run(inputs, "torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = op.run(inputs, "torch")
    assert torch.equal(plain[0], cast[0])
    assert torch.equal(plain[1], cast[1])


def check_meta(op: Operator) -> None:
    inputs = op.make(Case(70, 16), dtype=torch.bfloat16)
    o, state = op.run(inputs, "torch", chunk_size=16)
    meta = {n: None if x is None else x.to("meta") for n, x in inputs.items()}
    fake_o, fake_state = op.run(meta, "torch", chunk_size=16)
    assert (fake_o.shape, fake_o.dtype) == (o.shape, o.dtype)
    assert (fake_state.shape, fake_state.dtype) == (state.shape, state.dtype)


def check_repeats_bit_for_bit(op: Operator) -> None:
    inputs = op.make(Case(130, None), dtype=torch.float32)
    first, second = values(op, inputs, "torch"), values(op, inputs, "torch")
    assert all(torch.equal(first[n], second[n]) for n in first)


CHECKS = [
    check_minus_infinity_forgets,
    check_two_calls_are_one,
    check_steps_are_the_whole,
    check_causal,
    check_batch_independent,
    check_vmap_is_a_loop,
    check_any_strides,
    check_options,
    check_zero_decay_is_no_decay,
    check_gradcheck,
    check_float32,
    check_low_precision,
    check_autocast_leaves_it_alone,
    check_meta,
    check_repeats_bit_for_bit,
]
