"""BaseConv's elementwise part: the public function."""

from torch import Tensor

from mixassay.kernels import resolve
from mixassay.kernels.causal_conv.op import WIDEST
from mixassay.kernels.common.precision import accumulator, narrow
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.gated_conv import reference


def gated_conv(
    x: Tensor, weight: Tensor, bias: Tensor, p: Tensor, offset: Tensor, *, backend: str | None = None
) -> Tensor:
    """y = conv(x) (p + offset) + x, with the depthwise causal convolution of `causal_conv` (Arora et al. 2023).

    x, p            [B, T, D]
    weight, bias    [D, W], [D], of the convolution
    offset          [D], the bias of the projection that made p
    returns         y [B, T, D] in float32 or wider; the Triton kernels under autocast return its dtype

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    axes = Axes("gated_conv")
    axes.check("x", x, "BTD")
    axes.check("weight", weight, "DW")
    axes.check("bias", bias, "D")
    axes.check("p", p, "BTD")
    axes.check("offset", offset, "D")
    axes.check_positive("T", x.shape[1])
    W = weight.shape[1]
    wide = f"its W = {W} is more than {WIDEST}" if W > WIDEST else None
    against = against_triton(x, weight, bias, p, offset) or wide
    chosen = resolve("gated_conv", backend, against_triton=against)
    if chosen == "triton":
        from mixassay.kernels.gated_conv import registered  # the package triton may not be there

        return registered.gated_conv(x, weight, bias, p, offset, narrow(x, accumulator(x, weight, bias, p, offset)))
    return reference.gated_conv(x, weight, bias, p, offset, chosen)
