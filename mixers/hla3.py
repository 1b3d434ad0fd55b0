"""Third-order linear attention (HLA-3; Zhang, Qin and Gu 2025, arXiv 2510.27258), causal: HLA-2 that stores linear
attention's outputs instead of values.

    S_t = a_t S_{t-1} + k_t k_t^T;   P_t = a_t P_{t-1} + k_t v_t^T
    F_t = a_t^3 F_{t-1} + (S_t q_t) (P_t^T q_t)^T;   o_t = F_t^T q_t

Undecayed, o = ((W W^T) . L) W v with W = (q k^T) . L. The algorithm that the paper prints for it computes something
else: docs/hla-errata.md.
"""

from mixassay.kernels.hla import HLA3State, hla3, hla3_step
from mixassay.mixers import mixer
from mixassay.mixers.parts.higher_order import HigherOrder


@mixer("hla3")
class HLA3(HigherOrder):
    """The matrices kept are S [B, kv_heads, K, K], P [B, kv_heads, K, V] and F [B, H, K, V]."""

    operator, operator_step, matrices = hla3, hla3_step, HLA3State
