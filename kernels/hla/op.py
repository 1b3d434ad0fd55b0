"""Higher-order linear attention: the public functions. The maths is in README.md, the states in state.py."""

from functools import partial

from torch import Tensor

from mixassay.kernels.common.feature_maps import FeatureMap
from mixassay.kernels.hla import composed, reference
from mixassay.kernels.hla.call import Form, step, whole
from mixassay.kernels.hla.state import AHLAState, HLA2PrefixState, HLA2State, HLA3PaperState, HLA3State


def hla2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    outer_log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    ridge: float = 0.0,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
    mask: Tensor | None = None,
    initial_state: HLA2State | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, HLA2State | None]:
    """Second-order linear attention, masked (Zhang, Qin and Gu 2025, arXiv 2510.27258: the paper's default).

    S_t = a_t S_{t-1} + k_t k_t^T;  F_t = b_t F_{t-1} + kappa_t v_t^T, kappa_t = scale S_t q_t;  o_t = scale q_t^T F_t.
    Undecayed, o = ((W W^T) . L) v with W = scale (q k^T) . L, L the lower triangle with its diagonal.

    q                 [B, T, H, K]
    k, v              [B, T, G, K], [B, T, G, V]; G divides H: head i of k and v serves q's i H/G ... (i + 1) H/G - 1
    log_decay         of S, log a: [B, T, G], or [G] for all tokens; <= 0 (-inf forgets everything). None: no decay
    outer_log_decay   of F, log b: [B, T, H] or [H]. None: twice log_decay, as with the paper's one decay gamma: then
                      key i and value j are read at t with the weight gamma^(2t - i - j)
    scale             of every product q.k, so its square is that of o; None: K**-0.5, as in every operator here
    ridge             kappa_t = scale (S_t + ridge I) q_t
    feature_map       phi on q and k: "identity" (the paper's operators), "elu" (1 + ELU), "relu", "softmax", "silu"
    normalize         divide by the operator's value for v = 1, plus 1e-6; only with phi >= 0, where that is a sum of
                      weights >= 0
    mask              bool [B, T], False for padding, which changes nothing for the other tokens and reads zeros; None:
                      all are tokens. Zeros in v alone would not do: k also writes into S
    initial_state     HLA2State, float32 or wider; None: zeros. With normalize, values have V + 1 columns there
    chunk_size        tokens in a chunk of the torch form: changes the speed, not the result; None: chosen from T
    cu_seqlens        int64 [N + 1], for N sequences packed into one row (B = 1): sequence n is the tokens cu_seqlens[n]
                      ... cu_seqlens[n + 1] - 1, possibly none. There are N states instead of B
    returns           o [B, T, H, V] in v's dtype, and the final state or None

    Sums and states are float32, or float64 if an input is. Raises UserError for shapes that do not fit together, for a
    ratio whose denominator may change sign and for a backend that cannot serve. It is composed of `linear_attention`,
    whose Triton kernels serve it on a GPU.
    """
    form = _hla2(scale, ridge, feature_map, normalize)
    options = (mask, initial_state, output_final_state, chunk_size, cu_seqlens, backend)
    return whole(form, q, k, v, log_decay, outer_log_decay, *options)


def hla2_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    outer_log_decay: Tensor | None,
    state: HLA2State,
    *,
    scale: float | None = None,
    ridge: float = 0.0,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
) -> tuple[Tensor, HLA2State]:
    """One token of `hla2`: its arguments without the axis T, and the state, at first `empty(HLA2State, ...)`.

    Returns o [B, H, V] in v's dtype and the new state in the old state's dtype; keep states in float32 or wider.
    """
    return step(_hla2(scale, ridge, feature_map, normalize), q, k, v, log_decay, outer_log_decay, state)


def hla2_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    outer_log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    ridge: float = 0.0,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
    mask: Tensor | None = None,
    initial_state: HLA2PrefixState | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, HLA2PrefixState | None]:
    """Second-order linear attention without the inner mask (the paper's equation 3.1): causal as well, but a query is
    also seen through keys that came after it.

    S_t = a_t S_{t-1} + k_t k_t^T;  C_t = b_t C_{t-1} + q_t v_t^T;  o_t = scale^2 q_t^T (S_t + ridge I) C_t.

    Arguments as `hla2`, but outer_log_decay is that of C, and log_decay if not given.
    """
    form = _hla2_prefix(scale, ridge, feature_map, normalize)
    options = (mask, initial_state, output_final_state, chunk_size, cu_seqlens, backend)
    return whole(form, q, k, v, log_decay, outer_log_decay, *options)


def hla2_prefix_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    outer_log_decay: Tensor | None,
    state: HLA2PrefixState,
    *,
    scale: float | None = None,
    ridge: float = 0.0,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
) -> tuple[Tensor, HLA2PrefixState]:
    """One token of `hla2_prefix`, as `hla2_step`."""
    return step(_hla2_prefix(scale, ridge, feature_map, normalize), q, k, v, log_decay, outer_log_decay, state)


def ahla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    outer_log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
    mask: Tensor | None = None,
    initial_state: AHLAState | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, AHLAState | None]:
    """Asymmetric second-order linear attention (the paper's section 6): linear attention to its own outputs.

    P_t = a_t P_{t-1} + k_t v_t^T;  E_t = b_t E_{t-1} + k_t nu_t^T, nu_t = scale P_t^T q_t;  o_t = scale q_t^T E_t.
    Undecayed, o = W W v with W = scale (q k^T) . L.

    Arguments as `hla2`, but log_decay is that of P, and outer_log_decay that of E: log_decay if not given. No ridge,
    since there is no matrix of keys.
    """
    form = _ahla(scale, feature_map, normalize)
    options = (mask, initial_state, output_final_state, chunk_size, cu_seqlens, backend)
    return whole(form, q, k, v, log_decay, outer_log_decay, *options)


def ahla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    outer_log_decay: Tensor | None,
    state: AHLAState,
    *,
    scale: float | None = None,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
) -> tuple[Tensor, AHLAState]:
    """One token of `ahla`, as `hla2_step`."""
    return step(_ahla(scale, feature_map, normalize), q, k, v, log_decay, outer_log_decay, state)


def hla3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    outer_log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    ridge: float = 0.0,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
    mask: Tensor | None = None,
    initial_state: HLA3State | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, HLA3State | None]:
    """Third-order linear attention, causal: what the paper's theorem 7.1 defines (not its algorithm 3, which is
    `hla3_paper`; see docs/hla-errata.md).

    S_t = a_t S_{t-1} + k_t k_t^T;  P_t = a_t P_{t-1} + k_t v_t^T;  F_t = b_t F_{t-1} + kappa_t nu_t^T with
    kappa_t = scale S_t q_t, nu_t = scale P_t^T q_t;  o_t = scale q_t^T F_t.
    Undecayed, o = ((W W^T) . L) W v with W = scale (q k^T) . L.

    Arguments as `hla2`, but scale is cubed in o, log_decay is that of S and P, and outer_log_decay that of F: three
    times log_decay if not given.
    """
    form = _hla3(scale, ridge, feature_map, normalize)
    options = (mask, initial_state, output_final_state, chunk_size, cu_seqlens, backend)
    return whole(form, q, k, v, log_decay, outer_log_decay, *options)


def hla3_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    outer_log_decay: Tensor | None,
    state: HLA3State,
    *,
    scale: float | None = None,
    ridge: float = 0.0,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
) -> tuple[Tensor, HLA3State]:
    """One token of `hla3`, as `hla2_step`."""
    return step(_hla3(scale, ridge, feature_map, normalize), q, k, v, log_decay, outer_log_decay, state)


def hla3_paper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
    mask: Tensor | None = None,
    initial_state: HLA3PaperState | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, HLA3PaperState | None]:
    """The paper's algorithm 3 as printed, without decay: another operator than `hla3` (docs/hla-errata.md).

    o_t = scale^3 sum (q_t.k_i)(q_u.k_i)(q_u.k_j) v_j over those i, u, j <= t of which the latest occurs at least twice.

    Arguments as `hla3`. It serves to compare with published numbers, and has no decay: with one, the printed algorithm
    has the fault of the paper's second order too.
    """
    form = _hla3_paper(scale, feature_map, normalize)
    options = (mask, initial_state, output_final_state, chunk_size, cu_seqlens, backend)
    return whole(form, q, k, v, None, None, *options)


def hla3_paper_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: HLA3PaperState,
    *,
    scale: float | None = None,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
) -> tuple[Tensor, HLA3PaperState]:
    """One token of `hla3_paper`, as `hla2_step`."""
    return step(_hla3_paper(scale, feature_map, normalize), q, k, v, None, None, state)


def _hla2(scale: float | None, ridge: float, feature_map: FeatureMap, normalize: bool) -> Form[HLA2State]:
    token, fast = partial(reference.hla2, ridge=ridge), partial(composed.hla2, ridge=ridge)
    return Form("hla2", HLA2State, token, fast, 2, scale, feature_map, normalize, ridge, fused=True)


def _hla2_prefix(scale: float | None, ridge: float, feature_map: FeatureMap, normalize: bool) -> Form[HLA2PrefixState]:
    token, fast = partial(reference.hla2_prefix, ridge=ridge), partial(composed.hla2_prefix, ridge=ridge)
    return Form("hla2_prefix", HLA2PrefixState, token, fast, 1, scale, feature_map, normalize)


def _ahla(scale: float | None, feature_map: FeatureMap, normalize: bool) -> Form[AHLAState]:
    return Form("ahla", AHLAState, reference.ahla, composed.ahla, 1, scale, feature_map, normalize, fused=True)


def _hla3(scale: float | None, ridge: float, feature_map: FeatureMap, normalize: bool) -> Form[HLA3State]:
    token, fast = partial(reference.hla3, ridge=ridge), partial(composed.hla3, ridge=ridge)
    return Form("hla3", HLA3State, token, fast, 3, scale, feature_map, normalize, ridge, fused=True)


def _hla3_paper(scale: float | None, feature_map: FeatureMap, normalize: bool) -> Form[HLA3PaperState]:
    return Form(
        "hla3_paper", HLA3PaperState, reference.hla3_paper, composed.hla3_paper, 1, scale, feature_map, normalize
    )
