"""toy_gate: a gated moving average, with everything that a mixer may offer: steps, prefill, packed sequences.

h_t = g_t h_{t-1} + (1 - g_t) V x_t,   g_t = sigmoid(W x_t + open);   y_t = O h_t
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from mixassay.errors import UserError
from mixassay.mixers import Mixer, mixer

from .scan import decayed_sums


@mixer("toy_gate")
class Gate(Mixer):
    """open      what is added to every gate at the start
    output   "linear", or "none": O is the identity"""

    def __init__(self, d_model: int, *, open: float = 2.0, output: Literal["linear", "none"] = "linear") -> None:
        super().__init__()
        if open < 0:
            raise UserError(f"open must be 0 or more, got {open}")
        self.d_model, self.open = d_model, open
        self.gate, self.value = nn.Linear(d_model, d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False) if output == "linear" else nn.Identity()

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        u, log_g = self._operands(x)
        t = torch.arange(x.shape[1], device=x.device)
        segment = None if cu_seqlens is None else torch.searchsorted(cu_seqlens, t, right=True)
        y: Tensor = self.out(decayed_sums(u, log_g, segment))
        return y

    def prefill(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        u, log_g = self._operands(x)
        h = decayed_sums(u, log_g) + log_g.cumsum(1).exp() * state.unsqueeze(1)
        return self.out(h), h[:, -1]

    def init_state(self, batch: int) -> Tensor:
        return self.value.weight.new_zeros(batch, self.d_model)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        u, log_g = self._operands(x)
        h = log_g.exp() * state + u
        return self.out(h), h

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(1 - g) V x and log g, of any shape that x has, in at least float32."""
        raw = self.gate(x) + self.open
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return (-raw).sigmoid() * self.value(x), logsigmoid(raw)
