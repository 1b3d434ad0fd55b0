"""What a model begins with: the public function."""

import torch
from torch import Tensor

from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator, narrow
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.embedding import reference
from mixassay.kernels.norm.op import too_wide


def embedding(
    tokens: Tensor,
    table: Tensor,
    position: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    keep: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """x = (E[token] + P[t]) keep / (1 - p), the residual stream at its start, and h = norm(x) for the first branch.

    tokens         int64 [B, T]
    table          [V, D], E
    position       [T, D], P, or None
    keep           bool [B, T, D], what dropout with probability p keeps, or None
    weight, bias   [D], of the norm: a layer norm, or without a bias an RMS norm
    returns        x [B, T, D], and h [B, T, D] as `layer_norm` and `rms_norm` return it

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    axes = Axes("embedding")
    axes.check("table", table, "VD")
    T, D = tokens.shape[-1], table.shape[1]
    if tokens.ndim != 2 or tokens.dtype != torch.int64:
        axes.fail(f"tokens has shape {list(tokens.shape)} and dtype {tokens.dtype}, expected int64 [B, T]")
    if position is not None and position.shape != (T, D):
        axes.fail(f"position has shape {list(position.shape)}, expected [T, D] = [{T}, {D}]")
    if keep is not None and (keep.shape != (*tokens.shape, D) or keep.dtype != torch.bool):
        axes.fail(f"keep has shape {list(keep.shape)} and dtype {keep.dtype}, expected bool {[*tokens.shape, D]}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != (D,):
            axes.fail(f"{name} has shape {list(vector.shape)}, expected [D] = [{D}]")
    against = against_triton(table, position, weight, bias) or too_wide(D)
    chosen = resolve("embedding", backend, against_triton=against)
    if chosen == "triton":
        from mixassay.kernels.embedding import registered  # the package triton may not be there

        dtype = narrow(table, accumulator(table, position, weight, bias))
        return registered.embedding(tokens, table, position, keep, p, weight, bias, eps, dtype)
    return reference.embedding(tokens, table, position, keep, p, weight, bias, eps, chosen)
