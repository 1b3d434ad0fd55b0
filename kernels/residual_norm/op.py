"""The step from one branch of a residual network to the next: the public function."""

import torch
from torch import Tensor

from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator, narrow
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.norm.op import too_wide
from mixassay.kernels.residual_norm import reference
from mixassay.kernels.residual_norm.reference import tokens


def residual_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    inner: tuple[Tensor, Tensor | None] | None = None,
    at: Tensor | None = None,
    wide: bool = False,
    eps: float = 1e-5,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A branch y joins the residual stream x, which is then normed for the next branch.

    s = x + y;   with `inner`, s = s + norm(s) of its own (Zoology's blocks have such a branch);   h = norm(s)

    x, y           [..., D]; the stream, in float32 or wider, and the branch
    weight, bias   [D], of the norm: a layer norm, or without a bias an RMS norm
    inner          weight and bias of the inner norm, which is of the same kind
    at             int64 [B, Q]: of x and y [B, T, D] only these tokens are wanted; None: all
    wide           h keeps the accumulator's dtype under autocast too, for what is behind it is no product of autocast's
    returns        s [..., D] in the accumulator's dtype, and h [..., D] as `layer_norm` and `rms_norm` return it; with
                   `at` both [B, Q, D]

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    axes = Axes("residual_norm")
    D = x.shape[-1]
    if y.shape != x.shape:
        axes.fail(f"y has shape {list(y.shape)}, expected that of x, {list(x.shape)}")
    inner_weight, inner_bias = inner or (None, None)
    given = {"weight": weight, "bias": bias, "inner weight": inner_weight, "inner bias": inner_bias}
    for name, p in given.items():
        if p is not None and p.shape != (D,):
            axes.fail(f"{name} has shape {list(p.shape)}, expected [D] = [{D}]")
    if inner_weight is not None and (inner_bias is None) != (bias is None):
        axes.fail("only one of the two norms has a bias, expected two layer norms or two RMS norms")
    if at is not None and (x.ndim != 3 or at.ndim != 2 or at.shape[0] != x.shape[0] or at.dtype != torch.int64):
        axes.fail(f"at has shape {list(at.shape)} and dtype {at.dtype}, expected int64 [B, Q] for x [B, T, D]")
    chosen = resolve("residual_norm", backend, against_triton=against_triton(x, y, *given.values()) or too_wide(D))
    if chosen == "triton":
        from mixassay.kernels.residual_norm import registered  # the package triton may not be there

        dtype = accumulator(x, y, *given.values())
        if at is not None:
            x, y = tokens(x, at), tokens(y, at)
        narrowed = dtype if wide else narrow(x, dtype)
        return registered.residual_norm(x.to(dtype), y, weight, bias, inner_weight, inner_bias, eps, narrowed)
    return reference.residual_norm(x, y, weight, bias, inner_weight, inner_bias, at, eps, chosen)
