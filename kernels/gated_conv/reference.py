"""The definition: y = (causal_conv(x) + bias) (p + offset) + x."""

from torch import Tensor

from mixassay.kernels.causal_conv import causal_conv


def gated_conv(x: Tensor, weight: Tensor, bias: Tensor, p: Tensor, offset: Tensor, backend: str) -> Tensor:
    return causal_conv(x, weight, bias, backend=backend)[0] * (p + offset) + x
