"""What the mixers of higher-order linear attention share: all but the operator."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from mixassay.errors import UserError
from mixassay.kernels.common.feature_maps import FEATURE_MAPS, NON_NEGATIVE, FeatureMap
from mixassay.kernels.hla import empty
from mixassay.mixers import Mixer, State
from mixassay.mixers.parts.decay import SelectiveDecay, spared
from mixassay.mixers.parts.linear import Linear
from mixassay.mixers.parts.norm import RMSNorm, l2norm
from mixassay.mixers.parts.precision import wide
from mixassay.mixers.parts.rotary import rotate
from mixassay.mixers.parts.short_conv import ShortConv
from mixassay.mixers.parts.sizes import at_least, head_size

DecayKind = Literal["none", "fixed", "learned", "token"]
Call = Callable[..., tuple[Tensor, Any]]


class HigherOrder(Mixer):
    """Projections, short convolution, the operator, a norm, a projection.

    heads, head_dim   head_dim None: d_model / heads; K = V = head_dim
    kv_heads          heads of k and v, which divide heads and are shared by as many of q (multi-query); None: heads
    decay             of the inner states, one for each head of k: "none"; "fixed" at 1 - 2^-5, 1 - 2^-6, ... (RetNet,
                      Sun et al. 2023); "learned", starting there; "token": chosen by each token, as in Mamba-2. The
                      outer state's follows: its square in hla2, the same in ahla, its cube in hla3
    feature_map       phi on q and k: "identity", "elu" (1 + ELU), "relu", "softmax" (over a head's channels), "silu"
    normalizer        divide by the sum of the weights; only with a feature map that is never negative
    output_norm       RMSNorm of each head's output
    conv              width of a short convolution on q, k and v, without activation; 0: none
    rope, rope_base   rotary positions (Su et al. 2021) on q and k; only with the identity

    With the identity, q and k are made unit vectors and their products multiplied by K^0.5, so that those of random
    vectors have variance 1 (the operators are of degree two and three in them); with another feature map by K^-0.5.
    Linear layers start as torch's default, uniform in +-d_model^-0.5. The state is the convolution's last inputs, the
    operator's matrices, and with `rope` a position counter per sequence.
    """

    operator: ClassVar[Call]
    operator_step: ClassVar[Call]
    matrices: ClassVar[type]

    def __init__(
        self,
        d_model: int,
        *,
        heads: int = 1,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        decay: DecayKind = "none",
        feature_map: FeatureMap = "identity",
        normalizer: bool = False,
        output_norm: bool = True,
        conv: int = 4,
        rope: bool = False,
        rope_base: float = 10000.0,
    ) -> None:
        super().__init__()
        self.d_model, self.heads, self.head_dim = d_model, heads, head_size(d_model, heads, head_dim)
        at_least(1, kv_heads=kv_heads)
        self.kv_heads = kv_heads or heads
        if heads % self.kv_heads:
            raise UserError(f"kv_heads={kv_heads} does not divide heads={heads}")
        _check_features(feature_map, normalizer, rope)
        if rope and self.head_dim % 2:
            raise UserError(f"rope turns channels in pairs: head_dim must be even, got {self.head_dim}")
        if not rope_base > 0:
            raise UserError(f"rope_base must be greater than 0, got {rope_base}")
        self.rope, self.rope_base, self.unit = rope, rope_base, feature_map == "identity"
        self.options: dict[str, Any] = {"feature_map": feature_map, "normalize": normalizer}
        self.options["scale"] = self.head_dim ** (0.5 if self.unit else -0.5)
        self.widths = [heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]  # q | k | v
        self.qkv = Linear(d_model, sum(self.widths), bias=False)
        self.conv = ShortConv(sum(self.widths), conv)
        self.decay = Decay(d_model, self.kv_heads, decay)
        self.norm = RMSNorm(self.head_dim) if output_norm else None
        self.out = Linear(heads * self.head_dim, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._operands(self.conv(self.qkv(x)), torch.arange(x.shape[1], device=x.device))
        o, _ = type(self).operator(q, k, v, self.decay(x), **self.options)
        return self._output(o)

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        T, new, keep = x.shape[1], {}, {"initial_state": state["matrices"], "output_final_state": True}
        qkv, new["conv"] = self.conv.prefill(self.qkv(x), state["conv"])
        positions = None
        if self.rope:
            positions = state["position"].unsqueeze(-1) + torch.arange(T, device=x.device)
            new["position"] = state["position"] + T
        q, k, v = self._operands(qkv, positions)
        o, new["matrices"] = type(self).operator(q, k, v, self.decay(x), **keep, **self.options)
        return self._output(o), new

    def init_state(self, batch: int) -> State:
        like, K = self.out.weight, self.head_dim
        W = K + self.options["normalize"]
        state = {"conv": self.conv.init_state(batch, like)}
        state["matrices"] = empty(self.matrices, like, B=batch, G=self.kv_heads, H=self.heads, K=K, W=W)
        if self.rope:
            state["position"] = torch.zeros(batch, dtype=torch.int64, device=like.device)
        return state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        new = {}
        qkv, new["conv"] = self.conv.step(self.qkv(x), state["conv"])
        q, k, v = self._operands(qkv, state.get("position"))
        o, new["matrices"] = type(self).operator_step(q, k, v, self.decay(x), None, state["matrices"], **self.options)
        if self.rope:
            new["position"] = state["position"] + 1
        return self._output(o), new

    def _operands(self, qkv: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [..., H, K], k and v [..., G, K]."""
        q, k, v = (torch.unflatten(x, -1, (-1, self.head_dim)) for x in torch.split(wide(qkv), self.widths, dim=-1))
        if self.unit:
            q, k = l2norm(q), l2norm(k)
        if self.rope:
            assert positions is not None
            q, k = (rotate(x, positions, self.rope_base) for x in (q, k))
        return q, k, v

    def _output(self, o: Tensor) -> Tensor:
        y: Tensor = self.out((o if self.norm is None else self.norm(o)).flatten(-2))
        return y


class Decay(nn.Module):
    """x [..., D] -> log decays: None, [G] for all tokens, or [..., G]."""

    def __init__(self, d_model: int, heads: int, kind: DecayKind) -> None:
        super().__init__()
        if kind not in ("none", "fixed", "learned", "token"):
            raise UserError(f'decay must be one of none, fixed, learned, token, got "{kind}"')
        self.kind = kind
        retained = [1 - 2.0 ** -(5 + h) for h in range(heads)]
        if kind == "fixed":
            self.register_buffer("log_decay", torch.tensor([math.log(g) for g in retained]))
        elif kind == "learned":
            self.logit = spared(torch.tensor([math.log(g / (1 - g)) for g in retained]))
        elif kind == "token":
            self.dt_proj = Linear(d_model, heads, bias=False)
            self.selective = SelectiveDecay(heads, a_range=(0, 16))

    def forward(self, x: Tensor) -> Tensor | None:
        if self.kind == "fixed":
            return self.get_buffer("log_decay")
        if self.kind == "learned":
            return logsigmoid(self.logit)
        if self.kind == "token":
            _, log_decay = self.selective(self.dt_proj(x))
            return log_decay  # type: ignore[no-any-return]
        return None


def _check_features(feature_map: str, normalizer: bool, rope: bool) -> None:
    if feature_map not in FEATURE_MAPS:
        raise UserError(f'feature_map must be one of {", ".join(FEATURE_MAPS)}, got "{feature_map}"')
    if normalizer and feature_map not in NON_NEGATIVE:
        raise UserError(
            f'normalizer divides by a sum of weights, which changes sign with feature_map "{feature_map}"; set '
            f"normalizer: false (output_norm: true replaces it), or take one of {', '.join(NON_NEGATIVE)}"
        )
    if rope and feature_map != "identity":
        raise UserError(
            f'rope needs feature_map: identity, got "{feature_map}": turned before it, products of q and k would not '
            "depend on distances alone, and turned behind it they would have any sign"
        )
