"""What the tests of Triton kernels for short rows share: inputs, the kernels, and what holds for any of them.

`names` are the operator's arguments that have gradients, in its order.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import contract

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.float32 if GPU else torch.float64  # there are no float64 kernels for a GPU

Results = dict[str, Tensor]


def inputs(case: Any, dtype: torch.dtype, levels: int | None = None) -> dict[str, Any]:
    """Of a case with T, B, heads (G, H), dims (K, V) and gate; `level_scale` where there are levels."""
    draw = torch.Generator().manual_seed(case.T)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).to(DEVICE)  # noqa: E731
    B, T, (G, H), (K, V) = case.B, case.T, case.heads, case.dims
    gate = contract.gates(case.gate, torch.rand(B, T, H, generator=draw, dtype=torch.float64))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made = {"q": normal(B, T, G, K), "k": normal(B, T, G, K), "v": normal(B, T, H, V)}
    if levels is not None:
        made["level_scale"] = normal(B, T, H, levels).to(wide if T % 2 else dtype)
    return made | {"log_decay": None if gate is None else gate.to(wide).to(DEVICE), "do": normal(B, T, H, V)}


def truth(recurrence: Callable[..., tuple[Tensor, Any]], names: Sequence[str], x: dict[str, Any]) -> Results:
    """The recurrence in float64, scale 0.3."""
    leaf = {n: x[n].detach().double().requires_grad_() for n in names if x[n] is not None}
    o, _ = recurrence(*(leaf.get(n) for n in names), 0.3, None)
    grads = torch.autograd.grad(o, list(leaf.values()), x["do"].double())
    return {"o": o.detach(), **{f"d{n}": g for n, g in zip(leaf, grads, strict=True)}}


def kernels(module: ModuleType, names: Sequence[str], x: dict[str, Any], how: Any = None) -> Results:
    """Into fresh memory full of NaN, so that an element nobody writes is seen; scale 0.3."""
    given = (*(x[n] for n in names), 0.3)
    torch.use_deterministic_algorithms(True)
    try:
        o, grads = module.forward(*given, how), module.backward(*given, x["do"], how)
    finally:
        torch.use_deterministic_algorithms(False)
    return {"o": o, **{f"d{n}": g for n, g in zip(names, grads, strict=True) if g is not None}}


def assert_nothing_beside_is_read(run: Callable[[dict[str, Any]], Results], x: dict[str, Any]) -> None:
    """Tokens, groups and heads beyond those of a program are NaN. x has one sequence."""
    wide: dict[str, Any] = {}
    for n, t in x.items():
        beside = (0, 0, 0, 0, 0, 0, 1, 1) if t.dim() == 4 else (0, 0, 0, 0, 1, 1)
        wide[n] = torch.nn.functional.pad(t, beside, value=torch.nan)
    found, expected = run(wide), run(x)
    for n, t in expected.items():
        assert torch.equal(found[n][1:2], t), n


def assert_sequences_are_alone(run: Callable[[dict[str, Any]], Results], x: dict[str, Any]) -> None:
    """x has two sequences."""
    both = run(x)
    alone = run({n: t[1:] for n, t in x.items()})
    assert all(torch.equal(both[n][1:], alone[n]) for n in both)
