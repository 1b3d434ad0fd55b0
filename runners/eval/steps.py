"""The steps of a batch that goes on from its prompts. On a GPU they are launches, each cheaper to run than to launch,
so there one CUDA graph replays them all, wherever a step leaves a state of the shapes that it found."""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mixassay.kernels.common.precision import cast
from mixassay.model import Decoding, Model
from mixassay.runners.graph import Replay


class Steps:
    """`Model.step`, with the same arguments and results, which on a GPU hold until the next call."""

    def __init__(self, model: Model, precision: str) -> None:
        self.model, self.precision = model, precision
        device = model.embedding.weight.device
        self.replay = Replay(self._flat, str(device))
        self.keeps: dict[tuple[torch.Size, ...], bool] = {}
        """Whether a step leaves a state of such shapes as it was, by what the first one did."""
        self.structure: pytree.TreeSpec | None = None

    def __call__(self, tokens: Tensor, state: Decoding) -> tuple[Tensor, Decoding]:
        if not self.replay.on:
            return self.model.step(tokens, state)
        leaves, self.structure = pytree.tree_flatten(state)
        if self.keeps.get(shapes(leaves)):
            logits, after = self.replay(tokens, *leaves)
            return logits, after
        logits, after = self.model.step(tokens, state)
        found = pytree.tree_leaves(after)
        here = all(x.device == tokens.device for x in (*leaves, *found))  # the host's are read once by a graph
        self.keeps[shapes(leaves)] = here and shapes(found) == shapes(leaves)
        return logits, after

    def replays(self, state: Decoding) -> bool:
        """Whether the next step from such a state is one of a graph's."""
        return self.replay.on and self.keeps.get(shapes(pytree.tree_leaves(state)), False)

    def forget(self) -> None:
        """Let go of all memory."""
        self.replay.forget()

    def _flat(self, tokens: Tensor, *leaves: Tensor) -> tuple[Tensor, Decoding]:
        assert self.structure is not None
        # weights as autocast has them for the steps before were not made by the graph, and will be gone
        with cast(tokens.device.type, self.precision, cached=False):
            return self.model.step(tokens, pytree.tree_unflatten(leaves, self.structure))


def shapes(leaves: list[Tensor]) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in leaves)
