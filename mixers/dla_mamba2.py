"""Dynamic Mamba-2 (Wang et al. 2026, arXiv 2606.10650): Mamba-2 whose past is cut into slots where the tokens
themselves change, each read with a weight of its own.

    y_t = sum_r lambda_t[r] C_t^T S_t[r] + D x_t,   lambda_t = softplus(W u_t + b)

S_t[r] is Mamba-2's state of the tokens in the slot of recency rank r, u_t the layer's input. With lambda = 1, which is
how it starts, they add up to Mamba-2's one state. Scores compare B and dt x, with Mamba-2's decay.
"""

from torch import Tensor

from mixassay.kernels.dla.boundaries import Reading
from mixassay.kernels.dla.op import Scope
from mixassay.kernels.dla.slots import Rule
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.mamba2 import Mamba2
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.projections import projections
from mixassay.mixers.parts.slots import Cuts, Gate, Operands, SlotMixer, Slots, Weights


@mixer("dla_mamba2")
class DynamicMamba2(SlotMixer, Mamba2):
    """Mamba-2's mixer with slots.

    d_state, expand, head_dim, n_groups, conv, a_range   as in mamba2
    capacity, cuts, every, tau, reading, rule, weights, scope, boundary_gate, temperature, score_proj
        which slots there are and how they are read: see `mixers/parts/slots.py`. The paper has 30 slots, the rule
        "density" and tau 0.6

    What the weights need is the last columns of the input projection. The state is S [B, H, R, N, head_dim] of R =
    capacity slots and what the next boundaries are decided by, and the convolution's last inputs.
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
        self.slots = Slots(
            self.heads,
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
            scale=1.0,
        )
        self.widths.append(self.slots.width)  # z | xBC | dt | slots
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.slots.start(self.in_proj)

    def forward(self, x: Tensor, changes: Tensor | None = None) -> Tensor:
        z, xBC, dt, raw = projections(self.in_proj, x, self.widths)
        (C, B, v, log_decay), x = self._operands(self.conv(xBC), dt)
        return self._output(self.slots(Operands(C, B, v, raw, log_decay), changes), x, z)

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, past = state
        if not self.slots.begin(past):
            return Mixer.prefill(self, x, state)
        z, xBC, dt, raw = self.in_proj(x).split(self.widths, dim=-1)
        xBC, conv = self.conv.prefill(xBC, conv)
        (C, B, v, log_decay), x = self._operands(xBC, dt)
        y, past = self.slots.prefill(Operands(C, B, v, raw, log_decay))
        return self._output(y, x, z), (conv, past)

    def operands(self, x: Tensor) -> Operands:
        _, xBC, dt, raw = self.in_proj(x).split(self.widths, dim=-1)
        (C, B, v, log_decay), _ = self._operands(self.conv(xBC), dt)
        return Operands(C, B, v, raw, log_decay)

    def step(self, x: Tensor, state: State, change: Tensor | None = None) -> tuple[Tensor, State]:
        conv, past = state
        z, xBC, dt, raw = self.in_proj(x).split(self.widths, dim=-1)
        xBC, conv = self.conv.step(xBC, conv)
        (C, B, v, log_decay), x = self._operands(xBC, dt)
        y, past = self.slots.step(Operands(C, B, v, raw, log_decay), past, change)
        return self._output(y, x, z), (conv, past)

    def _init_past(self, batch: int) -> State:
        return self.slots.init_past(batch, self.out_proj.weight, self.d_state, self.head_dim)
