"""The model around a mixer: embedding, blocks, final norm, tied head.

Three blocks, x being the residual stream and Mix the mixer:

    zoology   x = x + Mix(LN(x));   x = x + LN(x)                  Arora et al. 2023, with their Identity state mixer,
                                                                   whose branch still adds its normed input
    mamba     x = x + Mix(RMS(x))                                  Gu & Dao 2023: the mixer holds the gating
    swiglu    x = x + Mix(RMS(x));  x = x + SwiGLU(RMS(x))         the pre-norm language-model block (Shazeer 2020)

The head is evaluated at labelled positions only: the same loss and gradients as over all positions, for a fraction
of the work. Nothing here touches a mixer's own initialisation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixassay.errors import UserError
from mixassay.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_score
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.parts.norm import LayerNorm, RMSNorm
from mixassay.registry import bind
from mixassay.spec import MixerSpec, ModelSpec

Head = Callable[[Tensor, Tensor], Any]
"""What is made of the normed hidden states [B, Q, D] and the embedding's weight [vocab_size, D]."""


Decoding = tuple[Tensor, list[State]]
"""Tokens seen so far, int64 [B], and the state of each layer's mixer."""


def logits(h: Tensor, weight: Tensor) -> Tensor:
    """[B, Q, vocab_size]."""
    return F.linear(h, weight)


def labelled_loss(labels: Tensor, ignore: int) -> Head:
    """Mean cross-entropy [] over the labels [B, Q] that are not `ignore`, in at least float32."""

    def head(h: Tensor, weight: Tensor) -> Tensor:
        each = linear_cross_entropy(h.flatten(0, 1), weight, labels.flatten(), ignore_index=ignore)
        return each.sum() / (labels != ignore).sum()

    return head


def scores(labels: Tensor, ignore: int) -> Head:
    """Cross-entropy [B, Q], 0 where the label is `ignore`, and whether the label is the likeliest word [B, Q]."""

    def head(h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        flat = linear_cross_entropy_score(h.flatten(0, 1), weight, labels.flatten(), ignore_index=ignore)
        loss, right = (x.view(labels.shape) for x in flat)
        return loss, right

    return head


class SwiGLU(nn.Module):
    """W3 (SiLU(W1 x) * W2 x), hidden width 2/3 of `mlp_ratio` times the model's, rounded up to a multiple of 8."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        hidden = -(-int(spec.d_model * spec.mlp_ratio * 2 / 3) // 8) * 8
        self.up = nn.Linear(spec.d_model, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, spec.d_model, bias=False)
        for layer in (self.up, self.down):
            nn.init.normal_(layer.weight, std=spec.init_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * value)
        return y


class Block(nn.Module):
    """One residual block of the kind named by `ModelSpec.block`."""

    def __init__(self, spec: ModelSpec, inner: Mixer) -> None:
        super().__init__()
        self.mixer = inner
        self.norm = norm(spec)
        self.norm2 = norm(spec) if spec.block != "mamba" else None
        self.mlp = SwiGLU(spec) if spec.block == "swiglu" else None

    def forward(self, x: Tensor, *changes: Tensor) -> Tensor:
        """`changes` bool [B, T] for a mixer that is told them."""
        y: Tensor = self.mixer(self.norm(x), *changes)
        if y.shape != x.shape:
            name = type(self.mixer).__name__
            raise UserError(
                f"{name}.forward returned shape {list(y.shape)} for x of shape {list(x.shape)}; both must agree"
            )
        return self._rest(x + y)

    def prefill(self, x: Tensor) -> tuple[Tensor, State]:
        y, state = self.mixer.prefill(self.norm(x), self.mixer.init_state(x.shape[0]))
        return self._rest(x + y), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.mixer.step(self.norm(x), state)
        return self._rest(x + y), state

    def _rest(self, x: Tensor) -> Tensor:
        """What follows the mixer."""
        if self.norm2 is None:
            return x
        y: Tensor = self.norm2(x, dtype=x.dtype) if self.mlp is None else self.mlp(self.norm2(x))
        return x + y


class Model(nn.Module):
    """`make(layer)` gives the mixer of a layer; layers 0, 2, ... are hybrid layers when the model has them.

    forward: tokens int64 [B, T], positions int64 [B, Q] (where to predict; None = everywhere), keep [B, T, D]
    (dropout factors of the embeddings, or None) -> logits [B, Q or T, vocab_size], or what another `head` makes.
    """

    def __init__(self, spec: ModelSpec, vocab_size: int, max_len: int, make: Callable[[int], Mixer]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, spec.d_model)
        nn.init.normal_(self.embedding.weight, std=spec.init_std)
        self.position: nn.Embedding | None = None
        if spec.positions == "learned":
            self.position = nn.Embedding(max_len, spec.d_model)
            nn.init.normal_(self.position.weight, std=spec.init_std)
        self.blocks = nn.ModuleList(Block(spec, make(layer)) for layer in range(spec.n_layers))
        self.norm = norm(spec)
        self.changes: Callable[[Tensor], Tensor] | None = None
        """What tells the mixers that ask for it where the segments of rows begin: tokens -> bool [B, T]."""

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, keep: Tensor | None = None, head: Head = logits
    ) -> Any:
        x = self.embedding(tokens)  # [B, T, D]
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        if keep is not None:
            x = x * keep
        for block in self.blocks:
            assert isinstance(block, Block)
            told = (self.changes(tokens),) if self.changes is not None and block.mixer.told_changes else ()
            x = block(x, *told)
        if positions is not None:
            x = x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))  # [B, Q, D]
        return head(self.norm(x), self.embedding.weight)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Decoding]:
        """tokens int64 [B, T] -> logits behind the last one [B, vocab_size], and the state that `step` goes on from.
        Raises `UserError` for mixers that must be told a task's changes."""
        if any(inner.told_changes for inner in self.mixers()):
            raise UserError("a mixer that is told a task's changes cannot generate: nobody tells it them")
        T, states = tokens.shape[1], []
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position.weight[:T]
        for block in self.blocks:
            assert isinstance(block, Block)
            x, state = block.prefill(x)
            states.append(state)
        return self._logits(x[:, -1]), (torch.full_like(tokens[:, 0], T), states)

    def step(self, tokens: Tensor, state: Decoding) -> tuple[Tensor, Decoding]:
        """The next token of each row, int64 [B] -> logits [B, vocab_size], and the new state."""
        (position, states), after = state, []
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(position)
        for block, before in zip(self.blocks, states, strict=True):
            assert isinstance(block, Block)
            x, new = block.step(x, before)
            after.append(new)
        return self._logits(x), (position + 1, after)

    def _logits(self, x: Tensor) -> Tensor:
        return logits(self.norm(x), self.embedding.weight)

    def mixers(self) -> list[Mixer]:
        return [block.mixer for block in self.blocks if isinstance(block, Block)]

    @contextmanager
    def watched(self, look: Callable[[Mixer, tuple[Tensor, ...]], None]) -> Iterator[None]:
        """Inside, `look` sees every mixer and what it is given, right before it runs."""
        hooks = [inner.register_forward_pre_hook(look) for inner in self.mixers()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def calibrate(self, tokens: Tensor) -> None:
        """Before training: shows the rows of a first batch to mixers that set something by them, layer after layer."""

        def look(inner: Mixer, given: tuple[Tensor, ...]) -> None:
            if inner.calibrates:
                inner.calibrate(given[0])

        if any(inner.calibrates for inner in self.mixers()):
            with self.watched(look):
                self(tokens, torch.zeros_like(tokens[:, :1]))

    def state_bytes(self, T: int) -> int:
        """Bytes that all layers' mixers keep per sequence after T tokens, measured on their live states."""
        return sum(inner.state_bytes(T) for inner in self.mixers())

    def live_state_bytes(self, T: int) -> int:
        """What of `state_bytes(T)` holds something."""
        return sum(inner.live_state_bytes(T) for inner in self.mixers())


def norm(spec: ModelSpec) -> nn.Module:
    return LayerNorm(spec.d_model) if spec.block == "zoology" else RMSNorm(spec.d_model)


def build(model: ModelSpec, mixer_spec: MixerSpec, vocab_size: int, max_len: int) -> Model:
    """The model of a run, initialised from torch's global generator (seed it, inside `fork_rng`, before calling)."""

    def make(layer: int) -> Mixer:
        chosen = model.hybrid if model.hybrid is not None and layer % 2 == 0 else mixer_spec
        cls = mixer[chosen.name]
        made = cls(model.d_model, **bind(cls, chosen.args, given=("d_model",)))
        made.d_model = model.d_model  # a mixer of a few lines need not keep it itself
        return made

    return Model(model, vocab_size, max_len, make)
