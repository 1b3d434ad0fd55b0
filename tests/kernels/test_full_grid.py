"""Every operator in half precision on a grid as full as training's, against the torch form in float32, sequence by
sequence: what a compiler gets wrong for one shape of tiles, or only where many programs run at a time. Without a GPU, a
few heads in the interpreter, which shows that the test itself holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

pytest.importorskip("triton")

from mixassay.kernels.dla.op import dla
from mixassay.kernels.dla.schedule import schedule
from mixassay.kernels.gated_delta_rule import gated_delta_rule
from mixassay.kernels.hla import ahla, hla2
from mixassay.kernels.linear_attention import linear_attention
from mixassay.kernels.log_linear_attention import log_linear_attention
from mixassay.kernels.log_linear_gated_delta_rule import log_linear_gated_delta_rule

# The interpreter turns arrays of one element into numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LIMITS = {torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""The largest error of a sequence's output or gradient, relative and Euclidean."""
B, T, H = (700, 200, 2) if GPU else (1, 70, 1)
LEVELS, SLOTS = (T - 1).bit_length() + 1, 5
Inputs = dict[str, Any]


def _dla(backend: str, q: Tensor, k: Tensor, v: Tensor, found: Any, **more: Any) -> Tensor:
    return dla(q, k, v, schedule=found, scale=0.25, backend=backend, **more)


def _first(call: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(backend: str, **x: Any) -> Tensor:
        o: Tensor = call(**x, backend=backend)[0]
        return o

    return run


OPERATORS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "linear_attention": (_first(linear_attention), ("log_decay",)),
    "gated_delta_rule": (_first(gated_delta_rule), ("beta", "log_decay")),
    "log_linear_attention": (_first(log_linear_attention), ("level_scale", "log_decay")),
    "log_linear_gated_delta_rule": (_first(log_linear_gated_delta_rule), ("beta", "level_scale", "log_decay")),
    "dla": (_dla, ("rank_scale", "log_decay", "gate")),
    "dla_delta": (_dla, ("rank_scale", "beta", "log_decay", "gate")),
    "hla2": (_first(hla2), ("log_decay",)),
    "ahla": (_first(ahla), ("log_decay",)),
}
WIDTHS = [(16, 16), (16, 32), (32, 16), (8, 24), (64, 16), (16, 64), (32, 64), (64, 64), (48, 40)]
CASES = [
    (name, K, V, dtype)
    for name in OPERATORS
    for K, V in (WIDTHS if GPU else [(16, 16)])
    for dtype in LIMITS
    if GPU or dtype == torch.float16
]


def inputs(name: str, K: int, V: int, dtype: torch.dtype) -> Inputs:
    draw = torch.Generator().manual_seed(K + V)
    normal = lambda *shape: torch.randn(*shape, generator=draw).to(DEVICE)  # noqa: E731
    unit = lambda *shape: normalize(normal(*shape), dim=-1).to(dtype)  # noqa: E731
    x: Inputs = {"q": unit(B, T, H, K), "k": unit(B, T, H, K), "v": normal(B, T, H, V).to(dtype)}
    made = {
        "log_decay": logsigmoid(4 + normal(B, T, H)),
        "beta": torch.sigmoid(normal(B, T, H)),
        "level_scale": normal(B, T, H, LEVELS).exp(),
        "rank_scale": normal(B, T, H, SLOTS).exp(),
        "gate": torch.sigmoid(normal(B, T, H)),
    }
    return x | {n: made[n] for n in OPERATORS[name][1]}


def measured(name: str, x: Inputs, do: Tensor, backend: str, **more: Any) -> dict[str, Tensor]:
    leaves = {n: y.detach().requires_grad_() for n, y in x.items()}
    o = OPERATORS[name][0](backend, **leaves, **more)
    grads = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype), allow_unused=True)
    return {"o": o.detach(), **{n: g for n, g in zip(leaves, grads, strict=True) if g is not None}}


@pytest.mark.parametrize(("name", "K", "V", "dtype"), CASES, ids=str)
def test_every_sequence_is_right(name: str, K: int, V: int, dtype: torch.dtype) -> None:
    x = inputs(name, K, V, dtype)
    do = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    wide = {n: y.float() for n, y in x.items()}
    more: Inputs = {}
    if name.startswith("dla"):
        tau = torch.full((H,), 1.0, device=DEVICE)
        more["found"] = schedule(wide["k"], wide["v"], SLOTS, threshold=tau, log_decay=x["log_decay"])[1]
    expected = measured(name, wide, do, "torch", **more)
    found = measured(name, x, do, "triton", **more)
    assert found.keys() == expected.keys()
    for n, y in found.items():
        error = (y.float() - expected[n]).flatten(1).norm(dim=1) / expected[n].flatten(1).norm(dim=1)
        wrong = ~(error <= LIMITS[dtype])
        which = f"{n}: {int(wrong.sum())} of {B} sequences, the first {int(wrong.int().argmax())}"
        assert not wrong.any(), f"{which}, by {float(error.max()):.2g}"


@pytest.mark.parametrize(("K", "V"), WIDTHS if GPU else [(16, 16)])
@pytest.mark.parametrize("decayed", [False, True])
def test_every_sequence_is_cut_where_it_should_be(K: int, V: int, decayed: bool) -> None:
    """By scores of float16 inputs against torch's in float32. A tie that turns round changes all behind it."""
    x = inputs("dla", K, V, torch.float16)
    decay = x["log_decay"] if decayed else None
    tau = torch.full((H,), 1.0, device=DEVICE)
    score, found = schedule(x["k"], x["v"], SLOTS, threshold=tau, log_decay=decay, backend="triton")
    wanted, expected = schedule(x["k"].float(), x["v"].float(), SLOTS, threshold=tau, log_decay=decay, backend="torch")
    same = (found.until == expected.until).all(1)  # [B, H]
    assert expected.boundary[:, 1:].any()
    assert same.float().mean() > 0.98
    off = (score.float() - wanted).abs().amax(1)
    assert (off[same] < 1e-3).all()
