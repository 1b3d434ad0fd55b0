"""Dynamic Gated DeltaNet (Wang et al. 2026, arXiv 2606.10650): Gated DeltaNet whose past is cut into slots where the
tokens themselves change, each read with a weight of its own.

    o_t = K^-0.5 sum_r lambda_t[r] q_t^T S_t[r],   lambda_t = softplus(W x_t + b)

S_t[r] is Gated DeltaNet's state of what the tokens in the slot of recency rank r wrote; every later token decays and
overwrites all slots (scope "segment": those of its own alone). With lambda = 1, which is how it starts, they add up to
Gated DeltaNet's one state. Scores compare k and v with the decay but without beta, so that no schedule depends on it.
"""

from torch import Tensor, nn

from mixassay.kernels.dla.boundaries import Reading
from mixassay.kernels.dla.op import Scope
from mixassay.kernels.dla.slots import Rule
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.gated_deltanet import INIT_STD, GatedDeltaNet
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.projections import projections
from mixassay.mixers.parts.slots import Cuts, Gate, Operands, SlotMixer, Slots, Weights


@mixer("dla_gated_deltanet")
class DynamicGatedDeltaNet(SlotMixer, GatedDeltaNet):
    """Gated DeltaNet's mixer with slots.

    heads, head_dim, expand_v, conv, gate, allow_neg_eigval   as in gated_deltanet
    capacity, cuts, every, tau, reading, rule, weights, scope, boundary_gate, temperature, score_proj
        which slots there are and how they are read: see `mixers/parts/slots.py`. The paper has 30 slots, the rule
        "density" and tau 0.6

    What the weights need is the last columns of the input projection. The state is S [B, H, R, K, V] of R = capacity
    slots and what the next boundaries are decided by, and the convolutions' last inputs.
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
            expand_v=expand_v,
            conv=conv,
            gate=gate,
            allow_neg_eigval=allow_neg_eigval,
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
            scale=self.K**-0.5,
            delta=True,
        )
        self.widths.append(self.slots.width)  # qkv | dt | beta | gate | slots
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        nn.init.normal_(self.in_proj.weight, std=INIT_STD)
        self.slots.start(self.in_proj)

    def forward(self, x: Tensor, changes: Tensor | None = None) -> Tensor:
        qkv, dt, beta, gate, raw = projections(self.in_proj, x, self.widths)
        return self._output(self.slots(self._slotted(self.conv(qkv), dt, beta, raw), changes), gate)

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, past = state
        if not self.slots.begin(past):
            return Mixer.prefill(self, x, state)
        qkv, dt, beta, gate, raw = self.in_proj(x).split(self.widths, dim=-1)
        qkv, conv = self.conv.prefill(qkv, conv)
        o, past = self.slots.prefill(self._slotted(qkv, dt, beta, raw))
        return self._output(o, gate), (conv, past)

    def operands(self, x: Tensor) -> Operands:
        qkv, dt, beta, _, raw = self.in_proj(x).split(self.widths, dim=-1)
        return self._slotted(self.conv(qkv), dt, beta, raw)

    def step(self, x: Tensor, state: State, change: Tensor | None = None) -> tuple[Tensor, State]:
        conv, past = state
        qkv, dt, beta, gate, raw = self.in_proj(x).split(self.widths, dim=-1)
        qkv, conv = self.conv.step(qkv, conv)
        o, past = self.slots.step(self._slotted(qkv, dt, beta, raw), past, change)
        return self._output(o, gate), (conv, past)

    def _slotted(self, qkv: Tensor, dt: Tensor, beta: Tensor, raw: Tensor) -> Operands:
        q, k, v, beta, log_decay = self._operands(qkv, dt, beta)
        return Operands(q, k, v, raw, log_decay, beta)

    def _init_past(self, batch: int) -> State:
        return self.slots.init_past(batch, self.out_proj.weight, self.K, self.V)
