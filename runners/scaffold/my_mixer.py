"""my_mixer: every channel keeps a moving average, with a decay that it learns.  y_t = a y_{t-1} + W x_t"""

import torch
from torch import Tensor, nn

from mixassay.mixers import Mixer, mixer


@mixer("my_mixer")
class MyMixer(Mixer):
    """decay   a at the start, of all channels"""

    def __init__(self, d_model: int, *, decay: float = 0.9) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.full((d_model,), decay).logit())
        self.proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] -> [B, T, D], causal
        t = torch.arange(x.shape[1], device=x.device)
        lag = (t[:, None] - t)[..., None]  # [T, T, 1]
        weight = torch.where(lag >= 0, self.logit.sigmoid() ** lag.clamp(min=0), 0.0)  # [T, T, D]
        return torch.einsum("tsd,bsd->btd", weight, self.proj(x))

    def init_state(self, batch: int) -> Tensor:
        return torch.zeros_like(self.logit).expand(batch, -1)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # one token [B, D]
        state = self.logit.sigmoid() * state + self.proj(x)
        return state, state
