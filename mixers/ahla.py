"""Asymmetric second-order linear attention (AHLA; Zhang, Qin and Gu 2025, arXiv 2510.27258): linear attention to linear
attention's own outputs, in one layer.

    P_t = a_t P_{t-1} + k_t v_t^T;   E_t = a_t E_{t-1} + k_t (P_t^T q_t)^T;   o_t = E_t^T q_t

Undecayed, o = W W v with W = (q k^T) . L: a read of two hops.
"""

from mixassay.kernels.hla import AHLAState, ahla, ahla_step
from mixassay.mixers import mixer
from mixassay.mixers.parts.higher_order import HigherOrder


@mixer("ahla")
class AHLA(HigherOrder):
    """The matrices kept are P [B, kv_heads, K, V] and E [B, H, K, V]; there is no K x K metric."""

    operator, operator_step, matrices = ahla, ahla_step, AHLAState
