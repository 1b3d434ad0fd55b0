"""Depthwise causal short convolution: the public functions."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu

from mixassay.kernels import resolve
from mixassay.kernels.causal_conv import parallel, reference
from mixassay.kernels.causal_conv.packed import last_inputs, spread
from mixassay.kernels.common.precision import accumulator
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.sequences import check_packed
from mixassay.kernels.common.shapes import Axes

Activation = Literal["silu"]
WIDEST = 8  # W that the Triton kernels were built for: each tap more is a register more


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    activation: Activation | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over W tokens, the short convolution of H3 (Fu et al. 2023) and Mamba.

    y_t = act(sum_w weight[:, w] x_{t - (W - 1) + w} + bias): the last weight meets the newest token.

    x               [B, T, D]
    weight, bias    [D, W], [D]
    initial_state   [B, W - 1, D], the inputs before the first, oldest first; None: zeros
    cu_seqlens      int64 [N + 1], for N sequences packed into one row (B = 1): sequence n is the tokens cu_seqlens[n]
                    ... cu_seqlens[n + 1] - 1, possibly none. There are N states instead of B
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
    if cu_seqlens is not None:
        check_packed(axes, cu_seqlens, "x", x)
    _check(axes, initial_state, x, weight, cu_seqlens)
    _check_activation(axes, activation)
    against = against_triton(x, weight, bias, initial_state) or _wide(weight)
    chosen = resolve("causal_conv", backend, against_triton=against)
    if chosen == "triton":
        from mixassay.kernels.causal_conv import registered  # the package triton may not be there

        y = registered.causal_conv(x, weight, bias, initial_state, cu_seqlens, activation)
        return y, last_inputs(x, initial_state, weight.shape[1], cu_seqlens)

    form = reference.causal_conv if chosen == "reference" else parallel.causal_conv
    given = weight.to(accumulator(x, weight, bias)), bias
    if cu_seqlens is not None:
        y, state = spread(form, x, *given, initial_state, cu_seqlens)
    else:
        y, state = form(x, *given, x.new_zeros(_shape(x, weight)) if initial_state is None else initial_state)
    return _activate(y, activation).to(x.dtype), state


def causal_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, activation: Activation | None = None
) -> tuple[Tensor, Tensor]:
    """One token of `causal_conv`: x [B, D] and state [B, W - 1, D] -> y [B, D], new state."""
    axes = Axes("causal_conv_step")
    axes.check("x", x, "BD")
    axes.check("weight", weight, "DW")
    if bias is not None:
        axes.check("bias", bias, "D")
    _check(axes, state, x, weight, None)
    _check_activation(axes, activation)
    window = torch.cat([state, x.unsqueeze(1)], dim=1)  # [B, W, D]
    y = (window * weight.to(accumulator(x, weight, bias)).t()).sum(1)
    return _activate(y if bias is None else y + bias, activation).to(x.dtype), window[:, 1:]


def _shape(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    return x.shape[0], weight.shape[1] - 1, x.shape[-1]


def _check(axes: Axes, state: Tensor | None, x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> None:
    rows, *others = _shape(x, weight)
    letter = "B"
    if cu_seqlens is not None:
        letter, rows = "N", len(cu_seqlens) - 1
    if state is not None and state.shape != (rows, *others):
        axes.fail(f"initial_state has shape {list(state.shape)}, expected [{letter}, W - 1, D] = {[rows, *others]}")


def _check_activation(axes: Axes, activation: str | None) -> None:
    if activation not in (None, "silu"):
        axes.fail(f'activation "{activation}", expected None or "silu"')


def _activate(y: Tensor, activation: str | None) -> Tensor:
    return silu(y) if activation else y


def _wide(weight: Tensor) -> str | None:
    W = weight.shape[1]
    return f"its W = {W} is more than {WIDEST}" if W > WIDEST else None
