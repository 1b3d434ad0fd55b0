"""The short convolution in front of a mixer (H3, Fu et al. 2023; Mamba, Gu and Dao 2023): each channel sees its own
last few tokens, so that what a token says can depend on the token before it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from mixassay.kernels.causal_conv import causal_conv, causal_conv_step
from mixassay.kernels.causal_conv.op import Activation
from mixassay.mixers.parts.precision import wide
from mixassay.mixers.parts.sizes import at_least


class ShortConv(nn.Module):
    """Depthwise causal convolution over `conv` tokens, then the activation. `conv=0` is the activation alone.

    Weight [D, W] and bias [D] start uniform in +-W^-0.5, as torch's depthwise `Conv1d` and so the reference Mamba do.
    The state [B, W - 1, D] holds the last inputs; without a convolution it is empty.
    """

    def __init__(self, width: int, conv: int, *, bias: bool = False, activation: Activation | None = None) -> None:
        super().__init__()
        at_least(0, conv=conv)
        self.width, self.conv = width, conv
        self.activation: Activation | None = activation
        bound = max(conv, 1) ** -0.5
        self.weight = nn.Parameter(torch.empty(width, conv).uniform_(-bound, bound)) if conv else None
        self.bias = nn.Parameter(torch.empty(width).uniform_(-bound, bound)) if conv and bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        if self.weight is None:
            return silu(x) if self.activation else x
        return causal_conv(x, self.weight, self.bias, activation=self.activation)[0]

    def prefill(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D] behind a state -> y [B, T, D], the state after them."""
        if self.weight is None:
            return self(x), state
        y, state = causal_conv(x, self.weight, self.bias, initial_state=state, activation=self.activation)
        return y, wide(state.clone())  # a view would keep all of x

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, max(self.conv - 1, 0), self.width)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, D], state [B, W - 1, D] -> y [B, D], new state."""
        if self.weight is None:
            return (silu(x) if self.activation else x), state
        return causal_conv_step(x, self.weight, self.bias, state, activation=self.activation)
