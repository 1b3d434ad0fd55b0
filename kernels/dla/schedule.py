"""Boundaries, then slots, as one torch operator without gradient. Under vmap the mapped axis joins the batch: the torch
form's loops go on until the last head is done, which is a branch on values (the kernels have none)."""

from typing import Any

import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator
from mixassay.kernels.common.registered import against_triton, on_device, vmap_joins
from mixassay.kernels.dla.boundaries import Reading, boundaries
from mixassay.kernels.dla.slots import Rule, Schedule, slots

LARGEST = 128 * 128
"""Numbers of a state that a program's registers hold."""


def schedule(
    k: Tensor,
    v: Tensor,
    capacity: int,
    *,
    threshold: Tensor | None = None,
    forced: Tensor | None = None,
    log_decay: Tensor | None = None,
    reading: Reading = "memory",
    rule: Rule = "density",
    backend: str | None = None,
) -> tuple[Tensor, Schedule]:
    """Scores [B, T, H] and the schedule of `capacity` slots. Boundaries are where scores against the open segment
    reach the threshold [H] (`boundaries`), or where bool [B, T, H] `forced` says so, and then all scores are 0.

    k [B, T, G, K], v [B, T, H, V], log_decay [B, T, H] or None. May run under vmap. Raises UserError.
    """
    if (threshold is None) == (forced is None):
        raise UserError("dla.schedule: give either a threshold or forced boundaries")
    if threshold is not None:
        threshold = threshold.detach().expand(v.shape[0], v.shape[2])
    g = None if log_decay is None else log_decay.detach()
    against = against_triton(k, v, threshold, forced, g)
    if k.shape[-1] * v.shape[-1] > LARGEST:
        against = against or f"its states are {k.shape[-1]} x {v.shape[-1]}, more than {LARGEST} numbers"
    chosen = resolve("dla.schedule", backend, against_triton=against)
    score, *found = make(k.detach(), v.detach(), threshold, forced, g, capacity, reading, rule, chosen == "triton")
    return score, Schedule(*found)


@torch.library.custom_op("mixassay::dla_schedule", mutates_args=())
def make(
    k: Tensor,
    v: Tensor,
    threshold: Tensor | None,
    forced: Tensor | None,
    log_decay: Tensor | None,
    capacity: int,
    reading: str,
    rule: str,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score, and the three members of the schedule. threshold [B, H]."""
    score, boundary = None, forced
    if triton:
        from mixassay.kernels.dla import boundaries_triton, slots_triton  # the package triton may not be there

        with on_device(v):
            if boundary is None:
                assert threshold is not None
                score, boundary = boundaries_triton.scores(k, v, threshold, log_decay, reading)
            boundary, shift, starts = slots_triton.fill(boundary, score, k, v, capacity, rule)
    else:
        if boundary is None:
            assert threshold is not None
            score, boundary = boundaries(k, v, threshold, log_decay, reading=reading)  # type: ignore[arg-type]
        found = slots(boundary, capacity, rule=rule, score=score, k=k, v=v)  # type: ignore[arg-type]
        boundary, shift, starts = (x.contiguous() for x in found)
    score = v.new_zeros(v.shape[:3], dtype=accumulator(k, v)) if score is None else score.contiguous()
    return score, boundary, shift, starts


@make.register_fake
def _(k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, capacity = v.shape[:3], others[3]
    whole = v.new_empty(shape, dtype=torch.int64)
    score = v.new_empty(shape, dtype=accumulator(k, v))
    starts = v.new_empty((*shape, capacity), dtype=torch.int32)
    return score, v.new_empty(shape, dtype=torch.bool), whole, starts


vmap_joins(make)
