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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixassay.errors import UserError
from mixassay.kernels.embedding import embedding
from mixassay.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_score
from mixassay.kernels.residual_norm import residual_norm
from mixassay.mixers import Mixer, State, mixer
from mixassay.mixers.parts.norm import LayerNorm, RMSNorm
from mixassay.readout import Decoder
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


Vectors = tuple[Tensor, Tensor | None]
"""Weight and bias of a norm."""


class Next(NamedTuple):
    """The norm of what comes next; `wide` in front of the head, which reads more digits than autocast's products."""

    weight: Tensor
    bias: Tensor | None
    wide: bool


class Block(nn.Module):
    """One residual block of the kind named by `ModelSpec.block`.

    It is given the residual stream x and its norm h [B, T, D], which the step before has made in one pass, and returns
    both for what comes next, whose norm is `after`.
    """

    def __init__(self, spec: ModelSpec, inner: Mixer) -> None:
        super().__init__()
        self.mixer = inner
        self.norm = norm(spec)
        self.norm2 = norm(spec) if spec.block != "mamba" else None
        self.mlp = SwiGLU(spec) if spec.block == "swiglu" else None

    def forward(
        self, x: Tensor, h: Tensor, after: Next, *changes: Tensor, at: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`changes` bool [B, T] for a mixer that is told them; `at` int64 [B, Q]: the only tokens that are wanted."""
        y: Tensor = self.mixer(h, *changes)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            found = f"shape {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            name = type(self.mixer).__name__
            raise UserError(f"{name}.forward returned {found} for x of shape {list(x.shape)}; both must agree")
        return self._rest(x, y, after, at)

    def prefill(self, x: Tensor, h: Tensor, after: Next) -> tuple[Tensor, Tensor, State]:
        y, state = self.mixer.prefill(h, self.mixer.init_state(x.shape[0]))
        return *self._rest(x, y, after), state

    def step(self, x: Tensor, h: Tensor, after: Next, state: State) -> tuple[Tensor, Tensor, State]:
        y, state = self.mixer.step(h, state)
        return *self._rest(x, y, after), state

    def _rest(self, x: Tensor, y: Tensor, after: Next, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What follows the mixer."""
        inner = None
        if self.norm2 is not None:
            inner = vectors(self.norm2)
        if self.mlp is not None and inner is not None:
            x, h = residual_norm(x, y, *inner)
            y, inner = self.mlp(h), None
        return residual_norm(x, y, after.weight, after.bias, inner=inner, at=at, wide=after.wide)


class Model(nn.Module):
    """`make(layer)` gives the mixer of a layer; layers 0, 2, ... are hybrid layers when the model has them.

    forward: tokens int64 [B, T], positions int64 [B, Q] (where to predict; None = everywhere), keep bool [B, T, D]
    (what dropout keeps of the embeddings, or None) -> logits [B, Q or T, vocab_size], or what another `head` makes.
    """

    def __init__(
        self, spec: ModelSpec, vocab_size: int, max_len: int, make: Callable[[int], Mixer], decodes: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, spec.d_model)
        nn.init.normal_(self.embedding.weight, std=spec.init_std)
        self.position: nn.Embedding | None = None
        if spec.positions == "learned":
            self.position = nn.Embedding(max_len, spec.d_model)
            nn.init.normal_(self.position.weight, std=spec.init_std)
        self.blocks = nn.ModuleList(Block(spec, make(layer)) for layer in range(spec.n_layers))
        self.norm, self.dropout = norm(spec), spec.dropout
        self.decoder = Decoder(spec.d_model) if decodes else None
        self.changes: Callable[[Tensor], Tensor] | None = None
        """What tells the mixers that ask for it where the segments of rows begin: tokens -> bool [B, T]."""

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, keep: Tensor | None = None, head: Head = logits
    ) -> Any:
        x, h = self._start(tokens, keep)
        for block, after in self._steps():
            told = (self.changes(tokens),) if self.changes is not None and block.mixer.told_changes else ()
            x, h = block(x, h, after, *told, at=positions if block is self.blocks[-1] else None)
        return head(h if self.decoder is None else self.decoder(h), self.embedding.weight)

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Decoding]:
        """tokens int64 [B, T] -> logits behind the last one [B, vocab_size], and the state that `step` goes on from.
        Raises `UserError` for mixers that must be told a task's changes, and for a model with a decoder."""
        if self.decoder is not None:
            raise UserError("a model that reads whole rows from one vector cannot generate")
        if any(inner.told_changes for inner in self.mixers()):
            raise UserError("a mixer that is told a task's changes cannot generate: nobody tells it them")
        states = []
        x, h = self._start(tokens)
        for block, after in self._steps():
            x, h, state = block.prefill(x, h, after)
            states.append(state)
        return logits(h[:, -1], self.embedding.weight), (torch.full_like(tokens[:, 0], tokens.shape[1]), states)

    def step(self, tokens: Tensor, state: Decoding) -> tuple[Tensor, Decoding]:
        """The next token of each row, int64 [B] -> logits [B, vocab_size], and the new state."""
        (position, states), later = state, []
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(position)
        h = self._blocks()[0].norm(x)
        for (block, after), before in zip(self._steps(), states, strict=True):
            x, h, new = block.step(x, h, after, before)
            later.append(new)
        return logits(h, self.embedding.weight), (position + 1, later)

    def _start(self, tokens: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The residual stream at its beginning, and its norm for the first block."""
        position = None if self.position is None else self.position.weight[: tokens.shape[1]]
        weights = self.embedding.weight, position, *vectors(self._blocks()[0].norm)
        return embedding(tokens, *weights, keep=keep, p=self.dropout)

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _steps(self) -> list[tuple[Block, Next]]:
        """Every block, and the norm of what comes after it."""
        blocks = self._blocks()
        norms = [Next(*vectors(block.norm), wide=False) for block in blocks[1:]]
        return list(zip(blocks, [*norms, Next(*vectors(self.norm), wide=True)], strict=True))

    def mixers(self) -> list[Mixer]:
        return [block.mixer for block in self._blocks()]

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


def norm(spec: ModelSpec) -> LayerNorm | RMSNorm:
    return LayerNorm(spec.d_model) if spec.block == "zoology" else RMSNorm(spec.d_model)


def vectors(norm: LayerNorm | RMSNorm) -> Vectors:
    return norm.weight, norm.bias if isinstance(norm, LayerNorm) else None


def build(model: ModelSpec, mixer_spec: MixerSpec, vocab_size: int, max_len: int, decodes: bool = False) -> Model:
    """The model of a run, initialised from torch's global generator (seed it, inside `fork_rng`, before calling)."""

    def make(layer: int) -> Mixer:
        chosen = model.hybrid if model.hybrid is not None and layer % 2 == 0 else mixer_spec
        cls = mixer[chosen.name]
        made = cls(model.d_model, **bind(cls, chosen.args, given=("d_model",)))
        made.d_model = model.d_model  # a mixer of a few lines need not keep it itself
        return made

    return Model(model, vocab_size, max_len, make, decodes)
