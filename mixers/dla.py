"""Dynamic linear attention (Wang et al. 2026, arXiv 2606.10650): linear attention whose past is cut into slots where
the tokens themselves change, each read with a weight of its own.

    o_t = K^-0.5 sum_r lambda_t[r] phi(q_t)^T S_t[r],   lambda_t = softplus(W x_t + b)

S_t[r] sums phi(k_s) v_s^T over the tokens of the slot of recency rank r: 0 is open, 1 was closed last. With lambda = 1,
which is how it starts, they add up to linear attention's one state.
"""

from torch import Tensor

from mixassay.kernels.common.feature_maps import FeatureMap
from mixassay.kernels.dla.boundaries import Reading
from mixassay.kernels.dla.op import Scope
from mixassay.kernels.dla.slots import Rule
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.linear_attention import LinearAttention
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.slots import Cuts, Gate, Operands, SlotMixer, Slots, Weights


@mixer("dla")
class DynamicLinearAttention(SlotMixer, LinearAttention):
    """Linear attention's mixer without its normaliser: RMSNorm of each head's output.

    heads, head_dim, conv   as in linear_attention
    feature_map   as in linear_attention, there "elu"
    capacity, cuts, every, tau, reading, rule, weights, scope, boundary_gate, temperature, score_proj
        which slots there are and how they are read: see `mixers/parts/slots.py`. The paper has 30 slots, the rule
        "density" and tau 0.6

    The state is S [B, H, R, K, V] of R = capacity slots and what the next boundaries are decided by, and the inputs
    that the convolution still needs.
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int = 1,
        head_dim: int | None = None,
        feature_map: FeatureMap = "identity",
        conv: int = 0,
        capacity: int = 30,
        cuts: Cuts = "scored",
        every: int = 32,
        tau: float | None = 0.6,
        reading: Reading = "memory",
        rule: Rule = "density",
        weights: Weights = "rank",
        scope: Scope = "all",
        boundary_gate: Gate = "ste",
        temperature: float = 0.1,
        score_proj: int = 0,
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
        self.slots = Slots(
            heads,
            capacity=capacity,
            cuts=cuts,
            every=every,
            tau=tau,
            reading=reading,
            rule=rule,
            weights=weights,
            scope=scope,
            boundary_gate=boundary_gate,
            temperature=temperature,
            score_proj=score_proj,
            scale=self.scale,
        )
        self.slot_proj = Linear(d_model, self.slots.width, bias=False)
        self.slots.start(self.slot_proj)

    def forward(self, x: Tensor, changes: Tensor | None = None) -> Tensor:
        return self._output(self.slots(self.operands(x), changes))

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, past = state
        if not self.slots.begin(past):
            return Mixer.prefill(self, x, state)
        qkv, conv = self.conv.prefill(self.qkv(x), conv)
        o, past = self.slots.prefill(Operands(*self._operands(qkv), self.slot_proj(x)))
        return self._output(o), (conv, past)

    def operands(self, x: Tensor) -> Operands:
        return Operands(*self._operands(self.conv(self.qkv(x))), self.slot_proj(x))

    def init_state(self, batch: int) -> State:
        like, K = self.out.weight, self.head_dim
        return self.conv.init_state(batch, like), self.slots.init_past(batch, like, K, K)

    def step(self, x: Tensor, state: State, change: Tensor | None = None) -> tuple[Tensor, State]:
        conv, past = state
        qkv, conv = self.conv.step(self.qkv(x), conv)
        o, past = self.slots.step(Operands(*self._operands(qkv), self.slot_proj(x)), past, change)
        return self._output(o), (conv, past)
