"""Mamba's time step: the public function."""

from torch import Tensor

from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator, narrow
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.time_step import reference

WIDEST = 4096  # channels of all heads that the Triton kernels were built for: a program has a whole token in registers


def time_step(
    x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Each head of each token chooses its time step (Gu and Dao 2023): dt = softplus(raw + dt_bias).

    x                [..., H, P]
    raw              [..., H]
    dt_bias, A_log   [H]
    returns          dt x [..., H, P], and log_decay = -exp(A_log) dt [..., H] in float32 or wider. Under autocast the
                     Triton kernels return dt x in its dtype, as the operator behind reads it

    Raises UserError for shapes that do not fit together and for a backend that cannot serve.
    """
    axes = Axes("time_step")
    H = x.shape[-2]
    if raw.shape != x.shape[:-1]:
        axes.fail(f"raw has shape {list(raw.shape)}, expected that of x without its channels, {list(x.shape[:-1])}")
    for name, p in (("dt_bias", dt_bias), ("A_log", A_log)):
        if p.shape != (H,):
            axes.fail(f"{name} has shape {list(p.shape)}, expected [H] = [{H}]")
    dtype = accumulator(raw, dt_bias, A_log)
    wide = f"its {H} heads have more than {WIDEST} channels" if H * x.shape[-1] > WIDEST else None
    if resolve("time_step", backend, against_triton=against_triton(x, raw, dt_bias, A_log) or wide) == "triton":
        from mixassay.kernels.time_step import registered  # the package triton may not be there

        return registered.time_step(x, raw, dt_bias, A_log, narrow(x, accumulator(x, dt_bias)))
    return reference.time_step(x, raw.to(dtype), dt_bias, A_log)
