"""Four mixers, each with one fault that an accuracy would not show. All are the same moving average, in chunks:

    h_t = a h_{t-1} + u_t,   u = W x,   y = h

Inside a chunk densely, from chunk to chunk by the state at its end.
"""

import torch
from torch import Tensor, nn

from mixassay.mixers import Mixer, State

C = 16


class Sound(Mixer):
    """Without a fault."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.logit = nn.Parameter(torch.linspace(0.0, 3.0, d_model))
        self.proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        u, a, ys = self.proj(x), self.logit.sigmoid(), []
        h = torch.zeros_like(u[:, 0])
        for chunk in u.split(C, dim=1):
            ys.append(self.chunk(chunk, h, a))
            h = ys[-1][:, -1]
        return torch.cat(ys, dim=1)

    def chunk(self, u: Tensor, h: Tensor, a: Tensor) -> Tensor:
        t = torch.arange(u.shape[1], device=u.device)
        lag = (t[:, None] - t)[..., None]
        weight = torch.where(lag >= 0, a ** lag.clamp(min=0), 0.0)  # [c, c, D]
        return torch.einsum("tsd,bsd->btd", weight, u) + a ** (t[:, None] + 1) * h.unsqueeze(1)

    def init_state(self, batch: int) -> State:
        return self.logit.new_zeros(batch, self.d_model)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h = self.logit.sigmoid() * state + self.proj(x)
        return h, h


class LooksAhead(Sound):
    """The last token of every chunk but the last sees the first token of the next: an index that is off by one."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        ahead = nn.functional.pad(self.proj(x)[:, 1:], (0, 0, 0, 1))  # u_{t+1}, 0 behind the end
        border = torch.arange(x.shape[1], device=x.device) % C == C - 1
        return y + torch.where(border[:, None], 0.1 * ahead, 0.0)


class WrongLastChunk(Sound):
    """A partial last chunk decays its state as if it were full: as kernels do that take the decay of a padded chunk."""

    def chunk(self, u: Tensor, h: Tensor, a: Tensor) -> Tensor:
        return super().chunk(u, h, a) - a ** (torch.arange(u.shape[1], device=u.device)[:, None] + 1) * h.unsqueeze(
            1
        ) * (1 - a ** (C - u.shape[1]))


class GrowingState(Sound):
    """Keeps every input and says nothing of it."""

    def init_state(self, batch: int) -> State:
        return self.logit.new_zeros(batch, self.d_model), self.logit.new_zeros(batch, 0, self.d_model)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, seen = state
        y, h = super().step(x, h)
        return y, (h, torch.cat([seen, x.unsqueeze(1)], dim=1))


class DroppedGradient(Sound):
    """The carried state is detached: right numbers, and nothing is learnt across tokens in the recurrent form."""

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return super().step(x, state.detach())
