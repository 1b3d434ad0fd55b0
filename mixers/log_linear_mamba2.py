"""Log-linear Mamba-2 (Guo et al. 2025, arXiv 2506.04761): Mamba-2 with a state for each level of a Fenwick tree.

    y_t = sum_l lambda_t[l] C_t^T S_t[l] + D x_t,   lambda_t = softplus(P . dl_t)

S_t[l] is Mamba-2's state of the tokens that t sees at level l: itself, then blocks of 1, 2, 4 ... tokens. With lambda =
1 they add up to Mamba-2's one state.
"""

from torch import Tensor

from mixassay.kernels.common.fenwick import empty_state
from mixassay.kernels.log_linear_attention import log_linear_attention, log_linear_attention_step
from mixassay.mixers import State, mixer
from mixassay.mixers.mamba2 import Mamba2
from mixassay.mixers.parts.levels import LEVELS, FenwickMixer, LevelScale
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.sizes import at_least


@mixer("log_linear_mamba2")
class LogLinearMamba2(FenwickMixer, Mamba2):
    """Mamba-2's mixer, with the level weights of the authors' code.

    d_state, expand, head_dim, n_groups, conv, a_range   as in mamba2
    levels   L, weights a token and head. T tokens have ceil(log2 T) + 1 levels: 9 for 256, 15 for 16384. Set it for the
             length that is trained: longer sequences give all further levels the last weight, while a level that
             training never reached would have an untrained one

    dl is the last H L columns of the input projection and starts as the others do; P starts at 1, without weight
    decay. The state is S [B, H, L, N, head_dim], of which `live_state_bytes` counts the slots that hold tokens, the
    number of tokens seen, and the convolution's last inputs.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        expand: int = 2,
        head_dim: int | None = None,
        n_groups: int = 1,
        conv: int = 4,
        levels: int = LEVELS,
        a_range: tuple[float, float] = (1.0, 16.0),
    ) -> None:
        super().__init__(
            d_model,
            d_state=d_state,
            expand=expand,
            head_dim=head_dim,
            n_groups=n_groups,
            conv=conv,
            a_range=a_range,
        )
        at_least(1, levels=levels)
        self.levels = levels
        self.widths.append(self.heads * levels)  # z | xBC | dt | dl
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.level_scale = LevelScale(self.heads, levels)

    def _mix(
        self, C: Tensor, B: Tensor, v: Tensor, log_decay: Tensor, *levels: Tensor, state: State = None
    ) -> tuple[Tensor, State]:
        weights, keep = self.level_scale(*levels), state is not None
        return log_linear_attention(
            C, B, v, weights, log_decay, scale=1.0, initial_state=state, output_final_state=keep
        )

    def _mix_step(
        self, C: Tensor, B: Tensor, v: Tensor, log_decay: Tensor, S: State, *levels: Tensor
    ) -> tuple[Tensor, State]:
        return log_linear_attention_step(C, B, v, self.level_scale(*levels), log_decay, S, scale=1.0)

    def _init_past(self, batch: int) -> State:
        return empty_state(self.out_proj.weight, batch, self.heads, self.levels, self.d_state, self.head_dim)
