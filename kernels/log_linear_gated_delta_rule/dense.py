"""The second definition: O = (P . Lam) V with the gated delta rule's matrix P, from products of transition matrices.

P_tj = scale q_t^T M_t ... M_{j+1} b_j k_j with M_t = a_t (I - b_t k_t k_t^T). Cubic in T: for tests.
"""

import torch
from torch import Tensor

from mixassay.kernels.common.fenwick import level
from mixassay.kernels.gated_delta_rule.dense import gated_delta_rule


def log_linear_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, level_scale: Tensor, log_decay: Tensor | None, scale: float
) -> Tensor:
    B, T, H, L = level_scale.shape
    unit = torch.eye(T, dtype=v.dtype, device=v.device).view(1, T, 1, T).expand(B, T, H, T)
    P, _ = gated_delta_rule(q, k, unit, beta, log_decay, scale, None)  # [B, T, H, T]: read for unit values
    t = torch.arange(T, device=v.device)
    Lam = level_scale[:, t[:, None], :, level(t[:, None], t, L)]  # [T, T, B, H]
    return torch.einsum("bihj,ijbh,bjhv->bihv", P, Lam, v)
