"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): linear attention in which every token sets its own decay.

    S_t = exp(-A dt_t) S_{t-1} + B_t (dt_t x_t)^T;   y_t = C_t^T S_t + D x_t

B and C take the places of k and q, dt x that of v. The block around it is the paper's: one projection to everything,
a short convolution with SiLU on x, B and C, a gate z, a norm, one projection back.
"""

import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.linear_attention import linear_attention, linear_attention_step
from mixassay.kernels.time_step import time_step
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.parts.decay import SelectiveDecay, spared
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.norm import RMSNorm
from mixassay.mixers.parts.projections import projections
from mixassay.mixers.parts.short_conv import ShortConv
from mixassay.mixers.parts.sizes import at_least


@mixer("mamba2")
class Mamba2(Mixer):
    """The Mamba-2 block's mixer, with the reference implementation's defaults.

    d_state    N, the size of B and C
    expand     the inner width is expand * d_model
    head_dim   channels a head; heads = inner width / head_dim. None: 64, or the inner width where that is less
    n_groups   groups of heads that share B and C; the output norm is taken over each group
    conv       width of the short convolution (with bias) on x, B and C; 0: SiLU alone
    a_range    what A is uniform in at first: a head whose A is smaller forgets more slowly

    Linear layers start as torch's default, uniform in +-d_model^-0.5 and +-inner^-0.5; dt log-uniform in (1e-3, 1e-1),
    D = 1. The state is S [B, H, N, head_dim] and the convolution's last inputs.
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
        a_range: tuple[float, float] = (1.0, 16.0),
    ) -> None:
        super().__init__()
        at_least(1, d_model=d_model, d_state=d_state, expand=expand, head_dim=head_dim, n_groups=n_groups)
        if not 0 < a_range[0] <= a_range[1]:
            raise UserError(f"a_range={list(a_range)}: expected two numbers above 0, the smaller one first")
        inner = expand * d_model
        self.d_model, self.d_state, self.n_groups = d_model, d_state, n_groups
        self.head_dim = head_dim or min(64, inner)
        if inner % self.head_dim:
            raise UserError(f"head_dim={self.head_dim} does not divide the inner width expand * d_model = {inner}")
        self.heads = inner // self.head_dim
        if self.heads % n_groups:
            raise UserError(f"n_groups={n_groups} does not divide the {self.heads} heads (expand * d_model / head_dim)")
        conved = inner + 2 * n_groups * d_state  # x | B | C
        self.widths = [inner, conved, self.heads]  # z | xBC | dt
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.conv = ShortConv(conved, conv, bias=True, activation="silu")
        self.decay = SelectiveDecay(self.heads, a_range)
        self.D = spared(torch.ones(self.heads))
        self.norm = RMSNorm(inner, groups=n_groups)
        self.out_proj = Linear(inner, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z, xBC, dt, *levels = projections(self.in_proj, x, self.widths)
        operands, x = self._operands(self.conv(xBC), dt)
        return self._output(self._mix(*operands, *levels)[0], x, z)

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, S = state
        z, xBC, dt, *levels = self.in_proj(x).split(self.widths, dim=-1)
        xBC, conv = self.conv.prefill(xBC, conv)
        operands, x = self._operands(xBC, dt)
        y, S = self._mix(*operands, *levels, state=S)
        return self._output(y, x, z), (conv, S)

    def init_state(self, batch: int) -> State:
        return self.conv.init_state(batch, self.out_proj.weight), self._init_past(batch)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, S = state
        z, xBC, dt, *levels = self.in_proj(x).split(self.widths, dim=-1)
        xBC, conv = self.conv.step(xBC, conv)
        operands, x = self._operands(xBC, dt)
        y, S = self._mix_step(*operands, S, *levels)
        return self._output(y, x, z), (conv, S)

    # The operator and its state. Log-linear and dynamic Mamba-2 have others, which take weights of their states too.

    def _mix(
        self, C: Tensor, B: Tensor, v: Tensor, log_decay: Tensor, *levels: Tensor, state: State = None
    ) -> tuple[Tensor, State]:
        """The output, and where a state was given, the new one."""
        keep = state is not None
        return linear_attention(C, B, v, log_decay, scale=1.0, initial_state=state, output_final_state=keep)

    def _mix_step(
        self, C: Tensor, B: Tensor, v: Tensor, log_decay: Tensor, S: State, *levels: Tensor
    ) -> tuple[Tensor, State]:
        return linear_attention_step(C, B, v, log_decay, S, scale=1.0)

    def _init_past(self, batch: int) -> State:
        return self.out_proj.weight.new_zeros(batch, self.heads, self.d_state, self.head_dim)

    def _operands(self, xBC: Tensor, dt: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """C and B [..., G, N], dt x [..., H, P], log_decay [..., H]; and x."""
        shared = self.n_groups * self.d_state
        x, BC = torch.split(xBC, [self.heads * self.head_dim, 2 * shared], dim=-1)
        B, C = torch.unflatten(BC, -1, (2, self.n_groups, self.d_state)).unbind(-3)
        x = torch.unflatten(x, -1, (self.heads, self.head_dim))
        v, log_decay = time_step(x, dt, self.decay.dt_bias, self.decay.A_log)
        return (C, B, v, log_decay), x

    def _output(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.out_proj(self.norm(y.flatten(-2), before=z, skip=(x.flatten(-2), self.D)))
        return out
