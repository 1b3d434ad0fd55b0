"""Linear attention (Katharopoulos et al. 2020): softmax's exp(q.k) becomes phi(q).phi(k), and the past a K x V matrix.

    S_t = S_{t-1} + phi(k_t) v_t^T;   z_t = z_{t-1} + phi(k_t);   o_t = phi(q_t)^T S_t / (phi(q_t).z_t)

The default is the paper's own: phi(x) = 1 + ELU(x), and the normaliser z that makes the weights sum to 1. RetNet (Sun
et al. 2023) and most later models drop z and norm each head's output instead: `feature_map: identity, normalizer:
false, output_norm: true`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mixassay.errors import UserError
from mixassay.kernels.common.feature_maps import EPS, FEATURE_MAPS, NON_NEGATIVE, FeatureMap
from mixassay.kernels.linear_attention import linear_attention, linear_attention_step
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.norm import RMSNorm
from mixassay.mixers.parts.precision import wide
from mixassay.mixers.parts.short_conv import ShortConv
from mixassay.mixers.parts.sizes import head_size


@mixer("linear_attention")
class LinearAttention(Mixer):
    """Multi-head causal linear attention.

    heads, head_dim   head_dim None: d_model / heads; K = V = head_dim
    feature_map       phi: "elu" (1 + ELU), "relu", "softmax" (over the channels of a head), "silu", "identity"
    normalizer        divide by phi(q).z; only with a feature map that is never negative. Without it: times K^-0.5
    output_norm       RMSNorm of each head's output
    conv              width of a short convolution on q, k and v, without activation; 0: none

    Linear layers start as torch's default, uniform in +-d_model^-0.5. The state is S [B, H, K, V], with the
    normaliser z as one more column, and the inputs that the convolution still needs.
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int = 1,
        head_dim: int | None = None,
        feature_map: FeatureMap = "elu",
        normalizer: bool = True,
        output_norm: bool = False,
        conv: int = 0,
    ) -> None:
        super().__init__()
        self.d_model, self.heads, self.head_dim = d_model, heads, head_size(d_model, heads, head_dim)
        if feature_map not in FEATURE_MAPS:
            raise UserError(f'feature_map must be one of {", ".join(FEATURE_MAPS)}, got "{feature_map}"')
        if normalizer and feature_map not in NON_NEGATIVE:
            raise UserError(
                f'normalizer divides by phi(q).phi(k), which changes sign with feature_map "{feature_map}"; set '
                f"normalizer: false (output_norm: true replaces it), or take one of {', '.join(NON_NEGATIVE)}"
            )
        self.phi, self.normalizer = FEATURE_MAPS[feature_map], normalizer
        inner = heads * self.head_dim
        self.qkv = Linear(d_model, 3 * inner, bias=False)
        self.conv = ShortConv(3 * inner, conv)
        self.norm = RMSNorm(self.head_dim) if output_norm else None
        self.out = Linear(inner, d_model, bias=False)
        self.scale = 1.0 if normalizer else self.head_dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._operands(self.conv(self.qkv(x)))
        o, _ = linear_attention(q, k, v, scale=self.scale)
        return self._output(o)

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, S = state
        qkv, conv = self.conv.prefill(self.qkv(x), conv)
        o, S = linear_attention(*self._operands(qkv), scale=self.scale, initial_state=S, output_final_state=True)
        return self._output(o), (conv, S)

    def init_state(self, batch: int) -> State:
        like, K = self.out.weight, self.head_dim
        return self.conv.init_state(batch, like), like.new_zeros(batch, self.heads, K, K + self.normalizer)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, S = state
        qkv, conv = self.conv.step(self.qkv(x), conv)
        o, S = linear_attention_step(*self._operands(qkv), None, S, scale=self.scale)
        return self._output(o), (conv, S)

    def _operands(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """phi(q) and phi(k) [..., H, K], v [..., H, V]; the normaliser gives v a column of ones: [..., H, V + 1]."""
        qk, v = torch.split(wide(qkv), [2 * self.heads * self.head_dim, self.heads * self.head_dim], dim=-1)
        q, k = self.phi(torch.unflatten(qk, -1, (2, self.heads, self.head_dim))).unbind(-3)
        v = torch.unflatten(v, -1, (self.heads, self.head_dim))
        return q, k, pad(v, (0, 1), value=1.0) if self.normalizer else v

    def _output(self, o: Tensor) -> Tensor:
        if self.normalizer:
            o = o[..., :-1] / (o[..., -1:] + EPS)
        if self.norm is not None:
            o = self.norm(o)
        y: Tensor = self.out(o.flatten(-2))
        return y
