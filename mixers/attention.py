"""Causal softmax attention (Vaswani et al. 2017): the baseline that remembers everything and pays for all of it."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mixassay.errors import UserError
from mixassay.kernels.softmax_attention import packed_attention, softmax_attention, softmax_attention_step
from mixassay.mixers import Mixer, State, mixer, nbytes
from mixassay.mixers.parts.cache import longer
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.rotary import rotate
from mixassay.mixers.parts.short_conv import ShortConv
from mixassay.mixers.parts.sizes import at_least, head_size


@mixer("attention")
class Attention(Mixer):
    """Multi-head causal softmax attention, no dropout.

    heads, head_dim   head_dim None: d_model / heads
    window            a token sees itself and the window - 1 before it (sliding window); None: all before it
    rope, rope_base   rotary positions (Su et al. 2021) on q and k
    conv              width of a short convolution on q, k and v, without activation; 0: none
    qkv_bias          a bias on the q, k and v projections, as GPT-2 and Zoology have

    Linear layers start as torch's default, uniform in +-d_model^-0.5 and +-(heads * head_dim)^-0.5 (with Zoology's
    deviation of 0.02 MQAR is learnt later at small widths); biases at 0. The state is the cache of keys and values,
    and with `rope` a position counter per sequence.
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int = 1,
        head_dim: int | None = None,
        window: int | None = None,
        rope: bool = False,
        rope_base: float = 10000.0,
        conv: int = 0,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.d_model, self.heads, self.head_dim = d_model, heads, head_size(d_model, heads, head_dim)
        at_least(1, window=window)
        if rope and self.head_dim % 2:
            raise UserError(f"rope turns channels in pairs: head_dim must be even, got {self.head_dim}")
        if not rope_base > 0:
            raise UserError(f"rope_base must be greater than 0, got {rope_base}")
        self.window, self.rope, self.rope_base = window, rope, rope_base
        inner = heads * self.head_dim
        self.qkv = Linear(d_model, 3 * inner, bias=qkv_bias)
        if qkv_bias:
            nn.init.zeros_(self.qkv.bias)
        self.conv = ShortConv(3 * inner, conv)
        self.out = Linear(inner, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.conv(self.qkv(x))
        if self.rope:
            q, k, v = self._heads(qkv)  # [B, T, H, K]
            q, k = self._turn(q, k, torch.arange(x.shape[1], device=x.device))
            o = softmax_attention(q, k, v, window=self.window)
        else:
            o = packed_attention(torch.unflatten(qkv, -1, (3, self.heads, self.head_dim)), window=self.window)
        y: Tensor = self.out(o.flatten(-2))
        return y

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (T, new), before = (x.shape[1], {}), state["k"].shape[1]
        qkv, new["conv"] = self.conv.prefill(self.qkv(x), state["conv"])
        q, k, v = self._heads(qkv)  # [B, T, H, K]
        if self.rope:
            q, k = self._turn(q, k, state["position"].unsqueeze(-1) + torch.arange(T, device=x.device))
            new["position"] = state["position"] + T
        k, v = self._longer(state["k"], k), self._longer(state["v"], v)
        for name, seen in (("k", k), ("v", v)):
            new[name] = seen if self.window is None else seen[:, -self.window :].clone()
        q = pad(q, (0, 0, 0, 0, before, 0))  # tokens of the cache ask nothing
        o = softmax_attention(q, k, v, window=self.window)[:, before:]
        return self.out(o.flatten(-2)), new

    def init_state(self, batch: int) -> State:
        return self._state(batch, kept=0)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        new = {}
        qkv, new["conv"] = self.conv.step(self.qkv(x), state["conv"])
        q, k, v = self._heads(qkv)  # [B, H, K]
        if self.rope:
            q, k = self._turn(q, k, state["position"])
            new["position"] = state["position"] + 1
        for name, entry in (("k", k), ("v", v)):
            seen = self._longer(state[name], entry.unsqueeze(1))
            new[name] = seen if self.window is None else seen[:, -self.window :]
        return self.out(softmax_attention_step(q, new["k"], new["v"]).flatten(-2)), new

    @property
    def state_law(self) -> Literal["constant", "linear"]:
        return "linear" if self.window is None else "constant"

    def state_bytes(self, T: int) -> int:
        """Counted on a state of T tokens that is made at once: T steps would copy a growing cache T times."""
        return nbytes(self._state(1, kept=T if self.window is None else min(T, self.window)))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.unflatten(qkv, -1, (3, self.heads, self.head_dim)).unbind(-3)
        return q, k, v

    def _turn(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, positions, self.rope_base), rotate(k, positions, self.rope_base)

    def _longer(self, cache: Tensor, new: Tensor) -> Tensor:
        """[B, T, H, K] -> [B, T + N, H, K]. Where all tokens are kept, it is in the dtype that they come in: under
        autocast half of float32's bytes, for the same numbers. A window is as wide as any state of constant size."""
        if self.window is not None:
            return torch.cat([cache, new], dim=1)
        return longer(cache if cache.shape[1] else new[:, :0], new)

    def _state(self, batch: int, kept: int) -> dict[str, Tensor]:
        like = self.out.weight
        state = {name: like.new_zeros(batch, kept, self.heads, self.head_dim) for name in ("k", "v")}
        state["conv"] = self.conv.init_state(batch, like)
        if self.rope:
            state["position"] = torch.full((batch,), kept, device=like.device)
        return state
