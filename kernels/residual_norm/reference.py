"""The definition: s = x + y, or with an inner norm s = (x + y) + norm(x + y); h = norm(s).

The norm comes last, so that it is taken of the tokens wanted alone."""

from torch import Tensor

from mixassay.kernels.norm import layer_norm, rms_norm


def residual_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner_weight: Tensor | None,
    inner_bias: Tensor | None,
    at: Tensor | None,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    s = x + y
    if inner_weight is not None:
        s = s + _norm(s, inner_weight, inner_bias, eps, backend)
    if at is not None:
        s = tokens(s, at)
    return s, _norm(s, weight, bias, eps, backend)


def tokens(x: Tensor, at: Tensor) -> Tensor:
    """x [B, T, D] at the tokens `at` [B, Q] -> [B, Q, D]."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, backend: str) -> Tensor:
    if bias is None:
        return rms_norm(x, weight, eps=eps, backend=backend)
    return layer_norm(x, weight, bias, eps=eps, backend=backend)
