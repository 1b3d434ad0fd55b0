"""The five operators of higher-order linear attention as rows of one table, and random inputs for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixassay.kernels import hla
from mixassay.kernels.hla import dense

from . import contract
from .contract import Inputs


@dataclass(frozen=True)
class Operator:
    name: str
    call: Callable[..., tuple[Tensor, Any]]
    step: Callable[..., tuple[Tensor, Any]]
    dense: Callable[..., Tensor]
    state: type
    degree: int  # in q and in k
    power: int  # of the outer decay, by default
    gated: bool = True
    metric: bool = True  # reads S, so it has a ridge

    def __str__(self) -> str:
        return self.name


OPERATORS = [
    Operator("hla2", hla.hla2, hla.hla2_step, dense.hla2, hla.HLA2State, 2, 2),
    Operator("hla2_prefix", hla.hla2_prefix, hla.hla2_prefix_step, dense.hla2_prefix, hla.HLA2PrefixState, 2, 1),
    Operator("ahla", hla.ahla, hla.ahla_step, dense.ahla, hla.AHLAState, 2, 1, metric=False),
    Operator("hla3", hla.hla3, hla.hla3_step, dense.hla3, hla.HLA3State, 3, 3),
    Operator(
        "hla3_paper",
        hla.hla3_paper,
        hla.hla3_paper_step,
        dense.hla3_paper,
        hla.HLA3PaperState,
        3,
        1,
        gated=False,
        metric=False,
    ),
]

GATES = ("none", "inner", "outer", "both", "heads", "strong", "reset")


def make(
    op: Operator,
    T: int,
    *,
    B: int = 2,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (4, 3),
    gate: str = "both",
    start: bool = False,
    normalize: bool = False,
    rows: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Tensor arguments by name. `rows` is the number of initial states, B if not given."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
    uniform = lambda *shape: torch.rand(*shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
    (G, H), (K, V) = heads, dims
    made: Inputs = {"q": normal(B, T, H, K), "k": normal(B, T, G, K), "v": normal(B, T, H, V)[:, :, :G]}
    if op.gated and gate != "none":
        axes = (lambda heads: (heads,)) if gate == "heads" else (lambda heads: (B, T, heads))
        kind = {"strong": "mixed", "reset": "reset"}.get(gate, "weak")
        if gate != "outer":
            made["log_decay"] = contract.gates(kind, uniform(*axes(G)))
        if gate != "inner":
            made["outer_log_decay"] = contract.gates(kind, uniform(*axes(H)))
    if start:
        size = {"B": rows or B, "G": G, "H": H, "K": K, "W": V + normalize}
        made["initial_state"] = op.state(*(normal(*x.shape) for x in hla.empty(op.state, made["q"], **size)))
    return made


def leaves(inputs: Inputs) -> Inputs:
    """Copies that want gradients, states included."""
    copy = lambda x: x.detach().clone().requires_grad_()  # noqa: E731
    return {n: copy(x) if isinstance(x, Tensor) else type(x)(*map(copy, x)) for n, x in inputs.items()}


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    """By name, a state's matrices one by one."""
    found: dict[str, Tensor] = {}
    for n, x in inputs.items():
        found |= {n: x} if isinstance(x, Tensor) else {f"{n}.{m}": y for m, y in x._asdict().items()}
    return found


def values(call: Callable[..., tuple[Tensor, Any]], inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """Output, final state, and the gradients of a fixed random projection of both."""
    inputs = leaves(inputs)
    o, state = call(**inputs, **options)
    return {"o": o, **gradients(o, state, tensors(inputs))}


def gradients(o: Tensor, state: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The final state's matrices, and the gradients of all that was given."""
    draw = torch.Generator().manual_seed(1)
    results = [o, *(state or ())]
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in results]
    total = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
    assert isinstance(total, Tensor)
    grads = torch.autograd.grad(total, list(given.values()), materialize_grads=True)
    kept = {} if state is None else state._asdict()
    return {n: x.detach() for n, x in kept.items()} | {f"d{n}": g for n, g in zip(given, grads, strict=True)}


def definition(op: Operator, inputs: Inputs, scale: float, ridge: float, normalize: bool = False) -> Tensor:
    """The dense form, for every head of q its own k and v, from an empty state."""
    q, v = inputs["q"], inputs["v"]
    T, G, H = q.shape[1], v.shape[2], q.shape[2]
    repeat = lambda x: x.repeat_interleave(H // G, dim=2)  # noqa: E731
    k, v = repeat(inputs["k"]), repeat(v)
    options: list[Any] = []
    if op.gated:
        inner, outer = inputs.get("log_decay"), inputs.get("outer_log_decay")
        if inner is not None:
            inner = repeat(inner.expand(q.shape[0], T, G))
            outer = op.power * inner if outer is None else outer
        options = [inner, None if outer is None else outer.expand(q.shape[:3])]
    options += [scale, ridge] if op.metric else [scale]
    o = op.dense(q, k, v, *options)
    return o / (op.dense(q, k, torch.ones_like(v[..., :1]), *options) + 1e-6) if normalize else o
