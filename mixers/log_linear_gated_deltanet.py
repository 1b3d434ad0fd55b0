"""Log-linear Gated DeltaNet (Guo et al. 2025, arXiv 2506.04761): Gated DeltaNet with a state for each level of a
Fenwick tree.

    o_t = sum_l lambda_t[l] q_t^T S_t[l],   lambda_t = softplus(P . dl_t)

S_t[l] is Gated DeltaNet's state of what the tokens that t sees at level l wrote, itself and then blocks of 1, 2, 4 ...
tokens; every later token decays and overwrites all of them. With lambda = 1 they add up to Gated DeltaNet's one state.
"""

from torch import Tensor, nn

from mixassay.kernels.common.fenwick import empty_state
from mixassay.kernels.log_linear_gated_delta_rule import log_linear_gated_delta_rule, log_linear_gated_delta_rule_step
from mixassay.mixers import State, mixer
from mixassay.mixers.gated_deltanet import INIT_STD, GatedDeltaNet
from mixassay.mixers.parts.levels import LEVELS, FenwickMixer, LevelScale
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.sizes import at_least


@mixer("log_linear_gated_deltanet")
class LogLinearGatedDeltaNet(FenwickMixer, GatedDeltaNet):
    """Gated DeltaNet's mixer, with the level weights of the authors' code.

    heads, head_dim, expand_v, conv, gate, allow_neg_eigval   as in gated_deltanet
    levels   L, weights a token and head. T tokens have ceil(log2 T) + 1 levels: 9 for 256, 15 for 16384. Set it for the
             length that is trained: longer sequences give all further levels the last weight, while a level that
             training never reached would have an untrained one

    dl is the last H L columns of the input projection, which the authors keep in a layer of its own; it starts as the
    others do. P starts at 1, without weight decay. The scale is 1: the authors' code scales q by K^-0.5 and divides
    lambda by the same. The norm behind takes out a common factor, so this sets apart from gated_deltanet only how soon
    the norm's epsilon is felt.

    The state is S [B, H, L, K, V], of which `live_state_bytes` counts the slots that hold tokens, the number of tokens
    seen, and the convolutions' last inputs.
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int = 1,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        conv: int = 4,
        gate: bool = True,
        allow_neg_eigval: bool = False,
        levels: int = LEVELS,
    ) -> None:
        super().__init__(
            d_model,
            heads=heads,
            head_dim=head_dim,
            expand_v=expand_v,
            conv=conv,
            gate=gate,
            allow_neg_eigval=allow_neg_eigval,
        )
        at_least(1, levels=levels)
        self.levels = levels
        self.widths.append(heads * levels)  # qkv | dt | beta | gate | dl
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        nn.init.normal_(self.in_proj.weight, std=INIT_STD)
        self.level_scale = LevelScale(heads, levels)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *levels: Tensor, state: State = None
    ) -> tuple[Tensor, State]:
        weights, keep = self.level_scale(*levels), state is not None
        return log_linear_gated_delta_rule(
            q, k, v, beta, weights, log_decay, scale=1.0, initial_state=state, output_final_state=keep
        )

    def _mix_step(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, S: State, *levels: Tensor
    ) -> tuple[Tensor, State]:
        weights = self.level_scale(*levels)
        return log_linear_gated_delta_rule_step(q, k, v, beta, weights, log_decay, S, scale=1.0)

    def _init_past(self, batch: int) -> State:
        return empty_state(self.out_proj.weight, batch, self.heads, self.levels, self.K, self.V)
