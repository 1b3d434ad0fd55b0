"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): the delta rule, which overwrites what a key held before, with
Mamba-2's decay, which forgets everything a little.

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T;   o_t = K^-0.5 q_t^T S_t;   |q_t| = |k_t| = 1
"""

import torch
from torch import Tensor, nn

from mixassay.errors import UserError
from mixassay.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.parts.decay import SelectiveDecay
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.norm import RMSNorm, l2norm
from mixassay.mixers.parts.precision import wide
from mixassay.mixers.parts.projections import projections
from mixassay.mixers.parts.short_conv import ShortConv
from mixassay.mixers.parts.sizes import head_size

INIT_STD = 0.02


@mixer("gated_deltanet")
class GatedDeltaNet(Mixer):
    """The paper's layer: short convolutions with SiLU on q, k and v, unit q and k, a gated norm of each head's output.

    heads, head_dim    head_dim None: d_model / heads
    expand_v           V = expand_v * head_dim, which must be whole
    conv               width of the short convolutions (no bias); 0: SiLU alone
    gate               times SiLU of a projection of the input, behind the norm
    allow_neg_eigval   beta in (0, 2) instead of (0, 1): a write may turn the sign of what a key held (Grazzi et al.
                       2024), which state tracking needs

    Linear layers start normal with deviation 0.02, as in the models of flash-linear-attention and Zoology; with torch's
    larger default MQAR is learnt much later. A is uniform in (0, 16), dt log-uniform in (1e-3, 1e-1). The state is
    S [B, H, K, V] and the convolutions' last inputs.
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
    ) -> None:
        super().__init__()
        self.d_model, self.heads, self.K = d_model, heads, head_size(d_model, heads, head_dim)
        self.V = round(expand_v * self.K)
        if self.V < 1 or expand_v * self.K != self.V:
            raise UserError(f"expand_v * head_dim must be a whole number of channels, got {expand_v} * {self.K}")
        conved = heads * (2 * self.K + self.V)  # q | k | v
        self.widths = [conved, heads, heads, heads * self.V if gate else 0]  # qkv | dt | beta | gate
        self.strength = 2.0 if allow_neg_eigval else 1.0
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.conv = ShortConv(conved, conv, activation="silu")
        self.decay = SelectiveDecay(heads, a_range=(0, 16))
        self.norm = RMSNorm(self.V)
        self.out_proj = Linear(heads * self.V, d_model, bias=False)
        for linear in (self.in_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        qkv, dt, beta, gate, *levels = projections(self.in_proj, x, self.widths)
        return self._output(self._mix(*self._operands(self.conv(qkv), dt, beta), *levels)[0], gate)

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, S = state
        qkv, dt, beta, gate, *levels = self.in_proj(x).split(self.widths, dim=-1)
        qkv, conv = self.conv.prefill(qkv, conv)
        o, S = self._mix(*self._operands(qkv, dt, beta), *levels, state=S)
        return self._output(o, gate), (conv, S)

    def init_state(self, batch: int) -> State:
        return self.conv.init_state(batch, self.out_proj.weight), self._init_past(batch)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, S = state
        qkv, dt, beta, gate, *levels = self.in_proj(x).split(self.widths, dim=-1)
        qkv, conv = self.conv.step(qkv, conv)
        o, S = self._mix_step(*self._operands(qkv, dt, beta), S, *levels)
        return self._output(o, gate), (conv, S)

    # The operator and its state. Log-linear and dynamic Gated DeltaNet have others, which take weights of states too.

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *levels: Tensor, state: State = None
    ) -> tuple[Tensor, State]:
        """The output, and where a state was given, the new one."""
        return gated_delta_rule(q, k, v, beta, log_decay, initial_state=state, output_final_state=state is not None)

    def _mix_step(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, S: State, *levels: Tensor
    ) -> tuple[Tensor, State]:
        return gated_delta_rule_step(q, k, v, beta, log_decay, S)

    def _init_past(self, batch: int) -> State:
        return self.out_proj.weight.new_zeros(batch, self.heads, self.K, self.V)

    def _operands(self, qkv: Tensor, dt: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q and k [..., H, K] of unit length, v [..., H, V], beta and log_decay [..., H]."""
        qk, v = torch.split(qkv, [2 * self.heads * self.K, self.heads * self.V], dim=-1)
        q, k = l2norm(torch.unflatten(qk, -1, (2, self.heads, self.K))).unbind(-3)
        _, log_decay = self.decay(dt)
        return q, k, torch.unflatten(v, -1, (self.heads, self.V)), self.strength * wide(beta).sigmoid(), log_decay

    def _output(self, o: Tensor, gate: Tensor) -> Tensor:
        after = torch.unflatten(gate, -1, (self.heads, self.V)) if gate.shape[-1] else None
        y: Tensor = self.out_proj(self.norm(o, after=after).flatten(-2))
        return y
