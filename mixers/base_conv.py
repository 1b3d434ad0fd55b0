"""BaseConv (Arora et al. 2023, "Zoology"): a gated short convolution. It compares neighbours and recalls nothing, so
Zoology's MQAR models put one in front of every mixer under test; here that is `model.hybrid: base_conv`.

    y = conv(u) * (W u + b) + u
"""

from torch import Tensor, nn

from mixassay.kernels.gated_conv import gated_conv
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.parts.linear import Linear, linear
from mixassay.mixers.parts.short_conv import ShortConv
from mixassay.mixers.parts.sizes import at_least

INIT_STD = 0.02


@mixer("base_conv")
class BaseConv(Mixer):
    """The gated causal convolution with a bias on both sides; `conv` is its width in tokens.

    The linear layer starts normal with deviation 0.02, its bias at 0, as in Zoology's models. The state is the
    convolution's last inputs [B, conv - 1, D].
    """

    def __init__(self, d_model: int, *, conv: int = 3) -> None:
        super().__init__()
        at_least(1, d_model=d_model, conv=conv)
        self.d_model = d_model
        self.conv = ShortConv(d_model, conv, bias=True)
        self.proj = Linear(d_model, d_model)
        nn.init.normal_(self.proj.weight, std=INIT_STD)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.conv.weight is not None and self.conv.bias is not None:  # in one pass
            return gated_conv(x, self.conv.weight, self.conv.bias, linear(x, self.proj.weight), self.proj.bias)
        y: Tensor = self.conv(x) * self.proj(x) + x
        return y

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, state = self.conv.prefill(x, state)
        return conv * self.proj(x) + x, state

    def init_state(self, batch: int) -> State:
        return self.conv.init_state(batch, self.proj.weight)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        conv, state = self.conv.step(x, state)
        return conv * self.proj(x) + x, state
