"""Gradients pass through the carried state: those of steps are those of forward, and y's gradient in the initial state
is its derivative by finite differences.
"""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mixassay.runners.conformance.outcome import Failed, Measured, NotOffered
from mixassay.runners.conformance.shrink import holds
from mixassay.runners.conformance.subject import Subject, forward, gap, run_steps

H = 1e-6
SEEN = 5


def check(subject: Subject) -> Measured:
    if not subject.steps:
        raise NotOffered("no init_state and step")
    through_steps(subject)
    return in_the_initial_state(subject)


def through_steps(subject: Subject) -> None:
    m = subject.build()

    def fault(x: Tensor) -> str | None:
        x, weight = x.detach().requires_grad_(), subject.tokens(len(x), x.shape[1], 2, x.dtype)
        leaves = {"x": x, **dict(m.named_parameters())}
        stepwise, parallel = (
            torch.autograd.grad((y * weight).sum(), list(leaves.values()), materialize_grads=True)
            for y in (run_steps(m, x)[0], forward(m, x))
        )
        for name, found, wanted in zip(leaves, stepwise, parallel, strict=True):
            off = gap(found, wanted)
            if off > subject.tolerance:
                return f"the gradient of {name} through steps is off by {off:.2g} from that through forward"
        return None

    holds(fault, [subject.tokens(2, 19)])


def in_the_initial_state(subject: Subject) -> Measured:
    """The state after a few tokens, moved along a random direction of all its floating-point tensors."""
    m = subject.build(dtype=torch.float64).requires_grad_(False)
    x, more = (subject.tokens(2, SEEN, seed, torch.float64) for seed in (1, 2))
    leaves, structure = pytree.tree_flatten(run_steps(m, x)[1])
    leaves = [t.detach() if isinstance(t, Tensor) else t for t in leaves]
    moving = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    if not moving:
        return {}
    draw = torch.Generator().manual_seed(3)
    along = {i: torch.randn(leaves[i].shape, generator=draw, dtype=torch.float64).to(subject.device) for i in moving}

    def loss(h: float | Tensor) -> Tensor:
        moved = [t + h * along[i] if i in along else t for i, t in enumerate(leaves)]
        return run_steps(m, more, pytree.tree_unflatten(moved, structure))[0].square().sum()

    at = torch.zeros((), dtype=torch.float64, device=subject.device, requires_grad=True)
    (grad,) = torch.autograd.grad(loss(at), at, materialize_grads=True)
    found, wanted = float(grad), float(loss(H) - loss(-H)) / (2 * H)
    off = abs(found - wanted) / max(abs(wanted), 1e-8)
    if not off <= 1e-4:
        raise Failed(
            f"along a random direction of the initial state y's gradient is {found:.6g}, finite differences give"
            f" {wanted:.6g}",
            f"the state after {SEEN} tokens, then {SEEN} steps",
        )
    return {"error": off}
