"""Second-order higher-order linear attention (HLA-2; Zhang, Qin and Gu 2025, arXiv 2510.27258), the paper's default:
linear attention whose values are stored under queries, seen through a metric that the keys have shaped.

    S_t = a_t S_{t-1} + k_t k_t^T;   F_t = a_t^2 F_{t-1} + (S_t q_t) v_t^T;   o_t = F_t^T q_t

Undecayed, o = ((W W^T) . L) v with W = (q k^T) . L. A query finds values whose tokens asked alike: for recall, the
value's token needs its key in its own query, which the short convolution gives it.
"""

from mixassay.kernels.hla import HLA2State, hla2, hla2_step
from mixassay.mixers import mixer
from mixassay.mixers.parts.higher_order import HigherOrder


@mixer("hla2")
class HLA2(HigherOrder):
    """The matrices kept are S [B, kv_heads, K, K] and F [B, H, K, V]."""

    operator, operator_step, matrices = hla2, hla2_step, HLA2State
