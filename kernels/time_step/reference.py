"""The definition: dt = softplus(raw + bias); v = dt x; log_decay = -exp(A_log) dt."""

from torch import Tensor
from torch.nn.functional import softplus


def time_step(x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    dt = softplus(raw + dt_bias)
    log_decay = -A_log.exp() * dt
    return x * dt.unsqueeze(-1), log_decay
