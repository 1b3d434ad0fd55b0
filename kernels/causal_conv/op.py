"""Depthwise causal short convolution: the public functions."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from mixassay.kernels import resolve
from mixassay.kernels.causal_conv import parallel, reference
from mixassay.kernels.common.precision import accumulator
from mixassay.kernels.common.shapes import Axes

Activation = Literal["silu"]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    activation: Activation | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over W tokens, the short convolution of H3 (Fu et al. 2023) and Mamba.

    y_t = act(sum_w weight[:, w] x_{t - (W - 1) + w} + bias): the last weight meets the newest token.

    x               [B, T, D]
    weight, bias    [D, W], [D]
    initial_state   [B, W - 1, D], the inputs before the first, oldest first; None: zeros
    returns         y [B, T, D] in x's dtype (summed in float32 or wider), and the final state [B, W - 1, D]: the last
                    W - 1 inputs

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    axes = Axes("causal_conv")
    axes.check("x", x, "BTD")
    axes.check("weight", weight, "DW")
    if bias is not None:
        axes.check("bias", bias, "D")
    axes.check_positive("T", x.shape[1])
    kept = _state(axes, initial_state, x, weight)
    weight = weight.to(accumulator(x, weight, bias))
    if resolve("causal_conv", backend, against_triton="it has no Triton kernel") == "reference":
        y, state = reference.causal_conv(x, weight, bias, kept)
    else:
        y, state = parallel.causal_conv(x, weight, bias, kept)
    return _activate(axes, y, activation).to(x.dtype), state


def causal_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: Activation | None = None
) -> tuple[Tensor, Tensor]:
    """One token of `causal_conv`: x [B, D] and state [B, W - 1, D] -> y [B, D], new state."""
    axes = Axes("causal_conv_step")
    axes.check("x", x, "BD")
    axes.check("weight", weight, "DW")
    if bias is not None:
        axes.check("bias", bias, "D")
    window = torch.cat([_state(axes, state, x, weight), x.unsqueeze(1)], dim=1)  # [B, W, D]
    y = (window * weight.to(accumulator(x, weight, bias)).t()).sum(1)
    return _activate(axes, y if bias is None else y + bias, activation).to(x.dtype), window[:, 1:]


def _state(axes: Axes, state: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    shape = (x.shape[0], weight.shape[1] - 1, x.shape[-1])
    if state is None:
        return x.new_zeros(shape)
    if state.shape != shape:
        axes.fail(f"initial_state has shape {list(state.shape)}, expected [B, W - 1, D] = {list(shape)}")
    return state


def _activate(axes: Axes, y: Tensor, activation: str | None) -> Tensor:
    if activation not in (None, "silu"):
        axes.fail(f'activation "{activation}", expected None or "silu"')
    return silu(y) if activation else y
