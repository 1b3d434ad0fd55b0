"""The operators as the benchmarks see them: names of their arguments, inputs as the models make them, and the call."""

import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from mixassay.kernels.common.fenwick import levels
from mixassay.kernels.dla.schedule import schedule
from mixassay.kernels.dla.slots import Schedule

ARGUMENTS = {
    "softmax_attention": ("q", "k", "v"),
    "linear_attention": ("q", "k", "v", "log_decay"),
    "gated_delta_rule": ("q", "k", "v", "beta", "log_decay"),
    "log_linear_attention": ("q", "k", "v", "level_scale", "log_decay"),
    "log_linear_gated_delta_rule": ("q", "k", "v", "beta", "level_scale", "log_decay"),
    "hla2": ("q", "k", "v", "log_decay"),
    "ahla": ("q", "k", "v", "log_decay"),
    "hla3": ("q", "k", "v", "log_decay"),
    "dla": ("q", "k", "v", "rank_scale", "log_decay"),
}
"""Operator -> its tensor arguments. An operator is the function of its name in the module `home(name)`. `dla` is with
its schedule, which its caller makes of k and v each time."""

SLOTS, THRESHOLD, REGIME = 30, 0.6, 128
"""Of `dla`: slots and threshold as in the paper; its keys and values keep to a mean for so many tokens."""

Inputs = dict[str, Tensor]
Call = Callable[[Inputs], Tensor]  # the output [B, T, H, V]


class Shape(NamedTuple):
    B: int
    T: int
    H: int
    D: int  # of keys and of values


def home(name: str) -> str:
    """The module of an operator: of its name, but for the family of higher-order linear attention."""
    return f"mixassay.kernels.{'hla' if name in ('hla2', 'ahla', 'hla3') else name}"


def operator(name: str, backend: str) -> Call:
    function = getattr(importlib.import_module(home(name)), name)

    def call(inputs: Inputs) -> Tensor:
        more = {"schedule": cut(inputs, backend)} if name == "dla" else {}
        result = function(**inputs, **more, backend=backend)
        o: Tensor = result[0] if isinstance(result, tuple) else result
        return o

    return call


def cut(inputs: Inputs, backend: str) -> Schedule:
    k, v = inputs["k"], inputs["v"]
    tau = torch.full(v.shape[2:3], THRESHOLD, device=v.device)
    return schedule(k, v, SLOTS, threshold=tau, log_decay=inputs["log_decay"], backend=backend)[1]


def draw(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Inputs, Tensor]:
    """Inputs, as leaves of a graph, and a gradient of the output.

    As in the models: q, k, v in `dtype`, gates in float32; unit q and k for the delta rules; log decays -A softplus(raw
    + bias) with A and the time step of each head where Mamba-2 starts them; beta a sigmoid, weights a softplus. For
    `dla`, k and v are a mean, of deviation 1 and another one in each regime, and noise of deviation 0.2, so that no
    score is close to the threshold. Regimes begin where they may, in every head elsewhere: at multiples of their own
    length they would lie in whole tiles, which is several times cheaper.
    """
    B, T, H, D = shape
    source = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=source, device=device)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(H, generator=source, device=device)

    q, k, v, do = (normal(B, T, H, D) for _ in range(4))
    if "beta" in ARGUMENTS[name]:
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    step = uniform(math.log(1e-3), math.log(1e-1)).exp()
    log_decay = -uniform(1, 16) * softplus(normal(B, T, H) + step.expm1().log())
    made = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "log_decay": log_decay}
    made |= {"beta": normal(B, T, H).sigmoid(), "level_scale": softplus(normal(B, T, H, levels(T)))}
    if name == "dla":
        made["rank_scale"] = softplus(normal(B, T, H, SLOTS))
        start = torch.randint(REGIME, (B, 1, H), generator=source, device=device)
        regime = (start + torch.arange(T, device=device)[None, :, None]) // REGIME
        for x in "kv":
            means = normal(B, T // REGIME + 2, H, D).gather(1, regime.unsqueeze(-1).expand(B, T, H, D))
            made[x] = (means + 0.2 * normal(B, T, H, D)).to(dtype)
    return {argument: made[argument].requires_grad_() for argument in ARGUMENTS[name]}, do.to(dtype)


def gate_bytes(inputs: Inputs) -> int:
    """Bytes per token and head of what is neither q, k nor v."""
    tokens = inputs["v"].shape[:3].numel()
    return sum(x.numel() * x.element_size() for name, x in inputs.items() if name not in ("q", "k", "v")) // tokens
