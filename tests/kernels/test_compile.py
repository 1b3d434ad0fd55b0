"""Every public operator is one graph under `torch.compile`, alone and for a stack under vmap, and changes no bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mixassay.kernels.causal_conv import causal_conv
from mixassay.kernels.dla import dla
from mixassay.kernels.dla.schedule import schedule
from mixassay.kernels.gated_delta_rule import gated_delta_rule
from mixassay.kernels.linear_attention import linear_attention
from mixassay.kernels.linear_cross_entropy import linear_cross_entropy
from mixassay.kernels.log_linear_attention import log_linear_attention
from mixassay.kernels.log_linear_gated_delta_rule import log_linear_gated_delta_rule
from mixassay.kernels.softmax_attention import softmax_attention

B, T, H, K = 2, 20, 2, 4
QKV = {name: (B, T, H, K) for name in "qkv"}
SCALARS = {"log_decay": (B, T, H)}
LEVELS = {"level_scale": (B, T, H, 6)}


def cut_and_read(k: Tensor, v: Tensor, rank_scale: Tensor, log_decay: Tensor, **x: Any) -> Tensor:
    score, found = schedule(k, v, 3, threshold=torch.full((H,), 0.5), log_decay=log_decay)
    return dla(k=k, v=v, rank_scale=rank_scale, schedule=found, log_decay=log_decay, gate=score, chunk_size=8, **x)


RANKS = {"rank_scale": (B, T, H, 3)}
CASES = {
    "causal_conv": (lambda x, weight: causal_conv(x, weight)[0], {"x": (B, T, K), "weight": (K, 3)}),
    "softmax_attention": (softmax_attention, QKV),
    "linear_attention": (lambda **x: linear_attention(**x)[0], QKV | SCALARS),
    "gated_delta_rule": (lambda **x: gated_delta_rule(**x)[0], QKV | SCALARS | {"beta": (B, T, H)}),
    # Chunks of 8: the tree over chunks is in the graph too.
    "log_linear_attention": (lambda **x: log_linear_attention(**x, chunk_size=8)[0], QKV | SCALARS | LEVELS),
    "log_linear_gated_delta_rule": (
        lambda **x: log_linear_gated_delta_rule(**x, chunk_size=8)[0],
        QKV | SCALARS | LEVELS | {"beta": (B, T, H)},
    ),
    "dla": (cut_and_read, QKV | SCALARS | RANKS | {"beta": (B, T, H)}),
    "linear_cross_entropy": (
        lambda h, weight: linear_cross_entropy(h, weight, torch.arange(T) % 7),
        {"h": (T, K), "weight": (7, K)},
    ),
}


def inputs(shapes: dict[str, tuple[int, ...]], *members: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    made = {name: torch.rand(*members, *shape, generator=draw) for name, shape in shapes.items()}
    return {name: (-x if name == "log_decay" else x).requires_grad_() for name, x in made.items()}


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch 2.11 importing itself
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # attention under vmap, traced
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the tracer itself
@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "vmap"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_is_eager(name, stacked):
    torch._dynamo.reset()
    op, shapes = CASES[name]
    given = inputs(shapes, *([3] if stacked else []))
    names = list(given)

    def plain(*xs: Tensor) -> Tensor:
        f = lambda *xs: op(**dict(zip(names, xs, strict=True)))  # noqa: E731
        o: Tensor = torch.func.vmap(f)(*xs) if stacked else f(*xs)
        return o

    results = []
    for f in (plain, torch.compile(plain, fullgraph=True, backend="aot_eager")):
        o = f(*given.values())
        results.append([o, *torch.autograd.grad(o.sin().sum(), list(given.values()))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-6)
