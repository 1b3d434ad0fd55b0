"""Other people's implementations of our operators, called as they come. None of them is a dependency.

PyTorch's own attention kernels, and those of flash-linear-attention (Yang and Zhang 2024, `pip install
'mixassay[peers]'`), whose operators are the distribution fla-core.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mixassay.runners.operators import Call, Inputs

FLA = "fla-core"


@dataclass(frozen=True)
class Implementation:
    name: str
    call: Call | None  # None: it cannot be called here, for the reason in `note`
    ours: bool = False
    version: str | None = None
    note: str | None = None


def peers(op: str, device: torch.device) -> Iterator[Implementation]:
    if op == "softmax_attention":
        yield _torch("torch SDPA flash", SDPBackend.FLASH_ATTENTION)
        if device.type == "cuda":
            yield _torch("torch SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)
        else:
            yield Implementation("torch SDPA cuDNN", None, note=f"no cuDNN on {device.type}")
    elif op in FLA_CALLS:
        yield _fla(op, device)


def _torch(name: str, backend: SDPBackend) -> Implementation:
    def call(inputs: Inputs) -> torch.Tensor:
        q, k, v = (inputs[x].transpose(1, 2) for x in "qkv")  # [B, H, T, D], strided
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Implementation(name, call)


FLA_CALLS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "linear_attention": (
        "fla.ops.simple_gla",
        "chunk_simple_gla",
        lambda f, x: f(x["q"], x["k"], x["v"], g=x["log_decay"]),
    ),
    "gated_delta_rule": (
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        lambda f, x: f(x["q"], x["k"], x["v"], g=x["log_decay"], beta=x["beta"]),
    ),
    "log_linear_attention": (
        "fla.ops.log_linear_attn",
        "chunk_log_linear_attn",
        lambda f, x: f(x["q"], x["k"], x["v"], g=x["log_decay"], level_scales=x["level_scale"], scale=None),
    ),
}
"""Operator -> module, function, and how it is called."""


def _fla(op: str, device: torch.device) -> Implementation:
    module, function, use = FLA_CALLS[op]
    name = f"fla {function}"
    if importlib.util.find_spec("fla") is None:
        return Implementation(name, None, note=f"{FLA} is not installed")
    version = importlib.metadata.version(FLA)
    if device.type != "cuda":
        return Implementation(name, None, version=version, note=f"no kernels for {device.type}")
    try:
        f = getattr(importlib.import_module(module), function)
        note = _lift_guard()
    except (ImportError, AttributeError, RuntimeError) as problem:
        return Implementation(name, None, version=version, note=f"cannot be imported: {problem}")
    return Implementation(name, lambda inputs: use(f, inputs)[0], version=version, note=note)


@functools.cache
def _lift_guard() -> str | None:
    """fla refuses gated backwards with the releases of Triton that miscompile one of their kernels on Hopper, for some
    sizes. Here every result is compared with the truth, so the refusal is lifted and the comparison decides."""
    chunk_o = importlib.import_module("fla.ops.common.chunk_o")
    flags = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    if [bool(getattr(chunk_o, flag, None)) for flag in flags] != [True, True, False]:
        return None
    vars(chunk_o)["TRITON_ABOVE_3_7_1"] = True
    return "fla's refusal of gated backwards with this Triton on Hopper was lifted"
