"""Log-linear attention (Guo et al. 2025, arXiv 2506.04761) in its plainest form: linear attention with a state for each
level of a Fenwick tree, without decay.

    o_t = sum_l lambda_t[l] phi(q_t)^T S_t[l],   lambda_t = softplus(P . W x_t)

S_t[l] = sum phi(k_s) v_s^T over the tokens s that t sees at level l: itself, then blocks of 1, 2, 4 ... tokens. With
lambda = 1 they add up to linear attention's one state.
"""

from torch import Tensor

from mixassay.kernels.common.feature_maps import FeatureMap
from mixassay.kernels.common.fenwick import empty_state
from mixassay.kernels.log_linear_attention import log_linear_attention, log_linear_attention_step
from mixassay.mixers import State, mixer
from mixassay.mixers.linear_attention import LinearAttention
from mixassay.mixers.parts.levels import LEVELS, FenwickMixer, LevelScale
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.sizes import at_least


@mixer("log_linear_attention")
class LogLinearAttention(FenwickMixer, LinearAttention):
    """Linear attention's mixer without its normaliser: RMSNorm of each head's output.

    heads, head_dim, conv   as in linear_attention
    feature_map   as in linear_attention, there "elu"
    levels        L, weights a token and head. T tokens have ceil(log2 T) + 1 levels: 9 for 256, 15 for 16384. Set it
                  for the length that is trained: longer sequences give all further levels the last weight, while a
                  level that training never reached would have an untrained one

    W starts as torch's default, P at 1, without weight decay. The state is S [B, H, L, K, V], of which
    `live_state_bytes` counts the slots that hold tokens, the number of tokens seen, and the inputs that the
    convolution still needs.
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int = 1,
        head_dim: int | None = None,
        feature_map: FeatureMap = "identity",
        conv: int = 0,
        levels: int = LEVELS,
    ) -> None:
        super().__init__(
            d_model,
            heads=heads,
            head_dim=head_dim,
            feature_map=feature_map,
            normalizer=False,
            output_norm=True,
            conv=conv,
        )
        at_least(1, levels=levels)
        self.levels = levels
        self.level_proj = Linear(d_model, heads * levels, bias=False)
        self.level_scale = LevelScale(heads, levels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._operands(self.conv(self.qkv(x)))
        o, _ = log_linear_attention(q, k, v, self.level_scale(self.level_proj(x)), scale=self.scale)
        return self._output(o)

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, S = state
        qkv, conv = self.conv.prefill(self.qkv(x), conv)
        weights = self.level_scale(self.level_proj(x))
        o, S = log_linear_attention(
            *self._operands(qkv), weights, scale=self.scale, initial_state=S, output_final_state=True
        )
        return self._output(o), (conv, S)

    def init_state(self, batch: int) -> State:
        like, K = self.out.weight, self.head_dim
        return self.conv.init_state(batch, like), empty_state(like, batch, self.heads, self.levels, K, K)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, S = state
        qkv, conv = self.conv.step(self.qkv(x), conv)
        weights = self.level_scale(self.level_proj(x))
        o, S = log_linear_attention_step(*self._operands(qkv), weights, None, S, scale=self.scale)
        return self._output(o), (conv, S)
