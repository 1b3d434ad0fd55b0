"""A mixer moves information along the sequence: the part of a model that this package exists to measure.

A mixer is a plain `nn.Module` written as if there were one model; the harness stacks it. It owns its
initialisation. Besides the parallel `forward` it has a recurrent form, `init_state` and `step`, from which the size
of its state is measured rather than claimed.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mixassay.registry import Registry

State = Any
"""What `step` carries: a tensor, or any nesting of tuples, lists and dicts of tensors. Batch is the first axis."""


class Mixer(nn.Module):
    """Base of all mixers: `__init__(self, d_model: int, *, ...)`, keywords = YAML keys, each annotated.

    Raise `UserError` there for sizes that do not fit. A parameter `p` that weight decay must spare although it has two
    axes or more is marked `p.no_weight_decay = True`. Many models run as one under `torch.func.vmap`, so a mixer must
    not branch on values or write into tensors in place.
    """

    d_model: int

    stacks: ClassVar[bool] = True
    """Whether it runs under `torch.func.vmap`. If not (Triton kernels without a rule for it), models train one after
    the other."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D], causal, any T >= 1."""
        raise NotImplementedError

    def init_state(self, batch: int) -> State:
        """The state before the first token, on the parameters' device and in their dtype."""
        raise NotImplementedError

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One token: x [B, D] and the state -> (y [B, D], new state). The state given is left as it was."""
        raise NotImplementedError

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Many tokens behind a state: x [B, T, D], T >= 1 -> (y [B, T, D], the state after them). Here this is T steps;
        a mixer may do it in one call, and the contract tests hold it to the steps."""
        ys = []
        for token in x.unbind(1):
            y, state = self.step(token, state)
            ys.append(y)
        return torch.stack(ys, dim=1), state

    @property
    def state_law(self) -> Literal["constant", "log", "linear"]:
        """How `state_bytes(T)` grows with T. A claim that `mixassay check` holds against the live state."""
        return "constant"

    @property
    def straight_through(self) -> tuple[str, ...]:
        """Names of parameters, and "x", whose gradients are on purpose not the derivatives of what `forward` computes,
        since that is piecewise constant in them."""
        return ()

    @property
    def told_changes(self) -> bool:
        """Whether `forward` takes a second argument, bool [B, T]: where the true segments of the task's rows begin."""
        return False

    @property
    def softens(self) -> bool:
        """Whether `forward` computes something else in training than in evaluation (`self.training`). Records then have
        the accuracy of the training form, too, as `valid/soft_accuracy`."""
        return False

    @property
    def calibrates(self) -> bool:
        """Whether `calibrate` has something to set."""
        return False

    def calibrate(self, x: Tensor) -> None:
        """Sets what is chosen by looking at data: once before training, x [B, T, D] of the first batch."""

    def observe(self, x: Tensor, *changes: Tensor) -> dict[str, Tensor]:
        """Named numbers, each a scalar, of what `forward` does with x and `changes`; a record has their means over
        layers and validation cells as `valid/NAME`."""
        return {}

    @torch.no_grad()
    def state_bytes(self, T: int) -> int:
        """Bytes kept per sequence after T tokens, counted on the live state of one sequence.

        This takes T steps. A mixer may count faster, as attention does; the contract tests hold it to the live state.
        """
        x = next(self.parameters(), torch.empty(())).new_zeros(1, self.d_model)
        state = self.init_state(1)
        for _ in range(T):
            _, state = self.step(x, state)
        return nbytes(state)

    def live_state_bytes(self, T: int) -> int:
        """Of `state_bytes(T)`, what holds something after T tokens. Less than all of it where a state is laid out for
        more tokens than it has seen: the log-linear mixers' slots fill one by one."""
        return self.state_bytes(T)


def nbytes(state: State) -> int:
    """Bytes of all tensors in a state. A view counts as what it shows, not as the storage behind it."""
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(state) if isinstance(t, Tensor))


mixer: Registry[type[Mixer]] = Registry("mixer", "mixassay.mixers")
